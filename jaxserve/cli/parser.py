"""Parser of flags that refuses in one line."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Never

from jaxserve.cli.exits import BAD_INPUT


class Parser(argparse.ArgumentParser):
    """Parser whose errors are one line, like all errors of the programs, without the usage."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Parse flags and arguments in any order, `MODEL --json PROMPT` for instance.

        With `--`, behind which nothing is a flag, arguments have to stand together: argparse loses
        it where they need not.
        """
        words = list(sys.argv[1:] if args is None else args)
        if "--" in words or self._subparsers:  # which argparse does not parse like that
            return super().parse_args(words, namespace)
        return self.parse_intermixed_args(words, namespace)

    def error(self, message: str) -> Never:
        print(f"error: {message} (--help lists the flags)", file=sys.stderr)
        sys.exit(BAD_INPUT)
