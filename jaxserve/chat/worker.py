"""Program that renders chat templates: reads requests and writes answers, a line of JSON each.

Templates come with checkpoints, and so from untrusted authors. This process has Jinja's immutable
sandbox, bounds on memory and processor time, and no state worth protecting: its parent kills it
when an answer takes too long. It is run by its path and imports nothing of jaxserve, so that it
starts in a tenth of a second.

The environment is the one that published templates are written for, that of transformers: blocks
trimmed, loop controls, `raise_exception`, `strftime_now`, `tojson` that escapes no HTML, `{%
generation %}` blocks.
"""

import json
import math
import re
import resource
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CACHED_TEMPLATES = 8
ASKING = ("defined", "undefined", "none")  # tests of whether a variable is there
MAX_ERROR_LETTERS = 500


class TooLong(Exception):
    """The rendered text is over its bound."""


class Refusal(TemplateError):
    """Message that a template raises by raise_exception, meant for the client."""


class Generation(Extension):
    """Blocks {% generation %} ... {% endgeneration %}, which render as what they contain.

    Templates mark answers for training with them.
    """

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


def environment(mark: str) -> ImmutableSandboxedEnvironment:
    """Return the Jinja environment, whose `tojson` leaves the character `mark` unescaped."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = _json_filter(mark)
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return made


def _raise_exception(message: object) -> NoReturn:
    raise Refusal(str(message))


def _json_filter(mark: str) -> Callable[..., str]:
    """Return the filter `tojson`, which never escapes HTML nor `mark`."""
    foreign = re.compile(f"[^\0-\x7f{mark}]")

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        text = json.dumps(
            value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
        )
        if not ensure_ascii:
            return text
        return foreign.sub(lambda letter: json.dumps(letter[0])[1:-1], text)

    return tojson


class Renderer:
    """Answers requests.

    An answer that failed has one line as `error`, and says whether the template itself `refused`.
    """

    def __init__(self, seconds: float, max_bytes: int, mark: str) -> None:
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._environment = environment(mark)
        self._compiled: Callable[[str], Template] = lru_cache(CACHED_TEMPLATES)(
            self._environment.from_string
        )

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Render a template with the request's variables, or describe it where there are none."""
        _allow_processor_time(self._seconds)
        try:
            if "variables" in request:
                return {"text": self.render(request["template"], request["variables"])}
            return self.strings(request["template"])
        except Exception as error:
            return {"error": explain(error), "refused": isinstance(error, Refusal)}

    def render(self, template: str, variables: dict[str, Any]) -> str:
        """Return the text that a template makes of its variables; raise TooLong past the bound."""
        pieces = []
        size = 0
        for piece in self._compiled(template).generate(variables):
            size += len(piece)
            pieces.append(piece)
            if size > self._max_bytes:  # size is in characters, of one byte at least
                break
        text = "".join(pieces)
        if size > self._max_bytes or len(text.encode("utf-8")) > self._max_bytes:
            raise TooLong(f"it writes more than {self._max_bytes} bytes")
        return text

    def _undeclared(self, template: str) -> set[str]:
        # From a tree of its own, which this function changes.
        found = meta.find_undeclared_variables(self._environment.parse(template))
        return found - self._environment.globals.keys()

    def strings(self, template: str) -> dict[str, Any]:
        """Return the facts about a template that renderer.Look describes."""
        tree = self._environment.parse(template)
        seeking = [
            *tree.find_all(nodes.Compare),
            *(call for call in tree.find_all(nodes.Call) if _is_method(call)),
        ]
        attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
        variables = _given(tree) & self._undeclared(template)
        return {
            "words": sorted(set(_constants(tree))),
            "attributes": sorted(attributes),
            "variables": sorted(variables),
            "sought": sorted({text for node in seeking for text in _constants(node)}),
            "takes_tools": any(name.name == "tools" for name in tree.find_all(nodes.Name)),
            "joins_arguments": any(
                _joins(node, "arguments") for node in tree.find_all((nodes.Add, nodes.Concat))
            ),
        }


def _given(tree: nodes.Template) -> set[str]:
    """Return the names that a template reads and that may come from outside of it.

    Names that it sets itself are none, unless it asks whether they are there, as for those of which
    it sets a default.
    """
    names = list(tree.find_all(nodes.Name))
    own = {name.name for name in names if name.ctx in ("store", "param")}
    asking = [
        *(node for node in tree.find_all(nodes.Test) if node.name in ASKING),
        *(node for node in tree.find_all(nodes.Filter) if node.name in ("default", "d")),
    ]
    asked = {node.node.name for node in asking if isinstance(node.node, nodes.Name)}
    for node in tree.find_all(nodes.Assign):
        if isinstance(node.target, nodes.Name):
            read = {name.name for name in node.node.find_all(nodes.Name)}
            asked |= read & {node.target.name}
    return {name.name for name in names} - (own - asked)


def _is_method(call: nodes.Call) -> bool:
    """Return whether the call is one of a method, such as content.split('</think>')."""
    return isinstance(call.node, nodes.Getattr)


def _joins(node: nodes.Node, name: str) -> bool:
    """Return whether an attribute of this name is an operand of the node, a sum of texts."""
    for part in node.iter_child_nodes():
        match part:
            case nodes.Getattr(attr=key) | nodes.Getitem(arg=nodes.Const(value=key)):
                if key == name:
                    return True
    return False


def _constants(node: nodes.Node) -> Iterator[str]:
    """Yield the strings in the node's code."""
    return (
        constant.value for constant in node.find_all(nodes.Const) if isinstance(constant.value, str)
    )


def explain(error: Exception) -> str:
    """Return one line that tells the client what is wrong."""
    match error:
        case Refusal():
            reason = f"the chat template refuses: {error}"
        case TemplateSyntaxError():
            reason = f"the chat template is no valid Jinja (line {error.lineno}: {error.message})"
        case MemoryError():
            reason = "the chat template needs too much memory"
        case RecursionError():
            reason = "the chat template recurses without end, or is nested too deep"
        case _:
            reason = f"the chat template failed: {error or type(error).__name__}"
    return " ".join(reason[:MAX_ERROR_LETTERS].split())


def _allow_processor_time(seconds: float) -> None:
    """Have the kernel end this process after `seconds` more of processor time, and a second.

    The parent waits `seconds` of clock time and then kills; this limit works without a parent.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def main(seconds: str, max_bytes: str, memory: str, mark: str) -> None:
    """Answer requests until standard input ends.

    `seconds` is the processor time for an answer, `max_bytes` the size of a rendered text, `memory`
    the address space in bytes, and `mark` the character of tokenizer.MARK.
    """
    resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    renderer = Renderer(float(seconds), int(max_bytes), mark)
    print("{}", flush=True)  # ready
    for line in sys.stdin.buffer:
        print(json.dumps(renderer.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
