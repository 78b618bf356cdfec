"""Versions that are judged over fake workers in virtual time: by answers, times and faults."""

import asyncio
import json
import random
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from inferpool.service.api.exchange import Predict, begin_call
from inferpool.service.errors import (
    InvalidInputError,
    ServiceError,
    UnavailableError,
    VersionRefusedError,
)
from inferpool.service.parts.swap.changes import Changes
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.messages import ItemError, ItemRef, Outcome, TensorBlob
from tests.fakes import ref_to
from tests.service.catalog.test_catalog import ROOM, Kept

pytestmark = pytest.mark.usefixtures("virtual_time")

GOOD = {"policy": "verified", "wait_s": 20, "num_inputs": 100}


@dataclass
class Acts:
    """What a version makes of its inputs, which are numbers."""

    item_s: float = 0.004
    batch_s: float = 0.004
    noise: float = 0.0
    shift: int = 0
    fails: Callable[[int], bool] = lambda number: False
    error: str = "non_finite_output"
    load: Sequence[float] = (1.0,)
    """How many times as long a batch may take, by chance."""

    def outcome(self, item: ItemRef, number: int) -> Outcome:
        if self.fails(number):
            return ItemError(self.error, "there is no such number")
        label = (number + self.shift) % 5
        if not item.wants_tensors:
            return b'{"label": "%d", "index": %d}' % (label, label)
        scores = [float(each == label) + self.noise for each in range(5)]
        return [TensorBlob("y", "float32", (5,), struct.pack("<5f", *scores))]


class Stage:
    """A catalog over fake workers that act, and the clients of its model."""

    def __init__(self, arena: Arena, **acts: Acts) -> None:
        self.arena = arena
        self.kept = Kept(arena)
        self.catalog = self.kept.catalog
        self.changes = Changes(self.catalog, self.kept.metrics, None, ROOM, grace_s=5)
        self.acts = [acts.get("old", Acts()), acts.get("new", Acts())]
        self.busy: dict[int, float] = {}
        self.answered: Counter[int] = Counter()
        self.failed: Counter[str] = Counter()
        self.chance = random.Random(1)
        self.pause_s = 0.02
        self.at_once = 1
        self.num_asked = 0
        self._predict = Predict(self.catalog.entries, default="m")
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._work)

    @contextmanager
    def clients(self) -> Iterator[None]:
        """Send inputs, `at_once` every `pause_s`."""
        task = asyncio.create_task(self._send())
        try:
            yield
        finally:
            task.cancel()

    async def swap(self, **request: object) -> dict[str, object]:
        """Ask for another version; return what became of it."""
        self.changes.begin_swap("m", GOOD | request)
        await self.changes.until_decided("m")
        return self.info()

    def info(self) -> dict[str, object]:
        info = self.changes.model_info("m")
        newest = info.versions[0]
        return {"serves": info.version, "state": newest.state, "reason": newest.reason,
                "figures": newest.figures}  # fmt: skip

    async def _send(self) -> None:
        while True:
            for _ in range(self.at_once):
                self.num_asked += 1
                call = begin_call("POST", "/predict", b"", [])
                entry = self._predict.find_now(call)
                assert entry is not None
                data = b"%d" % self.num_asked
                try:
                    future = entry.submit(ref_to(data, id=call.request_id), [data])
                except ServiceError as error:
                    self.failed[error.code] += 1
                    continue
                future.add_done_callback(lambda f, version=entry.version: self._note(f, version))
            await asyncio.sleep(self.pause_s)

    def _note(self, future: "asyncio.Future[object]", version: int) -> None:
        if future.cancelled():
            return
        if error := future.exception():
            assert isinstance(error, ServiceError)
            self.failed[error.code] += 1
        else:
            self.answered[version] += 1

    def _work(self) -> None:
        now = self._loop.time()
        for worker in self.kept.engine.started:
            if worker.is_gone or not worker.batches or self.busy.get(id(worker), 0) > now:
                continue
            items, _ = worker.batches[0]
            acts = self.acts[min(worker.id.version, len(self.acts)) - 1]
            spent_s = acts.batch_s + acts.item_s * len(items)
            spent_s *= self.chance.choice(acts.load)
            numbers = [
                int(bytes(self.arena.read(item.offset, item.num_bytes)) or b"0") for item in items
            ]
            outcomes = [acts.outcome(*each) for each in zip(items, numbers, strict=True)]
            self.busy[id(worker)] = now + spent_s
            worker.answer(outcomes, spent_s / 1.5)  # half of it again is preparation
        self._loop.call_later(0.002, self._work)


async def when(claim: Callable[[], object]) -> None:
    """Wait until a claim is true, for at most an hour of virtual time."""
    async with asyncio.timeout(3600):
        while not claim():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def ready(stage: Stage) -> Stage:
    await when(lambda: stage.catalog.serving["m"].is_ready)
    return stage


@pytest.mark.parametrize(
    ("acts", "reason", "figure"),
    [
        (Acts(noise=0.3), "off by up to 0.3", {"deviation": 0.3}),
        (Acts(shift=1), "agrees for 0.00%", {"agreement": 0.0}),
        (Acts(item_s=0.008, batch_s=0.008), "2.00 times as long", {"latency_ratio": 2.0}),
        (Acts(fails=lambda number: number % 100 == 7), "fails on 1 of 100", {"num_faults": 1}),
    ],
    ids=["noise", "labels", "slow", "nan"],
)
async def test_a_worse_version_is_refused_with_the_figure_that_shows_why(
    stage, acts, reason, figure
):
    it = await ready(stage(new=acts))
    with it.clients(), pytest.raises(VersionRefusedError, match=reason) as refused:
        await it.swap()
    for name, value in figure.items():
        assert refused.value.figures[name] == pytest.approx(value, rel=0.01)
    assert it.info()["state"] == "refused"
    assert it.info()["serves"] == 1
    assert not it.failed
    assert not it.catalog.version("m").pool._gatekeepers
    assert it.kept.metrics.total("m").faults == 0  # no client has seen them


async def test_a_version_that_is_as_good_serves_and_nothing_is_served_that_nothing_was_held_against(
    stage,
):
    it = await ready(stage())
    with pytest.raises(VersionRefusedError, match="no input to compare it on"):
        await it.swap(wait_s=1)
    with it.clients():
        found = await it.swap(rollback_s=5)
    assert (found["serves"], found["state"]) == (3, "serving")
    assert found["figures"].num_live == 100
    assert found["figures"].agreement == 1.0


async def test_inputs_of_a_comparison_wait_while_the_queue_is_full_and_refuse_nobody(stage):
    it = await ready(stage())
    it.at_once, it.pause_s = 600, 1.0  # the queue has 512 places
    it.catalog.serving["m"].dispatcher._admission.max_queue_length = 100
    with it.clients():
        found = await it.swap(num_inputs=20, rollback_s=0, max_latency_ratio=9)
    assert found["figures"].num_inputs == 20
    assert found["figures"].num_faults == 0


async def test_a_comparison_is_not_held_up_by_the_clients_of_a_busy_version(stage):
    it = await ready(stage())
    it.at_once, it.pause_s = 10, 0.04  # 250 inputs a second are more than it computes
    it.catalog.serving["m"].dispatcher._admission.max_queue_length = 40  # the arena has more room
    began = asyncio.get_running_loop().time()
    with it.clients():
        await asyncio.sleep(2)
        found = await it.swap(num_inputs=50, wait_s=1, rollback_s=0, max_latency_ratio=9)
    assert found["figures"].num_inputs == 50
    assert asyncio.get_running_loop().time() - began < 20


async def test_inputs_of_a_comparison_are_given_up_when_the_service_stops(stage):
    it = await ready(stage())
    it.acts[1] = Acts(item_s=30)
    with it.clients():
        it.changes.begin_swap("m", GOOD)
        await when(lambda: "compared" in it.changes.model_info("m").change)
        await asyncio.sleep(1)
        pool = it.catalog.versions("m")[1].pool
        stopping = asyncio.create_task(it.changes.stop())
        with pytest.raises(UnavailableError):
            await it.changes.until_decided("m")
        await stopping
    assert not pool.dispatcher.num_unsettled
    assert it.catalog.version("m").number == 1


async def test_a_shadow_computes_its_share_beside_and_no_client_waits_for_it(stage):
    it = await ready(stage(new=Acts(item_s=0.005)))
    before = it.num_asked
    with it.clients():
        found = await it.swap(policy="shadow", traffic_share=0.25, duration_s=20, rollback_s=0)
    num = it.num_asked - before
    figures = found["figures"]
    assert figures.num_inputs - 100 == pytest.approx(0.25 * 20 / it.pause_s, rel=0.1)
    assert num > figures.num_inputs
    assert it.answered[1] >= num - 5  # all but the last ones
    assert found["serves"] == 2


async def test_a_shadow_that_fails_only_later_is_refused_and_what_it_cannot_compute_is_dropped(
    stage,
):
    it = await ready(stage(new=Acts(fails=lambda number: number > 150)))
    with it.clients(), pytest.raises(VersionRefusedError, match="fails on") as refused:
        await it.swap(policy="shadow", traffic_share=0.5, duration_s=3000, num_inputs=50)
    assert refused.value.figures["num_faults"] > 10
    assert not it.failed
    assert it.answered[2] == 0
    assert len(it.catalog.versions("m")) == 1


async def test_a_canary_answers_its_share_and_then_serves(stage):
    it = await ready(stage())
    with it.clients():
        task = asyncio.create_task(it.swap(policy="canary", traffic_share=0.25, duration_s=40))
        await when(lambda: it.catalog.version("m").canary)
        versions = it.changes.model_info("m").versions
        assert [each.state for each in versions] == ["comparing", "serving"]
        found = await task
        serving = it.answered[2]
    assert found["serves"] == 2
    assert serving == pytest.approx(0.25 * 40 / it.pause_s, rel=0.2)
    assert found["figures"].num_answered == pytest.approx(serving, abs=3)
    assert found["figures"].live_latency_ratio == pytest.approx(1.0)
    assert not it.failed
    total = it.kept.metrics.total("m")
    assert total.succeeded < it.num_asked + 250  # 100 compared, as JSON and as tensors, by one


@pytest.mark.parametrize("policy", ["shadow", "canary"])
async def test_a_version_to_which_no_traffic_comes_is_refused_and_says_what_to_do(stage, policy):
    it = await ready(stage())
    asked = {"policy": policy, "num_inputs": 20, "duration_s": 3, "traffic_share": 0}
    with it.clients(), pytest.raises(VersionRefusedError, match="none was for it within") as none:
        await it.swap(**asked)
    assert "raise these, or use the policy `verified`" in none.value.message
    assert none.value.figures["num_live"] == 20
    assert it.info()["serves"] == 1
    assert it.catalog.version("m").is_serving


@pytest.mark.parametrize(
    ("acts", "reason", "figure"),
    [
        (Acts(fails=lambda number: number > 1200), "fails on", "fault_share"),
        (Acts(item_s=0.008, batch_s=0.008), "4.00 times as long", "live_latency_ratio"),
    ],
    ids=["faults", "slow"],
)
async def test_a_canary_that_is_worse_stops_at_once(stage, acts, reason, figure):
    it = await ready(stage(new=acts))
    bound = 9.0 if figure == "fault_share" else 2.1
    request = {
        "policy": "canary",
        "traffic_share": 0.3,
        "duration_s": 3000,
        "max_latency_ratio": bound,
    }
    with it.clients():
        task = asyncio.create_task(it.swap(**request))
        await when(lambda: it.catalog.version("m").canary)
        if figure != "fault_share":
            it.acts[1] = Acts(item_s=0.016, batch_s=0.016)
        with pytest.raises(VersionRefusedError, match=reason) as refused:
            await task
    assert refused.value.figures[figure] > 0.0
    assert it.catalog.version("m").canary is None
    assert it.catalog.version("m").is_serving
    assert sum(it.failed.values()) < 10  # of some thousand


@pytest.mark.parametrize("policy", ["verified", "canary"])
async def test_times_that_vary_by_chance_refuse_nothing(stage, policy):
    it = await ready(stage(old=Acts(load=(1, 2, 4)), new=Acts(load=(1, 2, 4))))
    with it.clients():
        for number in range(2, 12):
            found = await it.swap(
                policy=policy, num_inputs=10, traffic_share=0.5, duration_s=3, rollback_s=0
            )
            assert found["serves"] == number


async def swapped(it: Stage, **request: object) -> None:
    assert (await it.swap(**{"rollback_s": 35, **request}))["serves"] == 2


async def test_changing_load_and_a_busy_machine_roll_nothing_back(stage):
    it = await ready(stage(old=Acts(batch_s=0.02), new=Acts(batch_s=0.02)))
    it.at_once, it.pause_s = 8, 0.2  # large batches, which cost an input little
    with it.clients():
        await swapped(it)
        await asyncio.sleep(8)
        it.at_once, it.pause_s = 1, 0.1  # batches of one, which cost it several times as much
        await asyncio.sleep(10)
        for acts in it.acts:  # the machine has other work now
            acts.item_s, acts.batch_s = 3 * acts.item_s, 3 * acts.batch_s
        await asyncio.sleep(10)
        assert it.info()["state"] == "serving"
        await asyncio.sleep(10)
    assert [version.number for version in it.catalog.versions("m")] == [2]


async def test_faults_that_both_versions_have_roll_nothing_back(stage):
    fails = lambda number: number % 20 == 3  # noqa: E731
    it = await ready(stage(old=Acts(fails=fails), new=Acts(fails=fails)))
    with it.clients():
        await asyncio.sleep(5)
        await swapped(it)
        await asyncio.sleep(40)
    assert it.info()["state"] == "serving"
    assert it.failed["non_finite_output"] > 50


async def test_force_compares_nothing_and_never_rolls_back_by_itself(stage):
    it = await ready(stage(new=Acts(item_s=0.01, shift=1, fails=lambda number: number % 2 == 0)))
    with it.clients():
        await swapped(it, policy="force", wait_s=0)
        await asyncio.sleep(30)
        assert it.info()["state"] == "serving"
        it.changes.begin_rollback("m")
        await it.changes.until_decided("m")
    assert it.info()["serves"] == 1


def lines_of(path: Path, labels: dict[int, str]) -> str:
    rows = [{"instance": number, "label": label} for number, label in labels.items()]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


async def test_a_version_that_labels_more_right_serves_though_it_does_not_agree(stage, tmp_path):
    right = {number: str((number + 1) % 5) for number in range(20)} | {1: "1"}
    validation = lines_of(tmp_path / "right.jsonl", right)
    it = await ready(stage(new=Acts(shift=1, noise=0.5)))
    found = await it.swap(validation=validation, wait_s=0, rollback_s=0)
    figures = found["figures"]
    assert (found["serves"], figures.num_validated) == (2, 20)
    assert (figures.accuracy, figures.accuracy_before) == (0.95, 0.05)


async def test_a_version_that_labels_fewer_right_is_refused(stage, tmp_path):
    validation = lines_of(tmp_path / "x.jsonl", {n: str(n % 5) for n in range(20)})
    it = await ready(stage(new=Acts(fails=lambda number: number == 7)))
    with pytest.raises(VersionRefusedError, match=r"95\.00% of the 20 inputs") as refused:
        await it.swap(validation=validation, wait_s=0)
    assert refused.value.figures["accuracy"] == 0.95
    assert refused.value.figures["accuracy_before"] == 1.0


@pytest.mark.parametrize(
    ("name", "text"),
    [("none", None), ("empty.jsonl", ""), ("bad.jsonl", '{"instance": 1}'), ("no.jsonl", "x")],
)
async def test_a_validation_that_cannot_be_used_is_named_before_anything_is_loaded(
    stage, tmp_path, name, text
):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    it = await ready(stage())
    with pytest.raises(InvalidInputError, match=name):
        await it.swap(validation=str(path))
    assert len(it.kept.engine.started) == 1
