"""Preparation and computation at the same time, from many clients, against exact answers."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from inferpool import Client
from tests.e2e.running import Running, asking, running, until
from tests.gpu.conftest import Devices
from tests.gpu.device_models import Steps, numbers

MODEL = "tests.gpu.device_models:DeviceFaultModel"
EXACT = "tests.gpu.device_models:ExactModel"


SPEEDS = ("exact", "graphed")


@pytest.fixture(scope="module")
def service(devices: Devices) -> Iterator[Running]:
    """A model of whole numbers for each preset, and one that takes a while.

    On the simulated device operations begin late. The service need not be ready: what fails to load
    fails its own test.
    """
    common = {"devices": devices.named(0), "replicas": 1}
    exact = {**common, "source": EXACT, "max_batch_size": 16, "batch_wait_ms": 1}
    # A worker prepares ahead where a batch takes a while.
    slow = {**common, "source": MODEL, "max_batch_size": 1, "options": {"forward_s": 0.01}}
    models = {"slow": {**slow, "speed": "exact"}}
    models |= {speed: {**exact, "speed": speed} for speed in SPEEDS}
    late = {"SIM_DELAY_US": "100"}
    with running(settings={"models": models}, env=late, ready=False) as service:
        yield service.wait_until_listening()


def test_next_batch_is_prepared_while_one_is_computed(service: Running):
    until(lambda: service.worker("slow")["state"] == "ready")
    path = "/predict/slow"
    service.predict({"n": 1}, path=path)
    with asking(lambda: service.ask({"n": 2}, path=path)):
        assert service.predict({"n": 3, "do": "meet"}, path=path)[0]["twice"] == 6


@pytest.mark.parametrize("speed", SPEEDS)
def test_every_answer_to_many_clients_is_exact(
    devices: Devices, service: Running, speed: str, record_property
):
    until(lambda: service.worker(speed)["state"] == "ready")
    assert service.worker(speed)["speed"] == speed
    num_clients, num_each = (8, 40) if devices.is_simulated else (32, 400)
    wrong: list[int] = []
    network = Steps()

    def ask(client: int) -> int:
        own = Client(service.url, timeout_s=60)
        for number in range(client, num_clients * num_each, num_clients):
            x = numbers(number)
            found = own.predict({"x": x}, model=speed, as_arrays=True).tensor
            with torch.inference_mode():
                if not torch.equal(found.reshape(-1), network(x[None])[0]):
                    wrong.append(number)
        own.close()
        return num_each

    with ThreadPoolExecutor(num_clients) as pool:
        num_asked = sum(pool.map(ask, range(num_clients)))
    assert wrong == []
    batches = service.worker(speed)["num_batches"]
    assert batches < num_asked, "each was computed alone"
    record_property("answers compared", num_asked)
    record_property("batches", batches)
