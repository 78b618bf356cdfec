"""Made-up events of the feed `/events`, and a server that sends them."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NOW = 1_800_000_000.0


def worker(number: int = 0, state: str = "ready", **changes: Any) -> dict[str, Any]:
    return {
        "name": f"resnet/{number}",
        "state": state,
        "device": "cuda:0",
        "incarnation": 0,
        "num_batches": 100,
        "rss_bytes": 512 << 20,
        "restarts": 0,
        "speed": "compiled_bf16",
        "reason": "",
        **changes,
    }


def host(name: str, state: str = "connected", **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "state": state,
        "address": "10.0.0.7:41234",
        "devices": ["NVIDIA H100", "32 CPU cores"],
        "version": "1.2.3",
        "workers": 2,
        "workers_ready": 2,
        "last_beat_age_s": 0.2,
        "round_trip_s": 0.0004,
        "clock_offset_s": -0.012,
        **changes,
    }


def sample(**changes: Any) -> dict[str, Any]:
    return {
        "instances_per_s": {"accepted": 1234.5, "succeeded": 1234.5},
        "rejected_per_s": {},
        "latency_ms": {"p50": 4.1, "p95": 8.2, "p99": 12.3},
        "queue_ms": {"p50": 1.0, "p95": 2.0, "p99": 3.0},
        "inference_ms": {"p50": 2.5, "p95": 3.0, "p99": 3.5},
        "batch_sizes": {"1": 5, "8": 50},
        "queue_depth": 7,
        "queue_limit": 1024,
        "in_flight": 9,
        "max_batch_size": 8,
        "endings": [],
        **changes,
    }


def state(
    workers: list[dict[str, Any]] | None = None,
    *,
    at: float = NOW,
    status: str = "ready",
    is_ready: bool = True,
    reason: str = "",
    others: tuple[str, ...] = (),
    history: list[dict[str, Any]] | None = None,
    gpus: tuple[dict[str, Any], ...] = (),
    jobs: dict[str, Any] | None = None,
    cluster: dict[str, Any] | None = None,
    **changes: Any,
) -> bytes:
    """Return the data of one event: a model "resnet", and others like it."""
    names = ("resnet", *others)
    models = [
        {
            "name": name,
            "ready": is_ready,
            "reason": reason,
            "workers": [worker(0), worker(1)] if workers is None else workers,
        }
        for name in names
    ]
    event = {
        "time": at,
        "interval_s": 1.0,
        "uptime_s": 3700.0,
        "version": "1.2.3",
        "health": {"status": status, "ready": is_ready, "models": models, "gpus": gpus},
        "host": {"connections": 12, "arena_bytes": 256 << 20, "arena_used_bytes": 8 << 20},
        "models": {name: sample(**changes) for name in names},
    }
    if cluster is not None:
        event["health"].update(cluster)  # type: ignore[attr-defined]  # it is a dict
    if jobs is not None:
        event["jobs"] = jobs
    if history is not None:
        event["history"] = history
    return json.dumps(event, ensure_ascii=False).encode()


class FeedServer:
    """A server that answers each request with the next of its scripts, and repeats the last."""

    def __init__(self, *scripts: Callable[[BaseHTTPRequestHandler], None]) -> None:
        self.headers: list[dict[str, str]] = []
        """Headers of each request."""
        self._scripts = list(scripts)

    @contextlib.contextmanager
    def listening(self) -> Iterator[str]:
        """Listen, and yield the URL."""
        feed = self

        class FeedHandler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # the name in http.server
                feed.headers.append({name.lower(): text for name, text in self.headers.items()})
                scripts = feed._scripts
                script = scripts.pop(0) if len(scripts) > 1 else scripts[0]
                with contextlib.suppress(OSError):  # the client has gone
                    script(self)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), FeedHandler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def sends(*events: bytes, stays_s: float = 0.0) -> Callable[[BaseHTTPRequestHandler], None]:
    """Return a script that sends events, and ends the stream after a while."""

    def script(call: BaseHTTPRequestHandler) -> None:
        call.send_response(200)
        call.send_header("Content-Type", "text/event-stream")
        call.end_headers()
        for number, event in enumerate(events):
            call.wfile.write(
                b": still here\n\nevent: state\nid: %d\ndata: %b\n\n" % (number, event)
            )
        call.wfile.flush()
        time.sleep(stays_s)

    return script


def answers(status: int, body: bytes = b"{}", kind: str = "application/json"):
    """Return a script that sends one answer."""

    def script(call: BaseHTTPRequestHandler) -> None:
        call.send_response(status)
        call.send_header("Content-Type", kind)
        call.send_header("Content-Length", str(len(body)))
        call.end_headers()
        call.wfile.write(body)

    return script
