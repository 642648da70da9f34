"""Parser of flags that refuses in one line."""

import argparse
import sys
from typing import Never

from jaxserve.cli.exits import BAD_INPUT


class Parser(argparse.ArgumentParser):
    """Parser whose errors are one line, like all errors of the programs, without the usage."""

    def error(self, message: str) -> Never:
        print(f"error: {message} (--help lists the flags)", file=sys.stderr)
        sys.exit(BAD_INPUT)
