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
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

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


def _module_beside(name: str) -> ModuleType:
    """Return a module of this folder, which is not on the path: others would hide modules there.

    It is known by its whole name afterwards, so modules that are loaded later can import it without
    the packages around it.
    """
    whole_name = f"jaxserve.structure.{name}"
    spec = spec_from_file_location(whole_name, Path(__file__).with_name(f"{name}.py"))
    assert spec and spec.loader
    module = module_from_spec(spec)
    sys.modules[whole_name] = module
    spec.loader.exec_module(module)
    return module


def definition(kind: str, text: str) -> str:
    """Return the grammar as llguidance takes it; raise ValueError where JSON text is malformed."""
    from llguidance import LLMatcher

    match kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
        case "json_object":
            return definition("json_schema", '{"type": "object"}')
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "choice":
            texts = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
            return LLMatcher.grammar_from_lark("start: " + " | ".join(texts))
    return LLMatcher.grammar_from_lark(text)


class Checker:
    """Answers requests with the `grammar` in llguidance's form, or with one line of `error`."""

    def __init__(self, seconds: float, limits: dict[str, Any]) -> None:
        from llguidance import LLParserLimits, LLTokenizer

        self._seconds = seconds
        self._limits = LLParserLimits(**limits)
        self._bytes = LLTokenizer("byte")
        _module_beside("schema_walk")  # schema_check imports it
        self._schemas = _module_beside("schema_check")

    def answer(self, request: dict[str, str]) -> dict[str, str]:
        """Compile one grammar and return it, or what is wrong with it."""
        _allow_processor_time(self._seconds)
        try:
            return self._checked(request["kind"], request["text"])
        except (ValueError, MemoryError) as error:
            return {"error": _in_one_line(str(error) or type(error).__name__)}

    def _checked(self, kind: str, text: str) -> dict[str, str]:
        from llguidance import LLMatcher

        if problem := self._schemas.problem_of(kind, text):
            return {"error": _in_one_line(problem)}
        grammar = definition(kind, text)
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=self._limits)
        if failed:
            return {"error": _in_one_line(messages[0])}
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
