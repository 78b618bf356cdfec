"""Throws hostile inputs at a real service, and judges it by what may never happen."""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
import uvloop

from inferpool.service.tools.trial.processes import pss_of
from tests.e2e.running import Running, running
from tests.fuzz.client import Outcome, send_all
from tests.fuzz.inputs import Input, make_input

_CONFIG = """
head_timeout_s = 5.0
front_ends = {front_ends}
default_model = "efficientnet_lite0"

[models.efficientnet_lite0]
replicas = {replicas}

[models.echo]
replicas = {replicas}

[models.two]
source = "tests.fuzz.models:TwoInputs"
replicas = {replicas}

[models.grid]
source = "tests.fuzz.models:Grid"
replicas = {replicas}

[models.decoder]
source = "tests.fuzz.models:Decoder"
replicas = {replicas}
"""
_SETTLE_S = 10.0
_MAX_GROWTH_BYTES = 64 << 20
"""Of all processes together from the middle of a campaign to its end: caches and the heap's noise;
a leak of 1 KB for each of 100,000 inputs would be more."""
_MAX_KEPT = 100
_STATUS_LINE = re.compile(rb"HTTP/1\.1 \d{3} [ -~]*")
_HEADER_LINE = re.compile(rb"([a-zA-Z-]+): [ -~]*")
_HEADER_NAMES = frozenset(
    b"accept-ranges allow cache-control connection content-encoding content-length "
    b"content-security-policy content-type cross-origin-opener-policy date etag last-modified "
    b"location referrer-policy retry-after server server-timing traceparent tracestate "
    b"transfer-encoding vary www-authenticate x-content-type-options x-frame-options "
    b"x-request-id x-tensor-dtype x-tensor-name x-tensor-shape".split()
)
"""All that the service says of itself: any other was put there by a client."""
_LEDGER = re.compile(
    r'^inferpool_instances_total\{model="([^"]+)",outcome="(\w+)"\} (\S+)$', re.MULTILINE
)


@dataclass(slots=True)
class Verdict:
    """What was found."""

    num_inputs: int = 0
    seconds: float = 0.0
    statuses: dict[str, Counter[str]] = field(default_factory=dict)
    """By kind of input: how many answers of each status; "closed" for none."""
    offences: list[tuple[str, Input | None]] = field(default_factory=list)
    """What must not happen, and the input it happened to."""
    pss_bytes: list[int] = field(default_factory=list)
    """Of all processes: before, in the middle, and after. Without pages of files, of which more are
    theirs when strangers end that have mapped the same."""
    num_workers: int = 0

    def offend(self, reason: str, input: Input | None = None) -> None:
        """Note what must not happen."""
        self.offences.append((reason, input))


@contextmanager
def service(folder: Path, replicas: int = 2, front_ends: int = 1) -> Iterator[Running]:
    """The service that campaigns are run against."""
    config = folder / "fuzz.toml"
    config.write_text(_CONFIG.format(replicas=replicas, front_ends=front_ends))
    with running("--config", str(config)) as started:
        yield started


def campaign(
    target: Running,
    *,
    num_inputs: int,
    seed: int,
    max_s: float = float("inf"),
    num_connections: int = 48,
    rest_s: float = 0.0,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Verdict:
    """Send so many inputs, and look at the service before, meanwhile and after.

    Workers keep large buffers while they are busy, and give them back after 5 s without work. So
    only after a longer rest does the memory show a leak alone.
    """
    verdict = Verdict()
    pids = sorted(target.worker_pids())
    verdict.num_workers = len(pids)
    verdict.pss_bytes.append(_pss_bytes(target))
    began = time.monotonic()
    half = num_inputs // 2
    for numbers in (range(half), range(half, num_inputs)):
        left_s = began + max_s - time.monotonic()
        _send(target, verdict, seed, numbers, left_s, num_connections, on_progress)
        time.sleep(rest_s)
        verdict.pss_bytes.append(_pss_bytes(target))
    verdict.seconds = time.monotonic() - began
    _judge_ledger(target, verdict)
    if sorted(target.worker_pids()) != pids:
        warnings = [line for line in target.log if line["level"] not in ("debug", "info")]
        verdict.offend(f"workers were lost; the log says {warnings}")
    growth = verdict.pss_bytes[2] - verdict.pss_bytes[1]
    if growth > _MAX_GROWTH_BYTES:
        verdict.offend(f"memory grew by {growth >> 20} MiB in the second half")
    for line in target.log:
        if line["level"] in ("error", "critical", "raw") or line["logger"] == "stderr":
            verdict.offend(f"log: {line}"[-1500:])
    return verdict


def replay(target: Running, input: Input) -> list[Outcome]:
    """Send one input alone."""
    outcomes: list[Outcome] = []
    waiting = [input]
    next_input = lambda: waiting.pop() if waiting else None  # noqa: E731
    uvloop.run(send_all(_address(target), next_input, outcomes.append, 1))
    return outcomes


def _send(
    target: Running,
    verdict: Verdict,
    seed: int,
    numbers: range,
    max_s: float,
    num_connections: int,
    on_progress: Callable[[int], None],
) -> None:
    waiting = iter(numbers)
    until = time.monotonic() + max_s

    def next_input() -> Input | None:
        number = next(waiting, None)
        return None if number is None or time.monotonic() > until else make_input(seed, number)

    def on_outcome(outcome: Outcome) -> None:
        verdict.num_inputs += 1
        judge(outcome, verdict)
        on_progress(verdict.num_inputs)

    uvloop.run(send_all(_address(target), next_input, on_outcome, num_connections))


def judge(outcome: Outcome, verdict: Verdict) -> None:
    """Count an outcome, and note it if it must not be."""
    input = outcome.input
    counts = verdict.statuses.setdefault(input.kind, Counter())
    if outcome.error:
        counts["error"] += 1
        verdict.offend(outcome.error, input)
    elif not outcome.answers:
        counts["closed"] += 1
    for answer in outcome.answers:
        counts[str(answer.status)] += 1
        if line := _stray_line(answer.head):
            verdict.offend(f"{answer.status}, with a line that is not ours: {line!r}", input)
        asked_for_it = answer.status == 504 and b"x-timeout-ms" in input.data.lower()
        if answer.status < 200 or (answer.status >= 500 and not asked_for_it):
            verdict.offend(f"{answer.status}: {answer.body[:300]!r}", input)
        elif answer.body and b"application/problem+json" in answer.head:
            try:
                problem = msgspec.json.decode(answer.body)
            except msgspec.DecodeError as error:
                verdict.offend(f"{answer.status}, and its problem is no JSON: {error}", input)
                continue
            if problem["status"] != answer.status or not problem["detail"]:
                verdict.offend(f"{answer.status}, and its problem says {problem}", input)


def _stray_line(head: bytes) -> bytes:
    """The first line of an answer's head that the service cannot have meant, if there is one."""
    first, *lines = head.split(b"\r\n")
    if not _STATUS_LINE.fullmatch(first):
        return first
    for line in lines:
        match = _HEADER_LINE.fullmatch(line)
        if match is None or match[1].lower() not in _HEADER_NAMES:
            return line
    return b""


def _judge_ledger(target: Running, verdict: Verdict) -> None:
    """Every accepted instance has ended in exactly one way."""
    until = time.monotonic() + _SETTLE_S
    while True:
        counts: dict[str, Counter[str]] = {}
        for model, outcome, value in _LEDGER.findall(httpx.get(f"{target.url}/metrics").text):
            counts.setdefault(model, Counter())[outcome] = int(float(value))
        is_balanced = all(found.total() == 2 * found["accepted"] for found in counts.values())
        if is_balanced and any(found["accepted"] for found in counts.values()):
            return
        if time.monotonic() > until:
            verdict.offend(f"the ledger is out of balance: {counts}")
            return
        time.sleep(0.1)


def _address(target: Running) -> tuple[str, int]:
    host, _, port = target.url.removeprefix("http://").partition(":")
    return host, int(port)


def _pss_bytes(target: Running) -> int:
    return sum(pss_of(process.pid).own for process in target.family())


def keep(verdict: Verdict, folder: Path) -> list[Path]:
    """Write the inputs that offended to files, for `--replay`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for reason, input in verdict.offences[:_MAX_KEPT]:
        if input is not None:
            path = (
                folder / f"{input.number}-{input.kind}{'' if input.is_framed else '-unframed'}.bin"
            )
            path.write_bytes(input.data)
            path.with_suffix(".txt").write_text(reason + "\n")
            paths.append(path)
    return paths


def read_input(path: Path) -> Input:
    """An input from a file of `keep`'s, or any bytes."""
    number, _, kind = path.stem.partition("-")
    return Input(
        number=int(number) if number.isdigit() else 0,
        kind=kind.removesuffix("-unframed") or "file",
        data=path.read_bytes(),
        is_framed=not path.stem.endswith("-unframed"),
    )
