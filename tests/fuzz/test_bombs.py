import json
import subprocess
import sys

import pytest

from tests.e2e.running import ROOT
from tests.fuzz.bombs import BOMBS

pytestmark = [pytest.mark.measures, pytest.mark.slow]

LARGEST_MIB = 500
"""Most pictures at the limit of 50 million pixels take 4 to 10 bytes per pixel."""


@pytest.fixture(scope="module")
def decoded():
    process = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.bombs"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
    )
    assert process.stderr == ""
    return {line["name"]: line for line in map(json.loads, process.stdout.splitlines())}


@pytest.mark.parametrize("name", BOMBS)
def test_bomb_is_disarmed_in_bounded_memory_and_time(decoded, name: str):
    found = decoded[name]
    assert found["mib"] < LARGEST_MIB
    assert found["seconds"] < 10
    is_harmless = "frames" in name or name in ("png at the limit", "jpeg with 64 KB of exif")
    assert found["outcome"].startswith("refused: ") != is_harmless
    if not is_harmless:
        assert len(found["outcome"]) > len("refused: the image")
