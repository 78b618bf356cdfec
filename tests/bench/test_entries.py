"""How many of our own files one call enters: who wants to follow a call has to read them."""

import pytest

from tests.bench.entries import count
from tests.bench.processes import INFERPOOL
from tests.ports import free_port

_MOST = {1: (32, 65), 2: (36, 85)}
"""Files and entries, by the number of fronts: as counted, and a few more. A timer may fall due
meanwhile, or a message come in two pieces."""


@pytest.mark.parametrize("num_fronts", _MOST)
def test_a_call_enters_few_files(num_fronts: int) -> None:
    entries = count(INFERPOOL, num_fronts, free_port())
    most_files, most_entries = _MOST[num_fronts]
    assert len({entered for _, entered in entries}) <= most_files, entries
    assert len(entries) <= most_entries, entries
