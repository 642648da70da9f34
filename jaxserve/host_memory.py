"""Memory of the machine that this process may use: all of it, or what its control groups allow.

A container or a systemd unit with a limit is a control group (cgroup). When it takes more than the
limit, the kernel kills it without a word.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

GROUP_FILES = {"cgroup2": "memory.max", "cgroup": "memory.limit_in_bytes"}


class _Mount(NamedTuple):
    """A mounted hierarchy of control groups."""

    kind: str
    root: str  # group that the folder `point` shows
    point: str


def host_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process may use, swap left out.

    Args:
        root: Folder with the machine's `proc` and `sys`.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *_group_limits(root)])


def _group_limits(root: Path) -> Iterator[int]:
    """Yield the limits of the control groups that this process is in, and of those around them."""
    # A process has one group in the hierarchy of version 2, and one in each hierarchy of version 1,
    # see cgroups(7). Version 1 may have the controller of memory beside a version 2 without it.
    groups = _groups(root)
    for mount in _mounts(root):
        if mount.kind not in groups:
            continue
        folder = root / mount.point.lstrip("/")
        inner = _below(groups[mount.kind], mount.root)
        for group in (inner, *inner.parents):
            limit = _text(folder / group / GROUP_FILES[mount.kind]).strip()
            if limit.isdecimal():  # "max" where there is none, in version 2
                yield int(limit)


def _groups(root: Path) -> dict[str, str]:
    """Return the paths of this process's groups, by the kind of the hierarchy's file system."""
    groups = {}
    for line in _lines(root / "proc/self/cgroup"):
        match line.split(":", 2):
            case ["0", _, path]:
                groups["cgroup2"] = path
            case [_, controllers, path] if "memory" in controllers.split(","):
                groups["cgroup"] = path
    return groups


def _mounts(root: Path) -> Iterator[_Mount]:
    """Yield the mounted hierarchies that can limit memory, as proc(5) describes mountinfo."""
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, system = line.partition(" - ")
        match mount.split(" "), system.split(" "):
            case [_, _, _, shown, point, *_], [kind, _, options] if _limits_memory(kind, options):
                yield _Mount(kind, _unescaped(shown), _unescaped(point))


def _limits_memory(kind: str, options: str) -> bool:
    """Return whether a mounted file system of this kind has the controller of memory."""
    return kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(","))


def _below(group: str, shown: str) -> PurePosixPath:
    """Return a group's path below the one that a mount shows; the empty one if it is not there.

    A container without a namespace of its own for groups sees its full path in /proc, and in /sys
    the part that begins with its own group.
    """
    path = PurePosixPath(group)
    return path.relative_to(shown) if path.is_relative_to(shown) else PurePosixPath()


def _unescaped(path: str) -> str:
    """Return a path of mountinfo, where white space and backslashes are octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def _lines(path: Path) -> list[str]:
    """Return the lines of a file, which may have any bytes in names of folders."""
    return _text(path).split("\n")


def _text(path: Path) -> str:
    """Return what a file says; nothing where it cannot be read, as outside of Linux."""
    try:
        return os.fsdecode(path.read_bytes())
    except OSError:
        return ""
