"""Fixtures that most tests of the service need."""

from collections.abc import Iterator

import pytest

from inferpool.workers.shared.arena import Arena


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(1 << 16)
    yield arena
    arena.close()
