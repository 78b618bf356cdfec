from collections.abc import Iterator

import pytest

from tests.e2e.running import Running
from tests.fuzz.campaign import service


@pytest.fixture(scope="package")
def target() -> Iterator[Running]:
    """Start a service with all the models that are fuzzed, one worker each."""
    with service(replicas=1) as target:
        yield target
