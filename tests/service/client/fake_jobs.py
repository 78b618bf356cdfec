"""A service of jobs as a fake transport, which fails as a test tells it to."""

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import httpx

from tests.service.client.conftest import problem_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Iterable

_FIELDS = ("started_at", "ended_at", "expires_at", "error", "webhook")


@dataclass
class Lost:
    """The service does what it is asked for, and its answer is lost."""

    error: httpx.RequestError


@dataclass
class BrokenOff:
    """The connection breaks after so many pieces of a body."""

    num_pieces: int


Failure = Lost | BrokenOff | httpx.Response | httpx.RequestError


@dataclass
class FakeJobs(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Keeps jobs; the prediction for an instance is the instance. "bad" is an invalid input."""

    failures: list[Failure | None] = field(default_factory=list)
    """Failures of the next calls, in turn; None for a call that succeeds."""
    pace: int = 2
    """Instances that are computed whenever a job is looked at."""
    requests: list[httpx.Request] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    """Bodies that came whole."""
    jobs: dict[str, dict] = field(default_factory=dict)
    instances: dict[str, list] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Answer `Client`."""
        failure = self._begin(request)
        pieces = []
        for piece in cast("Iterable[bytes]", request.stream):
            pieces.append(piece)
            if isinstance(failure, BrokenOff) and len(pieces) == failure.num_pieces:
                raise httpx.WriteError("broken pipe", request=request)
        return self._end(request, b"".join(pieces), failure)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer `AsyncClient`."""
        failure = self._begin(request)
        pieces = []
        async for piece in cast("AsyncIterable[bytes]", request.stream):
            pieces.append(piece)
            if isinstance(failure, BrokenOff) and len(pieces) == failure.num_pieces:
                raise httpx.WriteError("broken pipe", request=request)
        return self._end(request, b"".join(pieces), failure)

    def of(self, method: str, path: str = "") -> list[httpx.Request]:
        """Return the requests of a method, to a path if one is given."""
        asked = [each for each in self.requests if each.method == method]
        return [each for each in asked if not path or each.url.path == path]

    def _begin(self, request: httpx.Request) -> Failure | None:
        self.requests.append(request)
        failure = self.failures.pop(0) if self.failures else None
        if isinstance(failure, Exception):
            raise failure
        return failure

    def _end(self, request: httpx.Request, body: bytes, failure: Failure | None) -> httpx.Response:
        if isinstance(failure, httpx.Response):
            return httpx.Response(
                failure.status_code, headers=failure.headers, content=failure.content
            )
        answer = self._answer(request, body)
        if isinstance(failure, Lost):
            raise failure.error
        return answer

    def _answer(self, request: httpx.Request, body: bytes) -> httpx.Response:
        _, _, id, rest, *_ = f"{request.url.path}//".split("/")
        query = request.url.params
        if request.method in ("POST", "PUT"):
            self.bodies.append(body)
            key = request.headers["idempotency-key"]
            id = self.keys.setdefault(key, id or f"job{len(self.jobs)}")
            if id not in self.jobs:
                self._make(id, [json.loads(line) for line in body.splitlines()])
            return httpx.Response(202, json=self.jobs[id])
        if not id:
            ids = [each for each in reversed(self.jobs) if each < query.get("after", "~")]
            page = ids[: int(query["limit"])]
            following = page[-1] if len(page) < len(ids) else None
            return httpx.Response(
                200, json={"jobs": [self.jobs[each] for each in page], "next": following}
            )
        if id not in self.jobs:
            return problem_of(404, "unknown_job")
        job = self.jobs[id]
        is_over = job["state"] not in ("queued", "running")
        if request.method == "DELETE":
            if is_over:
                del self.jobs[id]
                return httpx.Response(204)
            job["state"] = "cancelled"
            return httpx.Response(200, json=job)
        if rest == "result":
            first = int(query["first"])
            end = len(self.instances[id]) if is_over else job["num_done"]
            wanted = range(first, min(first + int(query["count"]), end))
            return httpx.Response(200, content=b"".join(self._line(id, each) for each in wanted))
        if not is_over:
            self._compute(job)
        return httpx.Response(200, json=job)

    def _make(self, id: str, instances: list) -> None:
        self.instances[id] = instances
        counts = {"num_instances": len(instances), "num_done": 0, "num_failed": 0}
        self.jobs[id] = {
            **dict.fromkeys(_FIELDS), **counts, "id": id, "state": "queued", "model": "m",
            "versions": [], "created_at": 1.0, "request_id": "r", "num_bytes": 1, "priority": 5,
        }  # fmt: skip

    def _compute(self, job: dict) -> None:
        instances = self.instances[job["id"]]
        job["num_done"] = min(job["num_done"] + self.pace, len(instances))
        job["num_failed"] = instances[: job["num_done"]].count("bad")
        is_over = job["num_done"] == len(instances)
        job["state"] = "succeeded" if is_over else "running"

    def _line(self, id: str, index: int) -> bytes:
        line = {"index": index, "version": 1, "prediction": self.instances[id][index]}
        code = "invalid_input" if line["prediction"] == "bad" else ""
        code = "cancelled" if index >= self.jobs[id]["num_done"] else code
        if code:
            line = {"index": index, "error": {"code": code, "message": "no", "status": 422}}
        return json.dumps(line).encode() + b"\n"
