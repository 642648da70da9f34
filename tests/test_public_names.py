"""Whatever users call by name is in tests/golden/public_names.json, as the code has it.

A name may be added; one is taken away, or changed, only after a release that deprecates it. Modules
and private names may move at any time: tests/public_names/ learns where to, and the listing stays.

The .proto files are not in the listing: `buf breaking` (make check) compares them with
tests/golden/jaxserve_v1.binpb.
"""

import json
import re
from pathlib import Path

import pytest

from tests.public_names import SURFACES, differences, public_names, written
from tests.public_names.programs import PROGRAMS
from tests.public_names.requests import NO_MODEL

ROOT = Path(__file__).parent.parent
LISTING = ROOT / "tests" / "golden" / "public_names.json"
HOW = f"""
A name may be added; one is taken away only after a release that deprecates it.
To write the listing anew: python -m tests.public_names > {LISTING.relative_to(ROOT)}"""


def test_the_listing_says_what_the_code_has() -> None:
    found, text = public_names(), LISTING.read_text("utf-8")
    if told := differences(json.loads(text), found):
        pytest.fail(told + HOW, pytrace=False)
    assert text == written(found), "the listing has the right names in another form" + HOW


def test_the_programs_are_those_of_the_documents() -> None:
    """PROGRAMS has all that users are told to run; benchmarks/ is for who works on this project."""
    texts = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").glob("*.*")]
    text = "\n".join(path.read_text("utf-8") for path in texts)
    modules = set(re.findall(r"python -m ((?:jaxserve|checkpoints)(?:\.\w+)*)", text))
    commands = {
        f"jaxserve.{name}" for name in re.findall(r"(?:bin/|^|`|\| )jaxserve (\w+)", text, re.M)
    }
    assert modules | commands == set(PROGRAMS)


def test_the_listing_is_complete() -> None:
    """Nothing is listed that would say: here the code was asked in vain."""
    listed = json.loads(LISTING.read_text("utf-8"))
    assert listed.keys() == SURFACES.keys() and all(listed.values())
    assert NO_MODEL not in listed["http request fields"].values()
    refused = [name for name in listed["http response fields"] if " error." in name]
    assert refused and all(name.startswith("any refusal ") for name in refused)


def test_what_is_told_of_two_listings() -> None:
    old = {"flags": {"serve --port": "value, default 1", "serve --host": "value"}, "metrics": {}}
    new = {"flags": {"serve --port": "value, default 2"}, "metrics": {"ready": "gauge"}}
    assert differences(old, new).splitlines() == [
        "names that vanished:",
        "  flags: serve --host (value)",
        "names that changed:",
        "  flags: serve --port: was (value, default 1), is (value, default 2)",
        "names that are new:",
        "  metrics: ready (gauge)",
    ]
    assert differences(old, old) == ""
