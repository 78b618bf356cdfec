"""A catalog over fake workers that act as a test says."""

from collections.abc import Callable

import pytest

from inferpool.workers.shared.arena import Arena
from tests.service.parts.swap.test_decision import Stage


@pytest.fixture
def stage(arena: Arena) -> Callable[..., Stage]:
    return lambda **acts: Stage(arena, **acts)
