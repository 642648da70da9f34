"""Program that runs a command which ends whenever the process that started it does.

Arguments: the id of the process that starts it, and the command. Linux kills the command, which
takes this process over, when the thread that started it has ended (prctl(2), PR_SET_PDEATHSIG).
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become the command of the arguments."""
    parent, *command = sys.argv[1:]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent):  # it has ended since
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
