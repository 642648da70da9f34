"""Entry point of `python -m checkpoints.convert SRC DST`; the work is jaxserve.loading.convert.

The import below is the one arrow from this package to jaxserve. It is taken only when the command
runs: importing this module loads nothing of jaxserve.
"""

import sys

if __name__ == "__main__":
    from jaxserve.loading.convert import main

    sys.exit(main())
