"""jaxserve client: print a server's answer to a prompt as it arrives."""

import sys

from jaxserve.sigint import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()
    # Imported only now: importing gRPC takes long enough for somebody to press Ctrl-C meanwhile.
    from jaxserve.client.program import main

    sys.exit(main())
