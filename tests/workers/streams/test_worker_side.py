"""The loop of a worker whose model answers in parts, in a thread of this process."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import inferpool
from inferpool.models.base import Model
from inferpool.models.item import Features, Item
from inferpool.workers.remote.wire import PartsSent, frame_start
from inferpool.workers.shared.messages import BatchDone, ItemError, StreamPart
from inferpool.workers.streams.parts import MAX_PART_BYTES, sizes_cut
from inferpool.workers.streams.worker_side import MAX_STEP_BYTES
from tests.models.items import json_item
from tests.streaming_model import (
    AsyncCountingStream,
    CountingBatches,
    CountingStream,
    JoiningStream,
    TensorStream,
)
from tests.workers.streams.driven import DrivenLoop, counted, driven


class Scripted(Model):
    """Yields what a test's generator does; "x" of an instance is its JSON."""

    def __init__(self, *, joins: bool = False) -> None:
        self.joins = joins
        self.called: list[list[Any]] = []
        """Instances of each call of the generator."""
        self.admitted: list[tuple[list[Any], list[int]]] = []
        self.dropped: list[int] = []

    def preprocess(self, item: Item) -> Any:
        return {"x": item.json()}

    def collate(self, instances: Any) -> Any:
        return [each["x"] for each in instances]

    def stream(self, batch: Any) -> Iterator[object]:
        self.called.append(batch)
        return self.script(batch)

    def script(self, batch: Any) -> Iterator[object]:
        raise NotImplementedError

    def admit(self, batch: Any, positions: list[int]) -> None:
        self.admitted.append((batch, positions))

    def drop(self, position: int) -> None:
        self.dropped.append(position)


@pytest.mark.parametrize("kind", [CountingStream, AsyncCountingStream, CountingBatches])
def test_parts_come_in_order_and_each_batch_is_answered_once(kind: type[Model]):
    with driven(kind()) as loop:
        first, second = loop.give(counted(5, 3)), loop.give(counted(7, 0), counted(9, 2))
        assert loop.answer(first) == [([5, 6, 7], "")]
        assert loop.answer(second) == [([], ""), ([9, 10], "")]
        assert loop.heartbeat._row[2] == 2, "each batch counts as answered"


def test_tensors_go_through_postprocess_and_render_and_parameters_count():
    with driven(TensorStream()) as loop:
        good = loop.give(counted(1, 2), parameters=b'{"prefix": "y"}')
        refused = loop.give(counted(1, 2), parameters=b'{"refuse": 1}')
        assert loop.answer(good) == [(["y2", "y4"], "")]
        assert loop.answer(refused) == [([], "invalid_input")]


class OddTensors(Scripted):
    def script(self, batch: Any) -> Iterator[object]:
        match batch[0]:
            case "rows":
                yield {"y": torch.zeros(2, 3)}
            case "nan":
                yield {"y": torch.zeros(1, 3)}
                yield {"y": torch.full((1, 3), torch.nan)}
            case "bare":
                yield torch.tensor([1, 2])
                yield {"of": torch.tensor([[3]]), "too": 4}
            case "content":
                yield inferpool.Content(b"abc", "image/png", {"X-Of": "no place"})
                yield inferpool.Content(b"abc", "no type")
            case "text":
                yield from ("a", "b", {"c": None}, None, [1.5])


def test_any_value_that_json_can_show_is_a_part_and_others_end_the_stream():
    with driven(OddTensors()) as loop:
        expected: Mapping[str, tuple[list[Any], str]] = {
            "rows": ([], "model_error"),
            "nan": ([[0, 0, 0]], "non_finite_output"),
            "bare": ([[1, 2], {"of": [[3]], "too": 4}], ""),
            "content": ([{"b64": "YWJj", "media_type": "image/png"}], "model_error"),
            "text": (["a", "b", {"c": None}, None, [1.5]], ""),
        }
        for name, answer in expected.items():
            assert loop.answer(loop.give(name)) == [answer]


class Rendering(Scripted):
    def script(self, batch: Any) -> Iterator[object]:
        yield from batch[0]

    def render(self, outputs: Any, parameters: Mapping[str, object]) -> object:
        if outputs == "refused":
            raise inferpool.InputError("no")
        return f"<{outputs}>"


def test_other_values_go_to_the_models_own_render_alone():
    with driven(Rendering()) as loop:
        assert loop.answer(loop.give(["a", "b"])) == [(["<a>", "<b>"], "")]
        assert loop.answer(loop.give(["a", "refused", "b"])) == [(["<a>"], "invalid_input")]


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.message for each in caplog.records if each.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    ("deed", "code"),
    [
        ("raise", "model_error"),
        ("input", "invalid_input"),
        ("nan", "non_finite_output"),
        ("object", "model_error"),
    ],
)
def test_stream_that_fails_at_a_part_keeps_those_before(
    deed: str, code: str, caplog: pytest.LogCaptureFixture
):
    with driven(CountingStream()) as loop:
        assert loop.answer(loop.give(counted(5, 4, do=deed, at=2))) == [([5, 6], code)]
        assert len(errors_in(caplog)) == (deed != "input")
        assert loop.answer(loop.give(counted(1, 1))) == [([1], "")]


@pytest.mark.parametrize(("deed", "code"), [("early", "model_error"), ("unready", "invalid_input")])
def test_instance_that_cannot_be_prepared_fails_alone(deed: str, code: str):
    with driven(CountingBatches()) as loop:
        found = loop.answer(loop.give(counted(5, 2), counted(6, 2, do=deed), counted(7, 1)))
        assert found == [([5, 6], ""), ([], code), ([7], "")]


def test_only_the_stream_at_fault_fails_before_the_first_part(caplog: pytest.LogCaptureFixture):
    with driven(CountingBatches()) as loop:
        found = loop.answer(loop.give(counted(5, 2), counted(6, 2, do="raise"), counted(7, 1)))
        assert found == [([5, 6], ""), ([], "model_error"), ([7], "")]
    assert len(errors_in(caplog)) == 1


@pytest.mark.parametrize("deed", ["raise", "position"])
def test_all_streams_of_a_call_fail_once_they_have_parts(
    deed: str, caplog: pytest.LogCaptureFixture
):
    with driven(CountingBatches()) as loop:
        found = loop.answer(loop.give(counted(5, 4), counted(6, 4, do=deed, at=2)))
        assert found == [([5, 6], "model_error"), ([6, 7], "model_error")]
        assert loop.answer(loop.give(counted(1, 1))) == [([1], "")]
    assert len(errors_in(caplog)) == 1
    if deed == "position":
        assert "stream must yield parts for positions that it was given, got one for 1000" in str(
            errors_in(caplog)
        )


def test_part_that_fails_ends_its_stream_alone():
    with driven(model := CountingBatches()) as loop:
        found = loop.answer(loop.give(counted(5, 4), counted(6, 4, do="object", at=2)))
        assert found == [([5, 6, 7, 8], ""), ([6, 7], "model_error")]
    assert not model.rows, "the model is told"


def test_part_that_is_too_large_ends_its_stream():
    class Large(Scripted):
        def script(self, batch: Any) -> Iterator[object]:
            yield "x" * (MAX_PART_BYTES - 2)
            yield "x" * MAX_PART_BYTES

    with driven(Large()) as loop:
        ((parts, code),) = loop.answer(loop.give(1))
        assert ([len(each) for each in parts], code) == ([MAX_PART_BYTES - 2], "model_error")


def test_large_steps_are_sent_in_several_messages():
    assert sizes_cut([], 10) == [0]
    assert sizes_cut([1, 2, 3], 10) == [3]
    assert sizes_cut([20, 4, 6, 1, 0, 30, 30], 10) == [1, 2, 2, 1, 1]


def test_any_message_of_parts_fits_into_one_of_an_agent():
    part = b'"%b"' % (b"x" * (MAX_PART_BYTES - 2))
    (num, *_) = sizes_cut([len(part)] * 64, MAX_STEP_BYTES)
    assert frame_start(PartsSent(1, [StreamPart(1, row, part) for row in range(num)]), 0)


class Steps(Scripted):
    """Steps by position, as a batch's first instance says."""

    def script(self, batch: Any) -> Iterator[object]:
        for step in batch[0]:
            yield {
                int(position): inferpool.END if part == "END" else part
                for position, part in step.items()
            }


def test_missing_positions_have_no_part_and_the_return_ends_all():
    steps = [{"0": "a", "1": "b"}, {}, {"1": "c"}, {"0": "END", "1": "d"}, {"0": "late", "1": "e"}]
    with driven(Steps()) as loop:
        assert loop.answer(loop.give(steps, 0, 0)) == [
            (["a"], ""),
            (["b", "c", "d", "e"], ""),
            ([], ""),
        ]
        parts = [step for step in loop.steps if step]
        assert parts[:2] == [[(1, 0), (1, 1)], [(1, 1)]]


def test_model_that_yields_parts_of_one_gets_batches_of_one():
    class Alone(Scripted):
        def script(self, batch: Any) -> Iterator[object]:
            for each in batch:
                yield {"of": each}

    with driven(model := Alone()) as loop:
        assert loop.answer(loop.give(1, 2)) == [([{"of": 1}], ""), ([{"of": 2}], "")]
        assert loop.answer(loop.give(3, 4)) == [([{"of": 3}], ""), ([{"of": 4}], "")]
    assert model.called == [[1, 2], [1], [2], [3], [4]]


def test_values_that_are_no_steps_are_refused_by_name(caplog: pytest.LogCaptureFixture):
    class Wrong(Scripted):
        def script(self, batch: Any) -> Iterator[object]:
            yield {0: "a", 1: "b"}
            yield "c"

    class NoGenerator(Scripted):
        def script(self, batch: Any) -> Any:
            return [1, 2]

    for model, text in (
        (Wrong(), r"stream must yield {position: part} at each step, got str"),
        (NoGenerator(), "stream must be a generator"),
    ):
        with driven(model) as loop:
            codes = {code for _, code in loop.answer(loop.give(1, 2))}
        assert codes == {"model_error"}
        assert text in caplog.text


def test_stream_that_nobody_reads_ends_within_two_steps_and_its_finally_runs(tmp_path: Path):
    closed = tmp_path / "closed"
    with driven(CountingStream(closed=str(closed))) as loop:
        first, second = loop.give(counted(5, 10**9, delay_s=0.001)), loop.give(counted(6, 2))
        loop.until(lambda: len(loop.parts[first, 0]) > 3)
        loop.drop(first, 0)
        num = len(loop.parts[first, 0])
        assert loop.answer(second) == [([6, 7], "")]
        assert closed.read_text() == "5\n6\n"
        assert (first, 0) not in loop.ends
        assert loop.done[first].outcomes == [b""]
        assert len(loop.parts[first, 0]) <= num + 50, "it cannot have gone on for long"
        loop.drop(first, 0)  # it is over: nothing happens
        loop.drop(99, 0, 1)


class WithTask(Scripted):
    """An asynchronous generator that leaves a task behind."""

    async def script(self, batch: Any) -> AsyncIterator[object]:  # type: ignore[override]  # `stream` returns either kind
        self.task = asyncio.create_task(asyncio.sleep(3600))
        while True:
            await asyncio.sleep(0)
            yield "on"


def test_tasks_of_a_stream_end_with_it():
    with driven(model := WithTask()) as loop:
        id = loop.give("x")
        loop.until(lambda: loop.parts[id, 0])
        loop.drop(id, 0)
        loop.answer(id)
    assert model.task.cancelled()


class Waiting(CountingBatches):
    """A `CountingBatches` whose steps wait for a test."""

    def __init__(self) -> None:
        super().__init__()
        self.may_step = threading.Semaphore(0)
        self.dropped: list[int] = []

    def step(self) -> object:
        assert self.may_step.acquire(timeout=60)
        return super().step()

    def drop(self, position: int) -> None:
        self.dropped.append(position)
        super().drop(position)


def test_dropped_position_is_told_and_ends_silently_and_the_others_go_on():
    with driven(model := Waiting()) as loop:
        id = loop.give(counted(5, 3), counted(6, 3), counted(7, 3))
        model.may_step.release()
        loop.until(lambda: loop.parts[id, 1])
        loop.drop(id, 1)
        model.may_step.release(2)
        loop.until(lambda: len(loop.parts[id, 2]) == 3)
        assert model.dropped == [1]
        assert len(loop.parts[id, 1]) <= 2, "within two steps"
        model.may_step.release(2)
        assert [found for found, _ in loop.answer(id)][::2] == [[5, 6, 7], [7, 8, 9]]
        assert (id, 1) not in loop.ends


def test_model_hears_of_each_dropped_stream_and_is_closed_after_the_last_one():
    closed: list[str] = []

    class Endless(Scripted):
        def script(self, batch: Any) -> Iterator[object]:
            try:
                while True:
                    yield {0: 1, 1: 2}
            finally:
                closed.append(f"after {self.dropped}")
                raise OSError("no space left to say so")

    with driven(model := Endless()) as loop:
        id = loop.give("a", "b")
        loop.until(lambda: loop.parts[id, 1])
        loop.drop(id, 0, 1)
        loop.until(lambda: id in loop.done)
        assert closed == ["after [0, 1]"]
        assert model.dropped == [0, 1]


def test_streams_can_be_dropped_before_they_begin():
    preparing, may_prepare = threading.Event(), threading.Event()

    class Slow(CountingBatches):
        def preprocess(self, item: Item) -> Features:
            preparing.set()
            assert may_prepare.wait(60)
            return super().preprocess(item)

    with driven(Slow()) as loop:
        id = loop.give(counted(5, 2), counted(6, 2))
        assert preparing.wait(60)
        loop.drop(id, 0)
        loop.loop._arrivals._arrived.put(None)  # the loop has read the one before
        loop.until(lambda: loop.loop._dropped or loop.done)
        may_prepare.set()
        loop.until(lambda: id in loop.done)
        assert loop.parts[id, 0] == []
        assert loop.parts[id, 1] == [6, 7]


def test_late_instances_are_not_begun():
    with driven(CountingBatches()) as loop:
        late = loop.give(counted(5, 2), timeout_s=-1)
        assert loop.answer(late) == [([], "deadline_exceeded")]


def test_many_streams_join_and_each_step_has_a_part_of_all():
    with driven(JoiningStream(step_s=0.002)) as loop:
        # Long ones: the first goes on until the last is there, even if this thread stands still.
        ids = [loop.give(counted(1000 * n, 250)) for n in range(20)]
        for number, id in enumerate(ids):
            first = 1000 * number
            assert loop.answer(id) == [(list(range(first, first + 250)), "")]
        assert max(map(len, loop.steps)) == 20


class JoinedByTest(Scripted):
    """Counts for each position, as far as its instance says; steps wait for a test."""

    def __init__(self) -> None:
        super().__init__(joins=True)
        self.may_step = threading.Semaphore(0)
        self.left: dict[int, int] = {}

    def script(self, batch: Any) -> Iterator[object]:
        self.left = dict(enumerate(batch))
        while True:
            assert self.may_step.acquire(timeout=60)
            parts: dict[int, object] = {}
            for position, left in [*self.left.items()]:
                parts[position] = left if left else inferpool.END
                self.left[position] = left - 1
                if not left:
                    del self.left[position]
            yield parts

    def admit(self, batch: Any, positions: list[int]) -> None:
        super().admit(batch, positions)
        if "bad" in batch:
            raise ValueError("bad")
        self.left.update(zip(positions, batch, strict=True))


def test_positions_count_on_and_one_that_cannot_join_fails_alone():
    with driven(model := JoinedByTest()) as loop:
        first = loop.give(9)
        loop.until(lambda: model.called)
        others = [loop.give(each) for each in (2, "bad", 1)]
        loop.until(lambda: len(loop.loop._arrivals.preparing) == 0)
        model.may_step.release(30)
        assert loop.answer(others[1]) == [([], "model_error")]
        assert loop.answer(others[0]) == [([2, 1], "")]
        assert loop.answer(others[2]) == [([1], "")]
        assert loop.answer(first) == [(list(range(9, 0, -1)), "")]
        positions = [each for _, found in model.admitted for each in found]
        assert positions == list(range(1, len(positions) + 1))


def test_one_that_joins_a_call_at_its_end_gets_another_call():
    class Short(JoinedByTest):
        """Ends with its first streams, whoever has joined."""

        def script(self, batch: Any) -> Iterator[object]:
            yield {0: f"begun with {batch}"}
            loop.until(lambda: loop.loop._arrivals._arrived.qsize() or len(self.called) > 1)
            yield {0: f"still {batch}"}

    with driven(model := Short()) as loop:
        first = loop.give("a")
        loop.until(lambda: loop.parts[first, 0])
        second = loop.give("b")
        assert loop.answer(first) == [(["begun with ['a']", "still ['a']"], "")]
        assert loop.answer(second) == [(["begun with ['b']", "still ['b']"], "")]
        assert model.admitted == [(["b"], [1])]
        assert model.called == [["a"], ["b"]]


def canary(loop: DrivenLoop) -> BatchDone:
    id = loop.give()
    loop.until(lambda: id in loop.done)
    return loop.done[id]


def test_canary_computes_the_first_part_of_the_sample_or_rides_on_steps(tmp_path: Path):
    closed = tmp_path / "closed"
    model = CountingStream(closed=str(closed))
    with driven(model) as loop:
        assert canary(loop).outcomes == []
        loop.computer.use_sample(json_item(counted(1, 5)), True)
        assert canary(loop).outcomes == []
        assert closed.read_text() == "1\n", "it is closed after a part"
        loop.computer.use_sample(json_item(counted(1, 5, do="raise")), True)
        (error,) = canary(loop).outcomes
        assert isinstance(error, ItemError)
        assert error.code == "model_error"
        id = loop.give(counted(7, 10**9, delay_s=0.001))
        loop.until(lambda: loop.parts[id, 0])
        assert canary(loop).outcomes == [], "a stream makes progress"
        loop.drop(id, 0)
        assert len(canary(loop).outcomes) == 1


def test_sentinel_lets_streams_end_and_they_can_still_be_dropped():
    loop = DrivenLoop(CountingStream())
    loop.thread.start()
    first = loop.give(counted(1, 30, delay_s=0.001))
    second = loop.give(counted(2, 10**9, delay_s=0.001))
    loop.inbox.put(None)
    assert loop.answer(first) == [(list(range(1, 31)), "")]
    loop.until(lambda: loop.parts[second, 0])
    assert loop.thread.is_alive()
    loop.drop(second, 0)
    loop.thread.join(60)
    assert not loop.thread.is_alive()
    assert second in loop.done


def test_steps_go_on_while_others_are_prepared():
    may_prepare = threading.Event()

    class SlowToPrepare(JoiningStream):
        def preprocess(self, item: Item) -> Features:
            if item.json() == counted(2, 1):
                assert may_prepare.wait(60)
            return super().preprocess(item)

    with driven(SlowToPrepare(step_s=0.001)) as loop:
        first = loop.give(counted(1, 10**9))
        loop.until(lambda: loop.parts[first, 0])
        second = loop.give(counted(2, 1))
        num = len(loop.parts[first, 0])
        loop.until(lambda: len(loop.parts[first, 0]) > num + 20)
        assert not loop.parts[second, 0]
        may_prepare.set()
        assert loop.answer(second) == [([2], "")]
        loop.drop(first, 0)
