"""Two API keys on a service as a user starts it: one floods, and the other still gets answers."""

import contextlib
import socket
from pathlib import Path

import httpx
import pytest

from tests.e2e.running import asking, running, until

FLOODER, QUIET = "a-key-that-floods", "a-key-that-is-quiet"
SETTINGS = {
    "front_ends": 2,
    "max_queue_length": 8,
    "max_body_bytes": 100_000,
    "models": {
        "slow": {
            "source": "echo", "replicas": 1, "max_batch_size": 1, "credit": 1,
            "options": {"delay_s": 0.05},
        }
    },
}  # fmt: skip


@pytest.mark.slow
def test_a_key_that_floods_is_refused_and_the_other_is_answered():
    keys = {"INFERPOOL_PREDICT_KEYS": f"{FLOODER},{QUIET}"}
    metrics = {"headers": {"x-api-key": QUIET}}

    def rejected(reason: str) -> int:
        lines = service.get("/metrics", **metrics).text.splitlines()
        start = f'inferpool_rejected_total{{model="slow",reason="{reason}"}} '
        return round(sum(float(line[len(start) :]) for line in lines if line.startswith(start)))

    with running(settings=SETTINGS, env=keys) as service:

        def flood():
            return service.ask("x", headers={"x-api-key": FLOODER})

        with asking(flood, num_clients=16) as flooded:
            until(lambda: any(each.status_code == 429 for each in flooded))
            answers = [service.ask("x", headers={"x-api-key": QUIET}) for _ in range(5)]
        assert {each.status_code for each in answers} == {200}
        assert {each.status_code for each in flooded} == {200, 429}
        refusals = [each for each in flooded if each.status_code == 429]
        assert {each.json()["code"] for each in refusals} == {"over_share"}
        assert all(each.headers["retry-after"] >= "1" for each in refusals)
        assert "6 requests of this key that wait have its share" in refusals[0].json()["detail"]
        assert rejected("key_share") == len(refusals)
        assert rejected("queue_full") == 0


def test_a_key_with_slow_uploads_at_two_front_ends_leaves_room_for_another(tmp_path: Path):
    models = {"m": {"source": "echo", "replicas": 1}}
    settings = {"front_ends": 2, "body_gap_s": 300, "models": models}
    keys = {"INFERPOOL_PREDICT_KEYS": f"{FLOODER},{QUIET}"}
    head = f"POST /jobs HTTP/1.1\r\nhost: x\r\nx-api-key: {FLOODER}\r\n"
    head += "content-type: application/jsonl\r\ncontent-length: 100\r\n\r\n1\n"
    place = ("--job-store", str(tmp_path / "jobs"))
    with running(*place, settings=settings, env=keys) as service, contextlib.ExitStack() as stack:
        address = ("127.0.0.1", int(service.url.rpartition(":")[2]))

        def begin_upload() -> None:
            upload = stack.enter_context(socket.create_connection(address, timeout=60))
            upload.sendall(head.encode())

        def post(key: str) -> httpx.Response:
            headers = {"x-api-key": key, "content-type": "application/jsonl"}
            return service.post("/jobs", content="1\n", headers=headers)

        def is_refused() -> bool:
            # One of the first may have come while a post had the last place of the share.
            begin_upload()
            return post(FLOODER).status_code == 429

        for _ in range(64):
            begin_upload()
        until(is_refused)
        refused = post(FLOODER).json()
        assert (refused["code"], "uploads of jobs" in refused["detail"]) == ("over_share", True)
        made = post(QUIET)
        assert made.status_code == 202
        job = service.get(
            made.headers["location"], headers={"x-api-key": QUIET}, params={"wait": 60}
        ).json()
        assert job["state"] == "succeeded"
