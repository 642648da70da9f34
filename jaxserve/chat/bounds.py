"""Bounds of conversations: whatever an answer holds, the history of a later request may hold.

A call of a function whose arguments are beyond them is no call but content. A call that is told
while it is written (Reading.certain) cannot be taken back: arguments that the model writes as JSON
are told as they are, even beyond the bounds, and no later request may have them. Where it writes
them one by one as text, a value beyond the bounds is told as a string. In what the model said, a
character that no request may have becomes U+FFFD when it comes back.
"""

from typing import Final

MAX_MESSAGES: Final = 4096
# Levels of objects and arrays in JSON text, which is parsed recursively.
MAX_TEXT_DEPTH: Final = 24
# Levels inside a message: those of a call's arguments, and the four above them.
MAX_DEPTH: Final = 32
# Digits of an integer. Python itself refuses to parse more than 4,300, in quadratic time.
MAX_DIGITS: Final = 1000
