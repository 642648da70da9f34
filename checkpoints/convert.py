"""Former name of `jaxserve convert SRC DST`, for a checkout.

It imports nothing else of this folder, which would be imported a second time as a part of jaxserve.
"""

import sys

from jaxserve.sigint import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()
    from jaxserve.convert import main

    sys.exit(main())
