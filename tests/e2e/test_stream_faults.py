"""What happens to streams when workers die, clients leave, limits are reached or a service ends."""

import json
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.running import Running, running, until

EVENTS = {"accept": "application/jsonl"}


def model(name: str, **settings: object) -> dict[str, object]:
    source = f"tests.streaming_model:{name}"
    return {"source": source, "replicas": 1, "max_batch_size": 4, **settings}


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("streams") / "closed"


@pytest.fixture(scope="module", params=[1, 2])
def service(
    request: pytest.FixtureRequest, closed: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    once = tmp_path_factory.mktemp("once") / "once"
    models = {
        "one": model("CountingStream", max_batch_size=1, options={"closed": str(closed)}),
        "joins": model("JoiningStream"),
        "dies": model("JoiningStream", options={"once": str(once)}),
        "texts": {**model("-"), "source": "tests.bench.models:TokenStreams"},
        # A machine that stands still for a moment brings no stream to another's limit.
        "limited": model(
            "JoiningStream",
            options={"step_s": 0.001},
            stream_gap_s=1.2,
            max_stream_s=3.0,
            max_stream_parts=50,
        ),
    }
    with running(settings={"front_ends": request.param, "models": models}) as service:
        yield service


def stream(service: Running, name: str, instance: object, **options: Any) -> list[Any]:
    """Return the parts of a stream; what it failed with is the last one."""
    answer = service.post(
        f"/predict/{name}", json={"instances": [instance]}, headers=EVENTS, **options
    )
    if answer.status_code != 200:
        return [answer.json()]
    return [line.get("part", line) for line in map(json.loads, answer.text.splitlines())]


def balance(service: Running, name: str) -> float:
    """Return how many instances of a model are not settled, by its counters."""
    instances = f'instances_total{{model="{name}",outcome='
    ends = ("succeeded", "failed", "expired", "cancelled")
    ended = sum(service.metric(f'{instances}"{outcome}"}}') for outcome in ends)
    return service.metric(f'{instances}"accepted"}}') - ended


def is_empty(service: Running, name: str) -> bool:
    in_flight = service.metric(f'instances_in_flight{{model="{name}"}}')
    is_open = service.metric(f'open_streams{{model="{name}"}}')
    return balance(service, name) == in_flight == is_open == 0


def test_a_worker_that_dies_after_a_part_breaks_the_stream_and_before_it_none(service: Running):
    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(stream, service, "dies", {"n": 100, "parts": 60})
        *parts, error = stream(service, "dies", {"n": 5, "parts": 9, "do": "kill", "at": 4})
    assert parts == [5, 6, 7, 8]
    assert error["error"]["code"] == "stream_broken"
    assert error["error"]["parts_sent"] == 4
    *parts, last = other.result()
    if isinstance(last, dict):  # it had begun, and was broken too
        assert last["error"]["code"] == "stream_broken"
        assert last["error"]["parts_sent"] == len(parts)
    else:
        parts.append(last)
        assert len(parts) == 60
    assert parts == [*range(100, 100 + len(parts))]
    assert stream(service, "dies", {"n": 7, "do": "kill", "at": 0}) == [7, 8, 9]  # not again
    service.wait_until_full()
    until(lambda: is_empty(service, "dies"))


def test_a_client_that_hangs_up_ends_its_stream_and_no_other(service: Running, closed: Path):
    endless = {"n": 1000, "parts": 1_000_000, "delay_s": 0.01}
    url = service.address_of("/predict/one")
    with (
        httpx.Client(timeout=60) as client,
        client.stream("POST", url, json={"instances": [endless]}, headers=EVENTS) as answer,
    ):
        lines = answer.iter_lines()
        assert [json.loads(next(lines))["part"] for _ in range(3)] == [1000, 1001, 1002]
        assert service.metric('open_streams{model="one"}') == 1
    until(lambda: is_empty(service, "one"))
    until(lambda: "1000\n" in closed.read_text())
    assert service.metric('instances_total{model="one",outcome="cancelled"}') == 1
    assert stream(service, "one", {"n": 1}) == [1, 2, 3]
    closed.write_text("")


def test_no_stream_is_without_an_end(service: Running):
    def code(instance: object, **options: Any) -> tuple[str, int]:
        *parts, error = stream(service, "limited", instance, **options)
        return error["error"]["code"], len(parts)

    before = service.worker("limited")["pid"]
    assert code({"n": 1, "parts": 100_000}) == ("stream_too_long", 50)
    assert code({"n": 1, "parts": 5, "delay_s": 2.0})[0] == "stream_gap"
    ended, num = code({"n": 1, "parts": 100, "delay_s": 0.3})
    assert ended == "stream_too_long"
    assert num < 20
    late = {"n": 1, "delay_s": 0.4}
    answer = service.post(
        "/predict/limited",
        json={"instances": [late]},
        headers={**EVENTS, "x-timeout-ms": "100"},
    )
    assert answer.status_code == 504, "the deadline is for the first part"
    assert service.worker("limited")["pid"] == before, "and the worker goes on"
    until(lambda: is_empty(service, "limited"))


def test_all_is_collected_for_clients_that_ask_for_no_stream(service: Running):
    instances = [{"n": 3, "parts": 2}, {"n": 6, "parts": 0}, {"n": 9, "parts": 400}]
    assert service.post("/predict/joins", json={"instances": instances}).json() == {
        "predictions": [[3, 4], [], [*range(9, 409)]]
    }
    instances = [{"n": 3, "parts": 2}, {"n": 1, "parts": 60}]
    answer = service.post("/predict/limited", json={"instances": instances}).json()
    assert answer["predictions"][0] == [3, 4]
    assert answer["predictions"][1]["error"]["code"] == "stream_too_long"
    assert answer["predictions"][1]["parts"] == [*range(1, 51)]
    until(lambda: is_empty(service, "joins"))


@pytest.mark.parametrize("front_ends", [1, 2])
def test_a_service_that_ends_lets_streams_end_and_cuts_off_those_that_go_on(front_ends: int):
    settings = {"front_ends": front_ends, "drain_timeout_s": 5.0, "shutdown_delay_s": 0.0}
    models = {"m": model("JoiningStream", options={"step_s": 0.05})}
    with (
        running(settings={**settings, "models": models}) as service,
        ThreadPoolExecutor(2) as threads,
    ):
        goes_on = threads.submit(stream, service, "m", {"n": 1, "parts": 100_000})
        until(lambda: service.metric('open_streams{model="m"}') == 1)
        ends = threads.submit(stream, service, "m", {"n": 1, "parts": 20})
        # On a slow machine it is over by the time that it would be seen to be open.
        until(lambda: service.metric('instances_total{model="m",outcome="accepted"}') == 2)
        service.signal(signal.SIGTERM)
        assert ends.result() == [*range(1, 21)]
        *parts, error = goes_on.result()
        assert parts == [*range(1, 1 + len(parts))]
        assert len(parts) > 20
        assert error["error"]["code"] == "unavailable"
        assert service.wait() == 0


def test_a_reader_that_reads_nothing_loses_its_stream_and_nobody_else(service: Running):
    body = json.dumps({"instances": [{"parts": 100_000, "bytes": 1 << 15}]})
    address = httpx.URL(service.url)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((address.host, address.port))
        slow.sendall(
            f"POST /predict/texts HTTP/1.1\r\nhost: h\r\naccept: application/jsonl\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"connection: close\r\n\r\n{body}".encode()
        )
        failed = 'instances_total{model="texts",outcome="failed"}'
        while not service.metric(failed):
            assert stream(service, "texts", {"parts": 20, "bytes": 3}) == ["xxx"] * 20
        *_, last = b"".join(iter(lambda: slow.recv(1 << 20), b"")).split(b'{"instance":')
        assert b'"code":"reader_too_slow"' in last
    until(lambda: is_empty(service, "texts"))
    assert service.metric(failed) == 1
    assert service.metric("unread_bytes") == 0
