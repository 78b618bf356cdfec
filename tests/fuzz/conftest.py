from collections.abc import Iterator

import pytest

from tests.e2e.running import Running
from tests.fuzz.campaign import service


@pytest.fixture(scope="package")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service with all the models that are fuzzed, one worker each."""
    with service(tmp_path_factory.mktemp("service"), replicas=1) as target:
        yield target
