"""Hostile archives are refused or unpacked whole, and nothing else comes of them."""

from collections import Counter
from pathlib import Path

import pytest

from tests.fuzz.archives import complaint_about, make_archive

_NUM = 250


@pytest.mark.slow
def test_a_hostile_archive_is_refused_or_unpacked_whole(tmp_path: Path):
    ends: Counter[str] = Counter()
    for number in range(_NUM):
        end, complaint = complaint_about(make_archive(20261129, number), tmp_path / str(number))
        assert complaint == "", number
        ends[end] += 1
    assert ends["unpacked"] >= _NUM // 20
    assert ends["refused"] >= _NUM // 4
    assert ends.total() == ends["unpacked"] + ends["refused"]
