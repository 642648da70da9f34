"""The one error that reading or writing a checkpoint raises."""

HEAD, TAIL = 1500, 500  # characters of a message that are kept from its start and from its end


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message is one line naming the file, the problem and the
    fix.

    Messages quote names found in the file, which anybody may have written: line breaks and other
    unprintable characters become spaces, and the middle of an overlong message is left out, so that
    one error stays one line.
    """

    def __init__(self, message: str) -> None:
        if len(message) > HEAD + TAIL:
            message = f"{message[:HEAD]} ... {message[-TAIL:]}"
        super().__init__("".join(char if char.isprintable() else " " for char in message))
