"""Sends hostile inputs to a real service, and notes all that must never happen."""

import itertools
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import httpx
import msgspec
import uvloop

from inferpool.service.tools.trial.processes import pss_of
from tests.e2e.running import Running, running, until
from tests.fuzz.client import RawExchange, send_all
from tests.fuzz.grpc_client import GrpcExchange, send_calls
from tests.fuzz.infer import KINDS as INFER_KINDS
from tests.fuzz.infer import make_grpc_call, make_infer_input
from tests.fuzz.inputs import HostileInput, make_input
from tests.fuzz.texts import TEXT_PROTOCOLS, make_text_input, text_complaint
from tests.fuzz.torchserve import (
    ADMIN,
    SERVER_INPUTS,
    TOLD,
    VERTEX_HEALTH,
    VERTEX_PREDICT,
    is_told_to_fail,
    server_complaint,
    torchserve_settings,
)
from tests.ports import free_port

_MODELS = {
    "efficientnet_lite0": {},
    "echo": {},
    "two": {"source": "tests.fuzz.models:TwoInputs"},
    "grid": {"source": "tests.fuzz.models:Grid"},
    "decoder": {"source": "tests.fuzz.models:Decoder"},
}
_TEXTS = "tests.text_model:TextFaultModel"
_TEXT_MODELS = {
    "encoder": {"source": _TEXTS},
    "reranker": {"source": _TEXTS, "options": {"task": "reranking"}},
    "classifier": {"source": _TEXTS, "options": {"task": "classification"}},
    "echo": {},
}
Protocol = Literal[
    "predict", "infer", "grpc", "embeddings", "rerank", "classify", "tei",
    "torchserve", "management", "sagemaker", "vertex",
]  # fmt: skip
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)
"""Campaigns: all that HTTP has, the calls of other protocols over HTTP, those over gRPC, those of
texts, and those of TorchServe and of the platforms."""
_SETTLE_S = 60.0
_MAX_GROWTH_BYTES = 64 << 20
"""Bound on the growth of all processes together in the second half of a campaign.

Caches and the heap's noise stay below it; a leak of 1 KB for each of 100,000 inputs would not."""
_MAX_KEPT = 100
_STATUS_LINE = re.compile(rb"HTTP/1\.1 \d{3} [ -~]*")
_HEADER_LINE = re.compile(rb"([a-zA-Z-]+): [ -~]*")
_HEADER_NAMES = frozenset(
    b"accept-encoding accept-ranges allow cache-control connection content-encoding content-length "
    b"content-security-policy content-type cross-origin-opener-policy date etag expires "
    b"inference-header-content-length last-modified location pragma preference-applied "
    b"referrer-policy x-amzn-sagemaker-custom-attributes "
    b"retry-after server server-timing traceparent tracestate transfer-encoding vary "
    b"www-authenticate x-compute-characters x-compute-time x-compute-tokens x-content-type-options "
    b"x-frame-options x-inference-time x-model-version x-queue-time x-request-id x-should-retry "
    b"x-tensor-dtype x-tensor-name x-tensor-shape x-tokenization-time x-total-time".split()
)
"""All headers that the service sends by itself: a client has smuggled in any other."""
_LEDGER = re.compile(
    r'^inferpool_instances_total\{model="([^"]+)",outcome="(\w+)"\} (\S+)$', re.MULTILINE
)


@dataclass(slots=True)
class Verdict:
    """Findings of a campaign."""

    num_inputs: int = 0
    seconds: float = 0.0
    statuses: dict[str, Counter[str]] = field(default_factory=dict)
    """Answers of each status by kind of input; "closed" counts inputs without an answer."""
    offences: list[tuple[str, HostileInput | None]] = field(default_factory=list)
    """Events that must not happen, each with the input that caused it if one did."""
    pss_bytes: list[int] = field(default_factory=list)
    """Memory of all processes before, in the middle, and after, without pages of files: the share
    of those grows when other programs that have mapped the same files end."""
    num_workers: int = 0

    def offend(self, reason: str, input: HostileInput | None = None) -> None:
        """Note an event that must not happen."""
        self.offences.append((reason, input))


@contextmanager
def service(
    replicas: int = 2, front_ends: int = 1, protocol: Protocol = "predict"
) -> Iterator[Running]:
    """Start the service that campaigns are run against."""
    is_texts = protocol in TEXT_PROTOCOLS
    models = _TEXT_MODELS if is_texts else _MODELS
    if protocol in SERVER_INPUTS:
        names = ("grid", "echo", "decoder") if protocol == "vertex" else ("echo", "grid", "decoder")
        models = {name: _MODELS[name] for name in names}
    grpc: dict[str, object] = {} if protocol in SERVER_INPUTS else {"grpc_port": 0}
    settings: dict[str, object] = {
        "head_timeout_s": 5.0,
        **grpc,
        "front_ends": front_ends,
        "default_model": next(iter(models)),
        "tei": is_texts,
        "models": {name: {**model, "replicas": replicas} for name, model in models.items()},
    }
    with tempfile.TemporaryDirectory() as folder:
        match protocol:
            case "torchserve" | "management":
                settings |= torchserve_settings(Path(folder), [free_port() for _ in range(3)])
            case "sagemaker" | "vertex":
                settings["sagemaker"] = True
                settings["vertex_predict_route"] = VERTEX_PREDICT
                settings["vertex_health_route"] = VERTEX_HEALTH
        env = {"INFERPOOL_ADMIN_KEYS": ADMIN} if protocol == "management" else {}
        with running(settings=settings, env=env) as started:
            if env:
                assert started.post("/predict/echo", json={"instances": ["a"]}).status_code == 200
            yield started


def campaign(
    target: Running,
    *,
    num_inputs: int,
    seed: int,
    max_s: float = float("inf"),
    num_connections: int = 48,
    rest_s: float = 0.0,
    protocol: Protocol = "predict",
    on_progress: Callable[[int], None] = lambda _: None,
) -> Verdict:
    """Send so many inputs, and look at the service before, meanwhile and after.

    Busy workers keep large buffers and give them back after 5 s without work, so the memory shows
    a leak only if `rest_s` is longer.
    """
    verdict = Verdict()
    pids = sorted(target.worker_pids())
    verdict.num_workers = len(pids)
    verdict.pss_bytes.append(_pss_bytes(target))
    began = time.monotonic()

    def on_exchange(exchange: RawExchange | GrpcExchange) -> None:
        verdict.num_inputs += 1
        if isinstance(exchange, RawExchange):
            judge(exchange, verdict)
        else:
            judge_call(exchange, verdict)
        on_progress(verdict.num_inputs)

    half = num_inputs // 2
    for numbers in (range(half), range(half, num_inputs)):
        in_time = itertools.takewhile(lambda _: time.monotonic() < began + max_s, numbers)
        if protocol == "grpc":
            calls = map(partial(make_grpc_call, seed), in_time)
            address = target.told_after("gRPC is served at ")
            uvloop.run(send_calls(address, calls, on_exchange, num_connections))
        else:
            make: Callable[[int, int], HostileInput]
            address_of = target.address
            if protocol in TEXT_PROTOCOLS:
                make = partial(make_text_input, protocol)
            elif protocol in SERVER_INPUTS:
                make = SERVER_INPUTS[protocol]
                if protocol == "management":
                    url = httpx.URL(target.told_after("TorchServe's management: "))
                    address_of = (url.host, url.port or 0)
            else:
                make = make_input if protocol == "predict" else make_infer_input
            inputs = map(partial(make, seed), in_time)
            uvloop.run(send_all(address_of, inputs, on_exchange, num_connections))
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
        is_wrong = line["level"] in ("error", "critical", "raw") or line["logger"] == "stderr"
        if is_wrong and TOLD not in str(line["message"]):
            verdict.offend(f"log: {line}"[-1500:])
    return verdict


def replay(target: Running, input: HostileInput) -> list[RawExchange]:
    """Send one input alone."""
    exchanges: list[RawExchange] = []
    uvloop.run(send_all(target.address, iter([input]), exchanges.append, 1))
    return exchanges


def judge(exchange: RawExchange, verdict: Verdict) -> None:
    """Count the answers to an input, and note what must not happen."""
    input = exchange.input
    counts = verdict.statuses.setdefault(input.kind, Counter())
    if exchange.error:
        counts["error"] += 1
        verdict.offend(exchange.error, input)
    elif not exchange.answers:
        counts["closed"] += 1
    for answer in exchange.answers:
        counts[str(answer.status)] += 1
        if line := _stray_line(answer.head):
            verdict.offend(f"{answer.status}, with a line that is not ours: {line!r}", input)
        sent = input.data.lower()
        asked_for_it = answer.status == 504 and (b"x-timeout-ms" in sent or b'"timeout"' in sent)
        asked_for_it |= is_told_to_fail(input, answer.status, answer.body)
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
        if input.kind in INFER_KINDS and answer.status >= 400 and not _has_error(answer.body):
            verdict.offend(f"{answer.status}, and no text `error`: {answer.body[:300]!r}", input)
        if complaint := text_complaint(input, answer.status, answer.body):
            verdict.offend(f"{answer.status}, {complaint}: {answer.body[:300]!r}", input)
        if complaint := server_complaint(input, answer.status, answer.body):
            verdict.offend(f"{answer.status}, {complaint}: {answer.body[:300]!r}", input)


def judge_call(exchange: GrpcExchange, verdict: Verdict) -> None:
    """Count the answer to a call of gRPC, and note what must not happen."""
    call = exchange.call
    verdict.statuses.setdefault(call.kind, Counter())[exchange.code.name] += 1
    if exchange.offence:
        data = b"".join(len(each).to_bytes(4, "big") + each for each in call.messages)
        kept = HostileInput(number=call.number, kind=call.kind, data=data, is_framed=True)
        verdict.offend(f"{call.method}: {exchange.offence}", kept)


def _has_error(body: bytes) -> bool:
    """Return whether a body is JSON with the text that clients of other protocols need.

    All errors below `/v1` but those of calls to KServe's models have OpenAI's form: an object.
    """
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return False
    error = value.get("error") if isinstance(value, dict) else None
    if isinstance(error, dict):
        error = error.get("message")
    return isinstance(error, str) and bool(error)


def _stray_line(head: bytes) -> bytes:
    """Return the first line of an answer's head that the service did not mean to send, if any."""
    first, *lines = head.split(b"\r\n")
    if not _STATUS_LINE.fullmatch(first):
        return first
    for line in lines:
        match = _HEADER_LINE.fullmatch(line)
        if match is None or match[1].lower() not in _HEADER_NAMES:
            return line
    return b""


def _judge_ledger(target: Running, verdict: Verdict) -> None:
    """Note it if an accepted instance has not ended in exactly one way."""
    counts: dict[str, Counter[str]] = {}

    def is_balanced() -> bool:
        counts.clear()
        for model, outcome, value in _LEDGER.findall(target.metrics()):
            counts.setdefault(model, Counter())[outcome] = int(float(value))
        is_even = all(found.total() == 2 * found["accepted"] for found in counts.values())
        return is_even and any(found["accepted"] for found in counts.values())

    try:
        until(is_balanced, _SETTLE_S)
    except AssertionError:
        verdict.offend(f"the ledger is out of balance: {counts}")


def _pss_bytes(target: Running) -> int:
    return sum(pss_of(process.pid).own for process in target.family())


def keep(verdict: Verdict, folder: Path) -> list[Path]:
    """Write the inputs that caused offences to files, for `--replay`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for reason, input in verdict.offences[:_MAX_KEPT]:
        if input is not None:
            suffix = "" if input.is_framed else "-unframed"
            path = folder / f"{input.number}-{input.kind}{suffix}.bin"
            path.write_bytes(input.data)
            path.with_suffix(".txt").write_text(reason + "\n")
            paths.append(path)
    return paths


def read_input(path: Path) -> HostileInput:
    """Read an input from a file that `keep` wrote, or from any file of bytes."""
    number, _, kind = path.stem.partition("-")
    return HostileInput(
        number=int(number) if number.isdigit() else 0,
        kind=kind.removesuffix("-unframed") or "file",
        data=path.read_bytes(),
        is_framed=not path.stem.endswith("-unframed"),
    )
