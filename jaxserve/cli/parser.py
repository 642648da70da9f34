"""How the programs read their flags."""

import argparse
import sys
from typing import Never

from jaxserve.cli.exits import BAD_INPUT


class Parser(argparse.ArgumentParser):
    """What it refuses is one line, as all that the programs refuse; --help shows the usage."""

    def error(self, message: str) -> Never:
        print(f"error: {message} (--help lists the flags)", file=sys.stderr)
        sys.exit(BAD_INPUT)
