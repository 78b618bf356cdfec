"""Swaps of a `MarkedModel`, and clients that ask it meanwhile."""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from inferpool.service.tools.trial.connection import (
    Address,
    NoAnswerError,
    TrialAnswer,
    TrialConnection,
    connect,
    connected,
    post_request,
)
from tests.e2e.running import Running, running

ADMIN = "an-admin-key-of-enough-characters"
KEYS = {"INFERPOOL_ADMIN_KEYS": ADMIN}
_PATIENCE_S = 150.0
_PAUSE_S = 0.15
"""Between the two pieces of a slow body: many swaps of a light model end meanwhile."""
_KINDS = ((1, False), (7, False), (1, False), (3, True))
"""Clients take turns to be of these kinds: the instances of a call, and whether its body is slow.
Without slow bodies, they send the same head on one connection again and again."""


@dataclass
class SwapTally:
    """Counts of the calls, and the marks that each version has answered with."""

    right: int = 0
    wrong: list[object] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    refused: Counter[int] = field(default_factory=Counter)
    marks: dict[bytes, set[int]] = field(default_factory=dict)

    def take(self, numbers: Sequence[int], answer: TrialAnswer) -> None:
        """Judge the answer to a call with these numbers."""
        if answer.status in (429, 503):
            self.refused[answer.status] += 1
            return
        body = json.loads(answer.body)
        version = answer.header(b"x-model-version")
        predictions = body.get("predictions", [])
        marks = {each["mark"] for each in predictions if "mark" in each}
        are_right = [each.get("n") for each in predictions] == list(numbers)
        if answer.status != 200 or not are_right or len(marks) != 1 or not version:
            self.wrong.append((numbers, answer.status, version, body))
            return
        self.right += 1
        self.marks.setdefault(version, set()).update(marks)

    async def until(self, right: int) -> None:
        """Wait until there were so many right answers."""
        async with asyncio.timeout(_PATIENCE_S):
            while self.right < right:  # noqa: ASYNC110  # clients tell nobody
                await asyncio.sleep(0.01)

    def check(self, *, may_refuse: bool = False) -> None:
        """Check that each call had one right answer, of one version as a whole."""
        assert self.right
        assert not self.wrong, self.wrong[:5]
        assert not self.lost, self.lost[:5]
        assert may_refuse or not self.refused, self.refused
        assert all(len(marks) == 1 for marks in self.marks.values()), self.marks


class SwapOperator:
    """Changes the model `m` of a service through its admin API."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._marks = itertools.count(1)

    async def swap(
        self,
        options: Mapping[str, object] | None = None,
        *,
        prefer: str = "",
        **request: object,
    ) -> tuple[int, Mapping[str, Any]]:
        """Swap to another version, whose mark is a new one; return status and answer."""
        body = {
            "policy": "force",
            "rollback_s": 0,
            "options": {"mark": next(self._marks), **(options or {})},
            **request,
        }
        return await self.post("versions", body, **({"Prefer": prefer} if prefer else {}))

    async def until_said(self, text: str) -> None:
        """Wait until the change that goes on is at a step that it tells of."""
        async with asyncio.timeout(_PATIENCE_S):
            while text not in (model := await self.look())["change"]:
                assert model["changes"][0]["state"] == "going_on", model
                await asyncio.sleep(0.02)

    async def until_quiet(self) -> None:
        """Wait until no change goes on, so that no version is left but the one that serves."""
        async with asyncio.timeout(_PATIENCE_S):
            while not await self._is_quiet():  # noqa: ASYNC110  # it tells who asks
                await asyncio.sleep(0.02)

    async def _is_quiet(self) -> bool:
        """Return whether no change goes on; a front that dies may end the connection."""
        try:
            return not (await self.look())["change"]
        except NoAnswerError:
            return False

    async def look(self) -> Mapping[str, Any]:
        """Return what is known of the model."""
        return (await self._ask("GET", ""))[1]

    async def post(
        self, what: str, body: Mapping[str, object] | None = None, **headers: str
    ) -> tuple[int, Mapping[str, Any]]:
        """Send a request; return status and answer."""
        return await self._ask("POST", f"/{what}", body or {}, **headers)

    async def _ask(
        self, method: str, path: str, body: object = None, **headers: str
    ) -> tuple[int, Mapping[str, Any]]:
        data = json.dumps(body).encode() if body is not None else b""
        request = post_request(
            f"/admin/models/m{path}", data, "application/json", {"X-API-Key": ADMIN, **headers}
        )
        request = request.replace(b"POST", method.encode(), 1)
        async with connected(self._address) as connection:
            answer = await connection.ask(request, _PATIENCE_S)
        return answer.status, json.loads(answer.body)


@contextmanager
def serving(
    *arguments: str, options: Mapping[str, object] | None = None, **model: object
) -> Iterator[Running]:
    """Start a service of one `MarkedModel` named m."""
    own = {
        "source": "tests.marked_model:MarkedModel",
        "replicas": 1,
        "options": {"mark": 0, **(options or {})},
        **model,
    }
    settings = {"arena_bytes": 1 << 26, "models": {"m": own}}
    with running(*arguments, settings=settings, env=KEYS) as service:
        yield service


@asynccontextmanager
async def under_load(
    address: Address, num_clients: int = 8, *, pause_s: float = 0.0
) -> AsyncIterator[SwapTally]:
    """Have clients ask numbers in a closed loop during the block; yields their tally.

    Args:
        address: That of the service.
        num_clients: Number of clients.
        pause_s: Time of a client between two calls. With none they need all processors.
    """
    tally = SwapTally()
    numbers = itertools.count(1)
    is_over = asyncio.Event()

    async def be(num: int, *, is_slow: bool) -> None:
        connection: TrialConnection | None = None
        while not is_over.is_set():
            asked = list(itertools.islice(numbers, num))
            body = json.dumps({"instances": [{"n": n} for n in asked]}).encode()
            request = post_request("/predict/m", body.ljust(300), "application/json")
            try:
                if is_slow:
                    answer = await _ask_slowly(address, request)
                else:
                    if connection is None or not connection.is_open:
                        connection = await connect(address)
                    answer = await connection.ask(request, _PATIENCE_S)
            except (OSError, NoAnswerError) as error:
                tally.lost.append(f"{asked}: {error!r}")
            else:
                tally.take(asked, answer)
            await asyncio.sleep(pause_s)
        if connection is not None:
            connection.close()

    kinds = itertools.islice(itertools.cycle(_KINDS), num_clients)
    clients = [asyncio.create_task(be(num, is_slow=is_slow)) for num, is_slow in kinds]
    try:
        yield tally
    finally:
        is_over.set()
        await asyncio.gather(*clients)


async def _ask_slowly(address: Address, request: bytes) -> TrialAnswer:
    """Send a request in two pieces, the second a while after the first.

    Raises:
        NoAnswerError: There was no answer.
    """
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(request[:-150].replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        await asyncio.sleep(_PAUSE_S)
        writer.write(request[-150:])
        whole = await asyncio.wait_for(reader.read(), _PATIENCE_S)
    finally:
        writer.close()
    head, end, body = whole.partition(b"\r\n\r\n")
    if not end:
        raise NoAnswerError(f"it ended after {whole!r}")
    return TrialAnswer(int(head[9:12]), head, body)
