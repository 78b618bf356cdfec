"""A service whose workers compute on the simulated accelerator, end to end."""

import pytest

from tests.e2e.running import running
from tests.models.items import jpeg

pytestmark = pytest.mark.simulated

JPEG = {"Content-Type": "image/jpeg"}


def test_a_service_answers_photographs_as_the_cpu_does():
    answers = []
    for devices in ("cpu", "sim:0,1"):
        with running("efficientnet_lite0", "--devices", devices, "--replicas", "2") as service:
            answer = service.post(content=jpeg("coffee"), headers=JPEG)
            assert answer.status_code == 200, answer.text
            answers.append(answer.json()["predictions"])
            places = [worker["device"] for worker in service.workers()]
            assert all(place.startswith(devices[:3]) for place in places), places
    assert answers[0] == answers[1]
