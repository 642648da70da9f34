"""Program that checks grammars: reads requests and writes answers, a line of JSON each.

Grammars come from clients. Before the server compiles one, this process does, with bounds on memory
and processor time and no state worth protecting: a parser that runs out of stack or of time ends
this process alone. The program is run by its path and imports nothing of jaxserve but the modules
beside it that read JSON schemas, which import nothing else of it.
"""

import json
import math
import resource
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Final

MAX_ERROR_LETTERS = 300
# Bytes of stack. The server compiles again what was compiled here, and every thread of it has more.
MAX_STACK = 2**20
# White space in JSON is none, a space, or a line end with indentation. A model that may write any
# amount of it may write nothing else until max_tokens.
JSON_OPTIONS: Any = {
    "lenient": False,
    "coerce_one_of": False,
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": r"( |\n[ ]{0,32})?",
}
ADVICE: Final = " Enable 'coerce_one_of'"  # of the library: an option that nobody can set here
ROOM: Final = "jaxserve.structure.schemas"


def _module_of_schemas(name: str) -> ModuleType:
    """Return a module of the room beside this file.

    This folder is not on the path, since others would hide modules there. The room is loaded by its
    place and known by its whole name afterwards, so that its modules import each other without the
    packages around it.
    """
    if ROOM not in sys.modules:
        place = Path(__file__).with_name("schemas") / "__init__.py"
        spec = spec_from_file_location(ROOM, place)
        assert spec and spec.loader
        room = module_from_spec(spec)
        sys.modules[ROOM] = room
        spec.loader.exec_module(room)
    return import_module(f"{ROOM}.{name}")


def definition(kind: str, text: str) -> str:
    """Return the grammar as llguidance takes it; raise ValueError where a schema is refused."""
    from llguidance import LLMatcher

    texts = _module_of_schemas("texts")
    taken = texts.as_the_library_takes_it(kind, text, JSON_OPTIONS)
    match kind:
        case "json_schema" | "json_object":
            return LLMatcher.grammar_from_json_schema(taken)
        case "regex":
            return LLMatcher.grammar_from_regex(taken)
        case "choice":
            choices = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(taken))
            return LLMatcher.grammar_from_lark("start: " + " | ".join(choices))
    return LLMatcher.grammar_from_lark(taken)


def framed(grammar: str, frame: str) -> str:
    """Return a grammar in llguidance's form, in which it is @body of another one in Lark."""
    body = {"lark_grammar": grammar}
    if grammar.lstrip().startswith("{"):
        (body,) = json.loads(grammar)["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": frame}, body | {"name": "body"}]})


class Checker:
    """Answers requests with the `grammar` in llguidance's form, or with one line of `error`."""

    def __init__(self, seconds: float, limits: dict[str, Any]) -> None:
        from llguidance import LLParserLimits, LLTokenizer

        self._seconds = seconds
        self._limits = LLParserLimits(**limits)
        self._bytes = LLTokenizer("byte")
        _module_of_schemas("texts")  # loaded before the first request, whose time is bounded

    def answer(self, request: dict[str, str]) -> dict[str, str]:
        """Compile one grammar and return it, or what is wrong with it."""
        _allow_processor_time(self._seconds)
        try:
            return self._checked(**request)
        except (ValueError, MemoryError) as error:
            return {"error": _in_one_line(str(error) or type(error).__name__)}

    def _checked(self, kind: str, text: str, frame: str) -> dict[str, str]:
        from llguidance import LLMatcher

        grammar = definition(kind, text)
        if frame:
            grammar = framed(grammar, frame)
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=self._limits)
        if failed:
            return {"error": _in_one_line(messages[0].partition(ADVICE)[0])}
        # What makes the lexer, with which the server would otherwise be the first to begin.
        matcher = LLMatcher(self._bytes, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return {"grammar": grammar}


def _in_one_line(text: str) -> str:
    """Return a text in one line of at most MAX_ERROR_LETTERS characters, and dots if it was cut."""
    words = " ".join(text[: 4 * MAX_ERROR_LETTERS].split())
    if len(words) <= MAX_ERROR_LETTERS:
        return words
    return words[:MAX_ERROR_LETTERS] + " ..."


def _allow_processor_time(seconds: float) -> None:
    """Have the kernel end this process after `seconds` more of processor time, and a second.

    The parent waits `seconds` of clock time and then kills; this limit works without a parent.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def main(seconds: str, memory: str, limits: str) -> None:
    """Answer requests until standard input ends.

    `seconds` is the processor time for an answer, `memory` the address space in bytes, and `limits`
    the parser's limits as JSON.
    """
    resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
    resource.setrlimit(
        resource.RLIMIT_STACK, (MAX_STACK, resource.getrlimit(resource.RLIMIT_STACK)[1])
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    checker = Checker(float(seconds), json.loads(limits))
    print("{}", flush=True)  # ready
    for line in sys.stdin.buffer:
        print(json.dumps(checker.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
