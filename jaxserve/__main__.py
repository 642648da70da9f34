"""Command `jaxserve`, also `python -m jaxserve`."""

import sys

from jaxserve.sigint import exit_on_interrupt


def main() -> int:
    """Run the program that the command line names; return its exit code."""
    exit_on_interrupt()
    # Imported only now: until the line above has run, Ctrl-C is a traceback.
    from jaxserve.programs import start

    return start(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
