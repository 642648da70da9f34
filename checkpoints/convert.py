"""Former name of `jaxserve convert SRC DST`, for a checkout.

The import below is the one arrow from this package to jaxserve. It is taken only when the command
runs: importing this module loads nothing of jaxserve.
"""

import sys

if __name__ == "__main__":
    from jaxserve.convert import main

    sys.exit(main())
