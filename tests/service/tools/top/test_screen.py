import json
from typing import Any

import pytest
from rich.cells import cell_len

from inferpool.service.tools.top.screen import ScreenSize, page_lines, screen_lines
from inferpool.service.tools.top.state import View, read_state
from tests.service.tools.top.states import NOW, host, sample, state, worker

ENDING = {
    "worker": "resnet/0",
    "incarnation": 3,
    "time": NOW,
    "cause": "signal",
    "reason": "killed \x1b[2J from outside",
}


def view_of(*events: bytes) -> View:
    view = View("http://host:8000")
    for event in events:
        view.take(read_state(event))
    return view


def drawn(view: View, width: int = 80, height: int = 24, **how: Any) -> str:
    lines = screen_lines(view, ScreenSize(width=width, height=height, **how))
    return "\n".join(line.plain for line in lines)


def test_screen_shows_the_current_work_of_a_model():
    text = drawn(
        view_of(state(endings=[ENDING], rejected_per_s={"queue_full": 2.0, "deadline": 1}))
    )
    for piece in (
        "inferpool 1.2.3  ready  http://host:8000",
        "up 1 h 1 min, 12 connections, shared memory 3% of 256 MiB",
        "throughput 1,234/s",
        "p99        12.3 ms",
        "4.1 ms p50, 8.2 ms p95",
        "7 of 1,024 waiting, 9 in flight",
        "queue 1.0 ms p50, 3.0 ms p99; inference 2.5 ms p50, 3.5 ms p99",
        "refused    3.0/s: queue_full 2.0/s, deadline 1.0/s",
        "batches of 1 ▂  8 █  (of 8)",
        "0       ready  cuda:0  512 MiB",
        "resnet/0#3 signal: killed \\x1b[2J from outside",
        "q quit  p pause  ? help",
    ):
        assert piece in text


def test_jobs_take_one_line_where_there_are_any():
    running = {"by_state": {"queued": 2, "failed": 1}, "instances_waiting": 4321}
    for jobs, line in (
        (running | {"instances_per_s": 64}, "jobs: 2 queued, 1 failed; 4,321 instances wait, 64"),
        ({"by_state": {"succeeded": 3}}, "jobs: 3 succeeded\n"),
        ({"open": False}, "the store of jobs is not open"),
    ):
        assert line in drawn(view_of(state(jobs=jobs)))
    for jobs in (None, {"open": True, "by_state": {}}):
        assert "jobs" not in drawn(view_of(state(jobs=jobs)))


LOST = {"name": "gpu-9", "state": "lost", "reason": "no sign of life for 3 s", "age_s": 61}


def test_hosts_have_a_table_with_those_in_trouble_first():
    cluster = {
        "cluster_address": "0.0.0.0:7000",
        "hosts": [host("gpu-0"), host("gpu-1", "silent", workers_ready=0)],
        "lost_hosts": [LOST],
    }
    view = view_of(state([worker(host="gpu-0")], cluster=cluster))
    text = drawn(view, width=160, height=40)
    for piece in (
        "gpu-9 lost 1 min ago: no sign of life for 3 s",
        "gpu-0  connected   2 of 2      0.4 ms  0.2 s  -12.0 ms  1.2.3    10.0.0.7:41234",
        "NVIDIA H100, 32 CPU cores",
        "0       ready  gpu-0  cuda:0",
    ):
        assert piece in text
    assert text.index("gpu-9") < text.index("gpu-1") < text.index("gpu-0")
    narrow = drawn(view, width=60)
    assert "gpu-1" in narrow
    assert "10.0.0.7" not in narrow
    assert "more hosts" in drawn(view, height=10)
    assert "gpu-1" in "\n".join(line.plain for line in page_lines(view, 100, is_plain=True))


def test_a_cluster_without_hosts_says_where_they_join():
    cluster = {"cluster_address": "0.0.0.0:7000"}
    assert "no host has joined at 0.0.0.0:7000" in drawn(view_of(state([], cluster=cluster)))


ODD = {
    "nothing yet": (),
    "no models": (state().replace(b'"models": [{', b'"models": [], "x": [{'),),
    "no answers": (
        state(latency_ms=None, queue_ms=None, inference_ms=None, batch_sizes={}, queue_limit=0),
    ),
    "many hosts": (
        state(cluster={"cluster_address": "h", "hosts": [host(str(n)) for n in range(50)]}),
    ),
    "loading": (
        state(
            [worker(state="starting", reason="loads weights")], is_ready=False, reason="starting"
        ),
    ),
    "forty workers, one failed": (
        state([*(worker(n) for n in range(39)), worker(39, "failed", reason="no memory " * 20)]),
    ),
    "many models": (state(others=tuple(f"model-{n}" for n in range(30)), endings=[ENDING] * 9),),
    "long names": (state(source="x" * 200, rejected_per_s={f"reason-{n}": 1.0 for n in range(9)}),),
}


@pytest.mark.parametrize("name", ODD)
def test_every_state_fits_every_terminal(name):
    view = view_of(*ODD[name])
    for width, height in ((200, 60), (80, 24), (40, 24), (40, 10), (12, 3), (1, 1)):
        for is_plain in (False, True):
            text = drawn(view, width, height, is_plain=is_plain)
            assert len(text.splitlines()) <= height
            assert max(map(cell_len, text.splitlines()), default=0) <= width
            assert text.isascii() or not is_plain or "…" in text


def test_gpus_are_summed_up_and_those_in_trouble_are_named():
    gib = 1 << 30
    well = {"memory_bytes": 80 * gib, "memory_used_bytes": 7 * gib, "utilization": 0.5}
    gpus = (
        {"index": 0, "up": True, "temperature_c": 61.0, **well},
        {"index": 1, "up": True, "temperature_c": 43.0, **well, "last_xid": 31},
        {"index": 2, "up": False, "memory_bytes": 80 * gib},
    )
    text = drawn(view_of(state(gpus=gpus)))
    assert "2 GPUs, 50% busy, 14.0 GiB of 160.0 GiB, 61 C, lost: 2, Xid 31 on 1" in text


@pytest.mark.parametrize(
    ("workers", "width", "shown"),
    [
        (
            [*(worker(n) for n in range(39)), worker(39, "failed")],
            80,
            ("39      failed", "more workers"),
        ),
        (
            [worker(1, "backoff", reason="the weights are not there")],
            60,
            ("the weights are not the",),
        ),
        (
            [worker(restarts=3)],
            40,
            ("0       ready  512 MiB         3", "p99        12.3 ms", "7 of 1,024, 9 in flight"),
        ),
    ],
    ids=["few fit: those that are not ready first", "the reason before figures", "narrow"],
)
def test_what_matters_most_is_kept_where_there_is_little_room(
    workers: list[dict[str, Any]], width: int, shown: tuple[str, ...]
):
    text = drawn(view_of(state(workers)), width=width)
    assert [piece for piece in shown if piece not in text] == []
    assert width == 80 or "cuda:0" not in text


def test_work_of_workers_is_computed_from_two_events():
    busy = [worker(0, num_batches=150), worker(1), worker(2, incarnation=1)]
    view = view_of(state([worker(0), worker(1), worker(2)]), state(busy, at=NOW + 2))
    rows = {line.split()[0]: line for line in drawn(view).splitlines() if line[:1].isdigit()}
    assert "25.0/s" in rows["0"]
    assert rows["0"].endswith("at work")
    assert rows["1"].endswith("idle")
    assert rows["2"].rstrip().endswith("0"), "it is another process than before"


def test_history_comes_with_the_first_event_and_grows():
    past = [{"time": NOW - 3 + n, "models": {"resnet": sample()}} for n in range(3)]
    past[1]["models"]["resnet"]["latency_ms"] = None
    view = view_of(state(history=past), state(at=NOW + 1))
    (p99,) = (line for line in drawn(view).splitlines() if line.startswith("p99"))
    assert p99.split("ms")[1].strip() == "█ ███"
    again = view_of(state(history=past), state(history=past[:1], at=NOW + 5))
    assert len(again.scene.past) == 2, "a new stream brings a new history"


def test_pause_freezes_the_picture_while_the_feed_goes_on():
    view = view_of(state())
    view.pause()
    view.take(read_state(state(at=NOW + 1, queue_depth=99)))
    assert "7 of 1,024" in drawn(view)
    assert "paused at" in drawn(view)
    view.pause()
    assert "99 of 1,024" in drawn(view)


def test_models_are_chosen_by_number_or_in_turn_and_a_page_has_them_all():
    view = view_of(state([worker(n) for n in range(40)], others=("bert", "gpt")))
    assert " 1 resnet   2 bert   3 gpt " in drawn(view)
    view.step(-1)
    assert view.chosen == 2
    view.step(1)
    view.choose(1)
    view.choose(7)
    assert "bert ready" in drawn(view)
    text = "\n".join(line.plain for line in page_lines(view, 80, is_plain=True))
    assert [f"{name} ready" in text for name in ("resnet", "bert", "gpt")] == [True] * 3
    assert text.count("\n39 ") == 3, "the page has every worker of every model"
    assert text.isascii()
    view.take(read_state(state(at=NOW + 1)))  # with resnet only
    assert "resnet ready" in drawn(view)


def test_the_chosen_model_stays_chosen_while_others_come_and_go():
    view = view_of(state(others=("a", "b")))
    view.choose(2)
    gone = json.loads(state(others=("b",), at=NOW + 1))
    view.take(read_state(json.dumps(gone).encode()))
    assert drawn(view).count("b ready") == 1
    gone["health"]["models"], gone["models"], gone["time"] = [], {}, NOW + 2
    view.take(read_state(json.dumps(gone).encode()))
    assert "No models are served." in drawn(view)
    view.take(read_state(state(at=NOW + 3)))
    assert "resnet ready" in drawn(view)


def test_the_version_the_change_and_the_workers_of_other_versions_are_shown():
    event = json.loads(state([worker(0)]))
    (model,) = event["health"]["models"]
    refused = {"number": 2, "state": "refused", "reason": "it is twice as slow"}
    model |= {"version": 1, "versions": [refused, {"number": 1, "state": "serving"}]}
    said = drawn(view_of(json.dumps(event).encode()))
    assert "resnet ready version 1" in said
    assert "version 2 refused: it is twice as slow" in said
    loading = worker(0, "starting", name="resnet/3/0", reason="loading weights")
    model |= {"change": "swap: version 3 starts", "other_workers": [loading]}
    said = drawn(view_of(json.dumps(event).encode()))
    assert "swap: version 3 starts" in said
    assert "3/0" in said
