"""Made-up events of the feed `/events`, and a server that sends them."""

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.service.tools.http_server import Respond, answer, listening

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


def event(
    workers: Sequence[dict[str, Any]] = (worker(0), worker(1)),
    *,
    names: Sequence[str] = ("resnet",),
    at: float = NOW,
    model: dict[str, Any] | None = None,
    health: dict[str, Any] | None = None,
    history: list[dict[str, Any]] | None = None,
    jobs: dict[str, Any] | None = None,
    **changes: Any,
) -> bytes:
    """Return the data of one event: models that are alike.

    Args:
        model: What the health says about each model besides.
        health: What the health says besides.
        **changes: Changes of the sample of each model.
    """
    told = {"ready": True, "reason": "", "workers": workers, **(model or {})}
    models = [{"name": name, **told} for name in names]
    found = {
        "time": at,
        "interval_s": 1.0,
        "uptime_s": 3700.0,
        "version": "1.2.3",
        "health": {"status": "ready", "ready": True, "models": models, **(health or {})},
        "host": {"connections": 12, "arena_bytes": 256 << 20, "arena_used_bytes": 8 << 20},
        "models": {name: sample(**changes) for name in names},
        "history": history,
        "jobs": jobs,
    }
    return json.dumps({name: each for name, each in found.items() if each is not None}).encode()


@contextlib.contextmanager
def feed(*scripts: Respond) -> Iterator[str]:
    """Answer each request with the next script, and repeat the last; yield the URL."""
    left = list(scripts)
    with listening(lambda call: (left.pop(0) if len(left) > 1 else left[0])(call)) as url:
        yield url


def sends(*events: bytes, is_endless: bool = False) -> Respond:
    """Return a script that sends events, and then ends the stream or not."""

    def script(call: BaseHTTPRequestHandler) -> None:
        call.send_response(200)
        call.send_header("Content-Type", "text/event-stream")
        call.end_headers()
        for number, data in enumerate(events):
            call.wfile.write(b": here\n\nevent: state\nid: %d\ndata: %b\n\n" % (number, data))
        call.wfile.flush()
        if is_endless:
            threading.Event().wait()  # in a daemon's thread

    return script


def answers(status: int, body: bytes = b"{}", kind: str = "application/json") -> Respond:
    """Return a script that sends one answer."""
    return lambda call: answer(call, status, body, kind)
