"""From options to a plan for the load generator: requests, and what counts as a good answer."""

import json
from functools import partial
from urllib.parse import urlsplit

from inferpool.service.tools.chaos.questions import problem_code
from inferpool.service.tools.trial.connection import post_request
from inferpool.service.tools.trial.load import LoadExchange, LoadPlan
from inferpool.service.tools.trial.tally import LoadTally
from tests.load.options import Options

_MAX_TIMINGS = 12
_TIMING, _TIMED = "timing ", "timed "
"""How the names of sums of Server-Timing begin: the milliseconds, and how many answers had them."""
_RETRY_S, _RETRIES = "retry-after s", "retry-after"


def plan_for(options: Options) -> LoadPlan:
    """Return what to send."""
    parts = urlsplit(options.url)
    is_encrypted = parts.scheme == "https"
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    headers = {**options.headers, "Host": parts.netloc.rpartition("@")[2]}
    return LoadPlan(
        address=(str(parts.hostname), parts.port or (443 if is_encrypted else 80)),
        requests=[
            post_request(path, each.body, each.content_type, headers)
            for each in options.source.bodies()
        ],
        is_shuffled=True,
        connections=options.connections,
        rate=options.rate,
        duration_s=options.duration_s,
        num_requests=options.num_requests,
        warmup_s=options.warmup_s,
        timeout_s=options.timeout_s,
        tls=options.verify if is_encrypted else None,
        seed=options.seed,
        judge=partial(judge, options.expect),
    )


def judge(expect: str | None, exchange: LoadExchange, tally: LoadTally) -> str:
    """Call a 2xx good if its JSON has the expected field; see `service.tools.trial.load.Judge`."""
    answer = exchange.answer
    if answer is None:
        return exchange.failure
    if timing := answer.header(b"server-timing"):
        _add_timing(tally, timing.decode("latin-1"))
    if not 200 <= answer.status < 300:
        retry_after = answer.header(b"retry-after")
        if retry_after:
            tally.sums[_RETRIES] += 1
            tally.sums[_RETRY_S] += int(retry_after) if retry_after.isdigit() else 0  # else a date
        is_json = b"json" in answer.header(b"content-type")
        return f"{answer.status} {problem_code(answer.body) if is_json else ''}"[:60].strip()
    return f"no {expect!r} in the answer" if expect and not _has_field(answer.body, expect) else ""


def timings_ms(tally: LoadTally) -> dict[str, float]:
    """Return what Server-Timing said on average, by name, in the order the server names them."""
    sums = tally.sums
    names = [name.removeprefix(_TIMED) for name in sums if name.startswith(_TIMED)]
    return {name: sums[_TIMING + name] / sums[_TIMED + name] for name in names}


def retry_after(tally: LoadTally) -> tuple[int, float]:
    """Return how many answers had a Retry-After, and the sum of what they said in seconds."""
    return round(tally.sums.get(_RETRIES, 0)), tally.sums.get(_RETRY_S, 0)


def _has_field(body: bytes, name: str) -> bool:
    try:
        document = json.loads(body)
    except ValueError:
        return False
    return isinstance(document, dict) and name in document


def _add_timing(tally: LoadTally, header: str) -> None:
    """Add the durations of a Server-Timing header (W3C): `queue;dur=0.1, inference;dur=2`."""
    for metric in header.split(","):
        name, *parameters = (part.strip() for part in metric.split(";"))
        if _TIMED + name not in tally.sums and len(tally.sums) >= 2 * _MAX_TIMINGS:
            continue
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key == "dur":
                try:
                    tally.sums[_TIMING + name] += float(value)
                except ValueError:
                    continue
                tally.sums[_TIMED + name] += 1
