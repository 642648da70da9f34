"""Parser of flags that refuses in one line."""

import argparse
import sys
from typing import Any, Never

from jaxserve.cli.exits import BAD_INPUT


class Parser(argparse.ArgumentParser):
    """Parser whose errors are one line, like all errors of the programs, without the usage."""

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        """Parse flags and arguments in any order, `MODEL --json PROMPT` for instance."""
        return self.parse_intermixed_args(*args, **kwargs)

    def error(self, message: str) -> Never:
        print(f"error: {message} (--help lists the flags)", file=sys.stderr)
        sys.exit(BAD_INPUT)
