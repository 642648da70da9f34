"""Links in the documents lead somewhere, and their commands are commands."""

import ast
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from jaxserve.programs import PROGRAMS, parser

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *(
            path
            for top in ("docs", "deploy", "benchmarks", "training")
            for path in (ROOT / top).rglob("*.md")
        ),
        ROOT / "checkpoints" / "bundled" / "README.md",
    ]
)
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
SOURCES = ("jaxserve", "sharding", "pallas_kernels", "checkpoints")
ELSEWHERE = ("http://", "https://", "mailto:")
MODULES = {module.removesuffix(".__main__"): name for name, (module, _) in PROGRAMS.items()}


def anchors(path: Path) -> set[str]:
    """Return what a link's `#` may name in a document, as GitHub makes it of headings."""
    headings = re.findall(r"^#+ +(.+)$", without_blocks(path.read_text()), re.M)
    words = [re.sub(r"[^\w\- ]", "", heading.lower().replace("`", "")) for heading in headings]
    return {word.strip().replace(" ", "-") for word in words}


def without_blocks(text: str) -> str:
    """Return a document without its blocks of code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def links(text: str) -> list[str]:
    """Return the targets of the links outside of code."""
    return re.findall(r"\]\(([^()\s]+)\)", re.sub(r"`[^`\n]*`", "", without_blocks(text)))


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    path = ROOT / name
    for target in links(path.read_text()):
        if target.startswith(ELSEWHERE):
            continue
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), f"{name}: {target}"
        assert not anchor or anchor in anchors(found), f"{name}: {target}"


def test_every_document_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    named = {(index.parent / target).resolve() for target in links(index.read_text())}
    documents = {path for path in (ROOT / "docs").glob("*.md") if path != index}
    documents |= {path for path in ROOT.glob("*.md") if path.name != "README.md"}
    assert documents <= named, documents - named


def test_the_readme_names_every_program() -> None:
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"\bjaxserve (\w+)", text))
    assert set(PROGRAMS) <= named, set(PROGRAMS) - named


def test_the_readme_says_why_something_is_not_there() -> None:
    """A reason is more than that it is not planned, implemented or tested."""
    _, _, after = (ROOT / "README.md").read_text().partition("## What is not here\n")
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", after.partition("\n## ")[0], re.M)[1:]
    subjects = "\n".join(subject for subject, _ in rows)
    for word in ("images", "pipeline and context", "GGUF", "Windows", "Apple GPUs", "training"):
        assert word in subjects
    bare = re.compile(r"^not (planned|implemented|tested)[^:]*$|^not \w+: (\w+ ){0,4}\w+$")
    assert not [why for _, why in rows if bare.match(why)]


def commands(text: str) -> Iterator[str]:
    """Yield the commands of shell blocks, each part of a pipe by itself, without comments."""
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S):
        unfinished = ""
        for line in block.replace("\\\n", " ").splitlines():
            try:
                parts = words_of(unfinished + line)
                unfinished = ""
            except ValueError:  # a quotation goes on in the next line
                unfinished += line + "\n"
                continue
            yield from parts
        assert not unfinished, "a quotation has no end"
    for code in re.findall(r"`((?:\.venv/bin/)?jaxserve \w+ [^`\n]*)`", without_blocks(text)):
        yield from words_of(code.replace("\\|", "|"))


def words_of(line: str) -> list[str]:
    """Return the commands of a line; ValueError where a quotation is open at its end."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("|&;<>"):
            found.append([])
        else:
            found[-1].append(word)
    return [shlex.join(words) for words in found]


def program_of(words: list[str]) -> tuple[str, list[str]] | None:
    """Return the program of jaxserve that a command starts, and its arguments."""
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words = words[1:]
    if not words:
        return None
    if Path(words[0]).name == "jaxserve":
        return words[1] if len(words) > 1 else "", words[2:]
    if Path(words[0]).name.startswith("python") and words[1:2] == ["-m"] and words[2:]:
        if words[2].split(".")[0] != "jaxserve":
            return None
        return MODULES.get(words[2], words[2]), words[3:]
    return None


def programs_in(name: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the programs that a document starts, with their arguments."""
    for command in commands((ROOT / name).read_text()):
        found = program_of(shlex.split(command))
        # A sentence about a flag of plan leaves out --topology, which a command needs.
        is_mentioned = found and found[0] == "plan" and "--topology" not in command
        if found and not is_mentioned and "..." not in command:
            yield found


def test_there_are_commands() -> None:
    assert sum(len(list(programs_in(name))) for name in NAMES) > 50
    assert not [name for name in NAMES if "```bash" in (ROOT / name).read_text()], "write ```sh"


@pytest.mark.parametrize("name", NAMES)
def test_commands_are_commands(name: str) -> None:
    """Their flags exist, and have values that the parsers take; nothing runs."""
    for program, arguments in programs_in(name):
        assert is_parsed(program, arguments), f"{name}: {program} {arguments}"


def is_parsed(program: str, arguments: list[str]) -> bool:
    """Return whether a program takes these arguments."""
    try:
        if program in PROGRAMS:
            import_module(PROGRAMS[program][0]).parser().parse_args(arguments)
        elif program != "jaxserve":
            parser().parse_args([program])
    except SystemExit as end:
        return end.code == 0
    return True


@pytest.mark.parametrize("name", NAMES)
def test_python_is_python(name: str) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(), re.M | re.S)
    for block in blocks:
        ast.parse(block, name)


@pytest.mark.parametrize("name", NAMES)
def test_targets_of_make_are_targets(name: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    text = (ROOT / name).read_text()
    named = [line.split()[1] for line in commands(text) if line.startswith("make ")]
    named += re.findall(r"`make ([a-z-]+)", text)
    for target in named:
        assert re.search(rf"^{re.escape(target)}:", makefile, re.M), f"{name}: make {target}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 170


def texts_in(path: Path) -> Iterator[str]:
    """Yield the strings of a module but docstrings, those of an f-string one by one."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            yield str(node.value)


def test_troubleshooting_quotes_messages_of_the_code() -> None:
    texts = "\0".join(
        text for top in SOURCES for path in (ROOT / top).rglob("*.py") for text in texts_in(path)
    )
    quoted = re.findall(r"\*\*`([^`]+)`\*\*", (ROOT / "docs" / "troubleshooting.md").read_text())
    assert len(quoted) > 60
    missing = [message for message in quoted if " ".join(message.split()) not in texts]
    assert not missing, missing
