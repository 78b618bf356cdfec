from typing import Any

import pytest
from rich.cells import cell_len

from inferpool.service.client.top.screen import ScreenSize, page_lines, screen_lines
from inferpool.service.client.top.state import View, read_state
from tests.service.client.top.states import NOW, event, sample, worker

ENDING = {
    "worker": "resnet/0",
    "incarnation": 3,
    "time": NOW,
    "cause": "signal",
    "reason": "killed \x1b[2J from outside",
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


def view_of(*events: bytes) -> View:
    view = View("http://host:8000")
    for each in events:
        view.take(read_state(each))
    return view


def drawn(view: View, width: int = 80, height: int = 24, **how: Any) -> str:
    lines = screen_lines(view, ScreenSize(width=width, height=height, **how))
    return "\n".join(line.plain for line in lines)


def page(view: View) -> str:
    return "\n".join(line.plain for line in page_lines(view, 100, is_plain=True))


def test_screen_shows_the_current_work_of_a_model():
    refused = {"queue_full": 2.0, "deadline": 1}
    text = drawn(view_of(event(endings=[ENDING], rejected_per_s=refused)))
    for piece in (
        "up 1 h 1 min, 12 connections, shared memory 3% of 256 MiB",
        "throughput 1,234/s",
        "7 of 1,024 waiting, 9 in flight",
        "refused    3.0/s: queue_full 2.0/s, deadline 1.0/s",
        "batches of 1 ▂  8 █  (of 8)",
        "resnet/0#3 signal: killed \\x1b[2J from outside",
    ):
        assert piece in text


JOBS = {"by_state": {"queued": 2, "failed": 1}, "instances_waiting": 4321, "instances_per_s": 64}
CLUSTER = {"cluster_address": "0.0.0.0:7000"}
WELL = {"up": True, "memory_bytes": 80 << 30, "memory_used_bytes": 7 << 30, "utilization": 0.5}
GPUS = (
    {"index": 0, "temperature_c": 61.0, **WELL},
    {"index": 1, "temperature_c": 43.0, **WELL, "last_xid": 31},
    {"index": 2, "up": False, "memory_bytes": 80 << 30},
)
VERSIONS = {
    "version": 1,
    "change": "swap: version 3 starts",
    "versions": [
        {"number": 2, "state": "refused", "reason": "twice as slow"},
        {"number": 1, "state": "serving"},
    ],
    "other_workers": [worker(0, "starting", name="resnet/3/0", reason="loading weights")],
}
LATE = [worker(1, "backoff", reason="the weights are not there")]
FORTY = [*(worker(n) for n in range(39)), worker(39, "failed", reason="no memory " * 20)]


@pytest.mark.parametrize(
    ("given", "width", "shown", "hidden"),
    [
        ({"jobs": JOBS}, 80, ["jobs: 2 queued, 1 failed; 4,321 instances wait, 64"], []),
        ({"jobs": {"by_state": {"succeeded": 3}}}, 80, ["jobs: 3 succeeded\n"], []),
        ({"jobs": {"open": False}}, 80, ["the store of jobs is not open"], []),
        ({"jobs": {"open": True, "by_state": {}}}, 80, [], ["jobs"]),
        ({"workers": [], "health": CLUSTER}, 80, ["no host has joined at 0.0.0.0:7000"], []),
        (
            {"health": {"gpus": GPUS}}, 80,
            ["2 GPUs, 50% busy, 14.0 GiB of 160.0 GiB, 61 C, lost: 2, Xid 31 on 1"], [],
        ),
        (
            {"model": VERSIONS}, 80,
            ["swap: version 3 starts", "3/0"], ["twice as slow"],
        ),
        (
            {"model": {"version": 1, "versions": VERSIONS["versions"]}}, 80,
            ["resnet ready version 1", "version 2 refused: twice as slow"], [],
        ),
        ({"workers": FORTY}, 80, ["39      failed", "more workers"], []),
        ({"workers": LATE}, 60, ["the weights are not the"], ["cuda:0"]),
        (
            {"workers": [worker(restarts=3)]}, 40,
            ["0       ready  512 MiB         3", "7 of 1,024, 9 in flight"], ["cuda:0"],
        ),
    ],
)  # fmt: skip
def test_what_matters_most_is_shown(
    given: dict[str, Any], width: int, shown: list[str], hidden: list[str]
):
    text = drawn(view_of(event(**given)), width=width)
    assert [piece for piece in shown if piece not in text] == []
    assert [piece for piece in hidden if piece in text] == []


def test_hosts_have_a_table_with_those_in_trouble_first():
    lost = {"name": "gpu-9", "state": "lost", "reason": "no sign of life for 3 s", "age_s": 61}
    hosts = [host("gpu-0"), host("gpu-1", "silent", workers_ready=0)]
    health = {**CLUSTER, "hosts": hosts, "lost_hosts": [lost]}
    view = view_of(event([worker(host="gpu-0")], health=health))
    text = drawn(view, width=160, height=40)
    for piece in (
        "gpu-9 lost 1 min ago: no sign of life for 3 s",
        "gpu-0  connected   2 of 2      0.4 ms  0.2 s  -12.0 ms  1.2.3    10.0.0.7:41234",
        "0       ready  gpu-0  cuda:0",
    ):
        assert piece in text
    assert text.index("gpu-9") < text.index("gpu-1") < text.index("gpu-0")
    narrow = drawn(view, width=60)
    assert "gpu-1" in narrow
    assert "10.0.0.7" not in narrow
    assert "more hosts" in drawn(view, height=10)
    assert "gpu-1" in page(view)


ODD = {
    "nothing yet": (),
    "no models": (event(names=()),),
    "no answers": (
        event(latency_ms=None, queue_ms=None, inference_ms=None, batch_sizes={}, queue_limit=0),
    ),
    "many hosts": (event(health={**CLUSTER, "hosts": [host(str(n)) for n in range(50)]}),),
    "loading": (
        event([worker(state="starting", reason="loads")], model={"ready": False, "reason": "no"}),
    ),
    "forty workers, one failed": (event(FORTY),),
    "many models": (event(names=[f"model-{n}" for n in range(30)], endings=[ENDING] * 9),),
    "long names": (event(source="x" * 200, rejected_per_s={f"reason-{n}": 1.0 for n in range(9)}),),
}


@pytest.mark.parametrize("name", ODD)
def test_every_state_fits_every_terminal(name: str):
    view = view_of(*ODD[name])
    for width, height in ((200, 60), (80, 24), (40, 24), (40, 10), (12, 3), (1, 1)):
        for is_plain in (False, True):
            text = drawn(view, width, height, is_plain=is_plain)
            assert len(text.splitlines()) <= height
            assert max(map(cell_len, text.splitlines()), default=0) <= width
            assert text.isascii() or not is_plain or "…" in text


def test_work_of_workers_is_computed_from_two_events():
    busy = [worker(0, num_batches=150), worker(1), worker(2, incarnation=1)]
    view = view_of(event([worker(0), worker(1), worker(2)]), event(busy, at=NOW + 2))
    rows = {line.split()[0]: line for line in drawn(view).splitlines() if line[:1].isdigit()}
    assert "25.0/s" in rows["0"]
    assert rows["0"].endswith("at work")
    assert rows["1"].endswith("idle")
    assert rows["2"].rstrip().endswith("0"), "it is another process than before"


def test_history_comes_with_the_first_event_and_grows():
    past = [{"time": NOW - 3 + n, "models": {"resnet": sample()}} for n in range(3)]
    past[1]["models"]["resnet"]["latency_ms"] = None
    view = view_of(event(history=past), event(at=NOW + 1))
    (p99,) = (line for line in drawn(view).splitlines() if line.startswith("p99"))
    assert p99.split("ms")[1].strip() == "█ ███"
    again = view_of(event(history=past), event(history=past[:1], at=NOW + 5))
    assert len(again.scene.past) == 2, "a new stream brings a new history"


def test_pause_freezes_the_picture_while_the_feed_goes_on():
    view = view_of(event())
    view.pause()
    view.take(read_state(event(at=NOW + 1, queue_depth=99)))
    assert "7 of 1,024" in drawn(view)
    assert "paused at" in drawn(view)
    view.pause()
    assert "99 of 1,024" in drawn(view)


def test_models_are_chosen_by_number_or_in_turn_and_a_page_has_them_all():
    view = view_of(event([worker(n) for n in range(40)], names=("resnet", "bert", "gpt")))
    assert " 1 resnet   2 bert   3 gpt " in drawn(view)
    view.step(-1)
    assert view.chosen == 2
    view.step(1)
    view.choose(1)
    view.choose(7)
    assert "bert ready" in drawn(view)
    text = page(view)
    assert [f"{name} ready" in text for name in ("resnet", "bert", "gpt")] == [True] * 3
    assert text.count("\n39 ") == 3, "the page has every worker of every model"
    assert text.isascii()


def test_the_chosen_model_stays_chosen_while_others_come_and_go():
    view = view_of(event(names=("a", "b", "c")))
    view.choose(2)
    for at, (names, shown) in enumerate(
        ((["a", "c"], "c ready"), ([], "No models are served."), (["a"], "a ready"))
    ):
        view.take(read_state(event(names=names, at=NOW + 1 + at)))
        assert shown in drawn(view)
