"""Habits of the sources that a machine can see: first words of comments, one assignment a line.

A docstring's first line is read alone, in a tooltip or an index. Words that lean on the name above
it, or on the docstring before, do not stand alone.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxserve", "sharding", "pallas_kernels", "checkpoints")
LEANING = re.compile(
    r"(The same|Of|As|Whether|Those|That|What|Who|Where|When|Likewise|And|Or|But|It|Its|Their|None"
    r"|So|If|For)\b"
)
# First words of comments in .proto files that lean on the name below, or on the comment before.
LEANING_IN_PROTO = re.compile(
    r"(The same|Of|As|Those|That|When|Likewise|And|Or|But|It|Its|Their|None|Nothing|So|If|For|From"
    r"|With|Without|Between|By|In|News|Such)\b"
)
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Yield path and syntax tree of every source file that is not generated."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "_pb2" not in path.name:
                yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def leaning_docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and first line of docstrings that do not stand alone."""
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, Documented) else None
        if text and LEANING.match(text):
            yield getattr(node, "lineno", 1), text.splitlines()[0]


def leaning_comments(proto: str) -> Iterator[tuple[int, str]]:
    """Yield line and first line of comments in a .proto file that do not stand alone."""
    before = ""
    for number, line in enumerate(map(str.strip, proto.splitlines()), start=1):
        text = line.removeprefix("// ")
        if line.startswith("// ") and not before.startswith("//") and LEANING_IN_PROTO.match(text):
            yield number, text
        before = line


def packed_assignments(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield assignments such as `a, b = 1, 2`; a swap of two names is none."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            targets = node.targets[0]
            if isinstance(targets, ast.Tuple) and not _is_swap(targets, node.value):
                yield node.lineno, ast.unparse(node)


def run_in_parameters(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield parameters and fields that a paragraph describes as `name: text.`

    Fields are described beside them, parameters in a section `Args:` or within a sentence.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        names = _parameters(node)
        for sentence in re.split(r"(?<=[.;])\s+|\n\n", _without_sections(node)):
            described = re.match(r"`?(\w+)`?((?:,\s+`?\w+`?)*(?:\s+and\s+`?\w+`?)?): ", sentence)
            if described and described[1] in names:
                yield node.lineno, sentence


def unknown_parameters(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield entries of the `Args:` of functions that are not among their parameters."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        section = re.search(r"^Args:\n((?: +.*\n?|\n)+)", ast.get_docstring(node) or "", re.M)
        entries = re.findall(r"^    \**(\w+):", section[1], re.M) if section else ()
        yield from ((node.lineno, entry) for entry in entries if entry not in _parameters(node))


def _parameters(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the names of a function's parameters, or of a class's fields and parameters."""
    if isinstance(node, ast.ClassDef):
        made = [each for each in node.body if isinstance(each, ast.FunctionDef)]
        names = {name for each in made if each.name == "__init__" for name in _parameters(each)}
        fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
        return names | {field.id for field in fields if isinstance(field, ast.Name)}
    rest = [arg for arg in (node.args.vararg, node.args.kwarg) if arg]
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, *rest]
    return {arg.arg for arg in every}


def _without_sections(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    text = ast.get_docstring(node) or ""
    return re.sub(r"^[A-Z]\w+:\n(?:    .*\n?|\n)+", "", text, flags=re.M)


def _is_swap(targets: ast.Tuple, values: ast.Tuple) -> bool:
    return {ast.unparse(x) for x in targets.elts} == {ast.unparse(x) for x in values.elts}


def test_first_lines_of_docstrings_stand_alone() -> None:
    found = [
        f"{path}:{line} {text}"
        for path, tree in sources()
        for line, text in leaning_docstrings(tree)
    ]
    assert not found, "\n".join(found)


def test_first_lines_of_comments_in_proto_files_stand_alone() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {text}"
        for path in sorted((ROOT / "jaxserve").rglob("*.proto"))
        for line, text in leaning_comments(path.read_text())
    ]
    assert not found, "\n".join(found)


def test_one_assignment_a_line() -> None:
    found = [
        f"{path}:{line} {text}"
        for path, tree in sources()
        for line, text in packed_assignments(tree)
    ]
    assert not found, "\n".join(found)


def test_parameters_are_documented_in_one_way() -> None:
    found = [
        f"{path}:{line} {text}"
        for path, tree in sources()
        for line, text in [*run_in_parameters(tree), *unknown_parameters(tree)]
    ]
    assert not found, "\n".join(found)


def test_the_checks_notice() -> None:
    tree = ast.parse('def f():\n    """Of the row."""\n    a, b = 1, 2\n    a, b = b, a\n')
    assert list(leaning_docstrings(tree)) == [(1, "Of the row.")]
    proto = "// A message.\n// As long as it is.\nmessage A {\n  // As above.\n  string b = 1;\n}\n"
    assert list(leaning_comments(proto)) == [(4, "As above.")]
    assert list(packed_assignments(tree)) == [(3, "a, b = (1, 2)")]
    run_in = 'def f(a, b):\n    """Add.\n\n    a: the one. `b` is the other.\n    """\n'
    assert list(run_in_parameters(ast.parse(run_in))) == [(1, "a: the one.")]
    section = 'def f(a):\n    """Add.\n\n    Args:\n        a: One.\n        c: None.\n    """\n'
    assert list(run_in_parameters(ast.parse(section))) == []
    assert list(unknown_parameters(ast.parse(section))) == [(1, "c")]
