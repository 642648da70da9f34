"""The error that reading or writing a checkpoint raises."""

from pathlib import Path

# Characters that are kept from the start and from the end of an overlong message.
HEAD = 1500
TAIL = 500


class CheckpointError(ValueError):
    """A checkpoint cannot be used; one line names the file, the problem and the fix.

    Messages quote names from files of unknown origin. Line breaks and other unprintable characters
    become spaces, and the middle of an overlong message is left out, so that an error stays one
    line.
    """

    def __init__(self, message: str) -> None:
        if len(message) > HEAD + TAIL:
            message = f"{message[:HEAD]} ... {message[-TAIL:]}"
        super().__init__("".join(char if char.isprintable() else " " for char in message))


def unreadable(path: str | Path, error: OSError) -> CheckpointError:
    """Return the error for a file that the system does not let the program read."""
    return CheckpointError(f"{path} cannot be read ({error}); check its permissions and the disk")
