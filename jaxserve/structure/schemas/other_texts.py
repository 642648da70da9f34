"""Regular expression of all texts but some: a grammar has no other way to exclude texts."""

from collections.abc import Iterable
from typing import Final

ANY: Final = "(?s:.)*"
END: Final = ""  # key of a node at which a text ends

type Node = dict[str, "Node"]


def other_texts(texts: Iterable[str]) -> str:
    """Return an expression, in the syntax of Rust's regex crate, that matches all other texts.

    Texts with NUL are left out as well; see patterns.py. The expression follows the letters that
    the texts begin with as a tree: whatever leaves the tree, ends inside of it, or goes on behind
    the end of a text is another one.
    """
    root: Node = {}
    for text in texts:
        node = root
        for letter in text:
            node = node.setdefault(letter, {})
        node[END] = {}
    return f"^{_leaving(root)}$"


def _leaving(root: Node) -> str:
    """Return the expression of what is none of the texts of a tree, without recursion."""
    written: list[str] = []
    # Nodes to write, and pieces of the expression that stand between them.
    waiting: list[Node | str] = [root]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            written.append(item)
            continue
        letters = [letter for letter in item if letter != END]
        written.append("(?:" if END in item else "(?:|")
        none_of = "".join(map(_escaped, letters))
        written.append(rf"[^\x00{none_of}]{ANY}" if letters else f"(?s:.){ANY}")
        waiting.append(")")
        for letter in reversed(letters):
            waiting += [item[letter], f"|{_escaped(letter)}"]
    return "".join(written)


def _escaped(letter: str) -> str:
    if letter.isascii() and letter.isalnum():
        return letter
    return f"\\x{{{ord(letter):x}}}"
