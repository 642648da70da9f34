"""The process that checks grammars: requests in, answers out, a line of JSON each.

Grammars come from clients. Before the server compiles one, it is compiled here, with bounds on
memory and processor time and nothing to lose: a parser that runs out of stack or of time ends this
process alone. It is run by its path and imports nothing of jaxserve.
"""

import json
import math
import resource
import sys
from typing import Any

MAX_ERROR_LETTERS = 300
# Bytes: less than any thread of the server has, which compiles again what was compiled here.
MAX_STACK = 2**20
# White space in JSON: none, a space, or a new line with its indentation. Any amount of it could go
# on for ever.
JSON_OPTIONS: Any = {
    "lenient": False,
    "coerce_one_of": False,
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": r"( |\n[ ]{0,32})?",
}


def definition(kind: str, text: str) -> str:
    """The grammar as llguidance takes it. ValueError for what is not even JSON."""
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
    """Answers requests; each answer has `error`, one line, when there is no `grammar`."""

    def __init__(self, seconds: float, limits: dict[str, Any]) -> None:
        from llguidance import LLParserLimits

        self._seconds, self._limits = seconds, LLParserLimits(**limits)

    def answer(self, request: dict[str, str]) -> dict[str, str]:
        from llguidance import LLMatcher

        _allow_processor_time(self._seconds)
        try:
            grammar = definition(request["kind"], request["text"])
            failed, told = LLMatcher.validate_grammar_with_warnings(grammar, limits=self._limits)
        except (ValueError, MemoryError) as error:
            return {"error": _in_one_line(str(error) or type(error).__name__)}
        return {"error": _in_one_line(told[0])} if failed else {"grammar": grammar}


def _in_one_line(text: str) -> str:
    words = " ".join(text[: 4 * MAX_ERROR_LETTERS].split())
    return words if len(words) <= MAX_ERROR_LETTERS else words[:MAX_ERROR_LETTERS] + " ..."


def _allow_processor_time(seconds: float) -> None:
    """From now on, a second more than the one who waits allows: the kernel's word, should nobody be
    there to kill.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def main(seconds: str, memory: str, limits: str) -> None:
    """seconds: of processor time for an answer; memory: address space in bytes; limits: of the
    parser, as JSON.
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
