"""The smaller of the machine's memory and of what the control groups allow.

Origin: vllm-project/vllm#45086, a cache sized by a host of 693 GiB in a container with 150. The
files are as Linux shows them: the examples of cgroups(7) and proc(5), and of containers that
Docker, Podman and systemd start.
"""

import os
from pathlib import Path

import pytest

from jaxserve.host_memory import host_memory

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
LIMIT = 2**26  # less than any machine that runs this has
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw,nsdelegate"
V1 = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory"
HYBRID = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw"
OTHER = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct"
NO_LIMIT_V1 = "9223372036854771712\n"


def fake(root: Path, groups: str, mounts: list[str], files: dict[str, str]) -> Path:
    """Write what a machine shows below `root`."""
    contents = {"proc/self/cgroup": groups, "proc/self/mountinfo": "\n".join(mounts)} | files
    for name, content in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.fsencode(content))
    return root


CASES = {
    "v2, a container with its own namespace": (
        "0::/\n",
        [V2],
        {"sys/fs/cgroup/memory.max": f"{LIMIT}\n"},
    ),
    "v2, a unit inside of a slice that has the limit": (
        "0::/system.slice/jaxserve.service\n",
        [V2],
        {
            "sys/fs/cgroup/system.slice/memory.max": f"{LIMIT}\n",
            "sys/fs/cgroup/system.slice/jaxserve.service/memory.max": "max\n",
        },
    ),
    "v2, the smallest of several": (
        "0::/a/b\n",
        [V2],
        {
            "sys/fs/cgroup/a/memory.max": f"{2 * LIMIT}\n",
            "sys/fs/cgroup/a/b/memory.max": f"{LIMIT}\n",
        },
    ),
    "v2, beside names of other encodings and with spaces": (
        "0::/a b\n\n",
        [
            "29 1 0:25 / /media/caf\udce9 rw - vfat /dev/sdb rw",
            "28 1 0:24 / /media/a\x0cb rw - vfat /dev/sdc rw",
            "30 23 0:26 / /sys/fs/my\\040groups rw - cgroup2 cgroup rw",
        ],
        {"sys/fs/my groups/a b/memory.max": f"{LIMIT}\n"},
    ),
    "v1, a group of the machine": (
        "4:memory:/jobs/one\n1:cpu,cpuacct:/\n0::/\n",
        [OTHER, V1.format(root="/"), HYBRID],
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_V1,
            "sys/fs/cgroup/memory/jobs/one/memory.limit_in_bytes": f"{LIMIT}\n",
        },
    ),
    "v1, a container that sees its path on the machine": (
        "4:memory:/docker/3f1c\n1:cpu,cpuacct:/docker/3f1c\n0::/docker/3f1c\n",
        [OTHER, V1.format(root="/docker/3f1c")],
        {"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{LIMIT}\n"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_group_with_a_limit(case: str, tmp_path: Path) -> None:
    assert host_memory(fake(tmp_path, *CASES[case])) == LIMIT


@pytest.mark.parametrize(
    ("groups", "mounts", "files"),
    [
        ("0::/\n", [V2], {}),  # the group of all groups has no such file
        ("0::/a\n", [V2], {"sys/fs/cgroup/a/memory.max": "max\n"}),
        (
            "4:memory:/\n",
            [V1.format(root="/")],
            {"sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_V1},
        ),
        ("4:memory:/\n", [OTHER], {}),  # a container that shows none of it
    ],
)
def test_no_limit(groups: str, mounts: list[str], files: dict[str, str], tmp_path: Path) -> None:
    assert host_memory(fake(tmp_path, groups, mounts, files)) == MACHINE


def test_a_system_without_control_groups(tmp_path: Path) -> None:
    assert host_memory(tmp_path) == MACHINE


def test_this_machine() -> None:
    assert 2**28 < host_memory() <= MACHINE
