"""Two API keys on a service as a user starts it: one uploads slowly, and the other has room."""

import contextlib
import socket
from pathlib import Path

import httpx

from tests.e2e.running import running, until

SLOW, QUIET = "a-key-that-is-slow", "a-key-that-is-quiet"


def test_a_key_with_slow_uploads_at_two_front_ends_leaves_room_for_another(tmp_path: Path):
    models = {"m": {"source": "echo", "replicas": 1}}
    settings = {"front_ends": 2, "body_gap_s": 300, "models": models}
    keys = {"INFERPOOL_PREDICT_KEYS": f"{SLOW},{QUIET}"}
    head = f"POST /jobs HTTP/1.1\r\nhost: x\r\nx-api-key: {SLOW}\r\n"
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
            return post(SLOW).status_code == 429

        for _ in range(64):
            begin_upload()
        until(is_refused)
        refused = post(SLOW).json()
        assert (refused["code"], "uploads of jobs" in refused["detail"]) == ("over_share", True)
        made = post(QUIET)
        assert made.status_code == 202
        job = service.get(
            made.headers["location"], headers={"x-api-key": QUIET}, params={"wait": 60}
        ).json()
        assert job["state"] == "succeeded"
