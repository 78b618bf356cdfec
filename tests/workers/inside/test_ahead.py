"""Batches that go to a device ahead of time, in one process; the device is the simulated one."""

import contextlib
import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

import inferpool.workers.inside.staging
from inferpool.models.accelerator.device import HandOver, stack_pinned
from inferpool.models.item import Features, Item, Outputs
from inferpool.models.ragged import RaggedOutput
from inferpool.models.spec import Placement
from inferpool.models.speed.graphs import Graphed
from inferpool.workers.inside.compute import Computer
from inferpool.workers.inside.preparing import Prepared, Preparer, unprepared
from inferpool.workers.inside.staging import Staging
from inferpool.workers.shared.messages import ItemError, ItemRef, Outcome
from inferpool.workers.start_check.own_passes import OwnPasses
from tests.ahead_model import AheadModel

pytestmark = pytest.mark.simulated

DEVICE = "sim:0"


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Run a test in torch's inference mode, like a worker, and leave the device in order."""
    with torch.inference_mode():
        yield
    torch.sim.revive()
    torch.sim.set_delay_us(0)
    torch.sim.set_per_process_memory_fraction(1.0)


def computer_of(model: AheadModel, num_threads: int = 1) -> Computer:
    model.load(Placement(devices=(DEVICE,)))
    return Computer(model, num_threads=num_threads, device=DEVICE)


def stored(values: Sequence[object]) -> tuple[list[ItemRef], list[memoryview]]:
    bodies = [json.dumps(value).encode() for value in values]
    refs = [ItemRef("json", 0, len(body), math.inf) for body in bodies]
    return refs, [memoryview(body) for body in bodies]


def prepared(computer: Computer, values: Sequence[object]) -> Prepared:
    return computer.prepare(1, *stored(values))


def numbers(*numbers: float) -> list[dict[str, float]]:
    return [{"n": number} for number in numbers]


def read(outcome: Outcome) -> object:
    if isinstance(outcome, ItemError):
        return outcome.code
    assert isinstance(outcome, bytes)
    return json.loads(outcome)["twice"]


def answers(computer: Computer, batch: Prepared) -> list[object]:
    return [read(outcome) for outcome in computer.compute(batch)]


def test_next_batch_is_prepared_and_launched_while_the_device_computes():
    model = AheadModel()
    computer = computer_of(model)
    with torch.sim.held():
        first = prepared(computer, numbers(1, 2))
        computer.launch(first)
        second = prepared(computer, numbers(3))
        computer.launch(second)
        assert [name for name, _ in model.steps] == ["forward", "forward"]
        assert not torch.sim.current_stream().query()
    assert answers(computer, first) == [2, 4]
    assert answers(computer, second) == [6]


def test_lists_of_outputs_are_copied_back_while_the_device_computes_the_next():
    class Cut(AheadModel):
        can_run_ahead = True
        outputs = ()

        def forward(self, batch: Features) -> Outputs:
            twice = super().forward(batch)["twice"]
            rows = (row[: number + 1] for number, row in enumerate(twice))
            return {"twice": RaggedOutput(rows)}

        def postprocess(self, outputs: Outputs) -> Outputs:
            return outputs

        def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
            return {"twice": outputs["twice"].tolist()}

    model = Cut()
    computer = computer_of(model)
    with torch.sim.held():
        first, second = prepared(computer, numbers(1, 2)), prepared(computer, numbers(3))
        computer.launch(first)
        computer.launch(second)
        assert not torch.sim.current_stream().query()
    assert answers(computer, first) == [[2], [4, 4]]
    assert answers(computer, second) == [[6]]
    assert computer.staging is not None
    batch: Any = {"x": torch.ones(1, 64), "do": ["ok"]}
    same = model.forward(batch)
    computer.staging.compare(same, same)
    assert not computer.runs_ahead


def test_batch_lies_in_pinned_memory_and_is_copied_while_the_device_computes(
    monkeypatch: pytest.MonkeyPatch,
):
    staged: list[torch.Tensor] = []

    def pinned(value: object) -> object:
        if isinstance(value, torch.Tensor):
            staged.append(value.pin_memory())
            return staged[-1]
        return value

    monkeypatch.setattr(inferpool.workers.inside.staging, "pinned", pinned)
    computer = computer_of(AheadModel())
    with torch.sim.held():
        batch = prepared(computer, numbers(1, 2))
        (group,) = batch.groups
        assert group.batch is not None
        assert group.batch["x"].device.type == "sim"
        assert batch.handed_over is not None
        batch.handed_over.wait()  # the copy needs not wait for what is computed
    assert [x.is_pinned() for x in staged] == [True]
    assert answers(computer, batch) == [2, 4]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_answers_are_exact_however_far_the_device_lags(num_threads: int):
    torch.sim.set_delay_us(100)
    computer = computer_of(AheadModel(), num_threads)
    before: tuple[Prepared, list[float]] | None = None
    for start in range(0, 1200, 6):
        values = [float(start + k) for k in range(1 + start % 5)]
        batch = prepared(computer, numbers(*values))
        computer.launch(batch)
        if before is not None:
            assert answers(computer, before[0]) == [2 * n for n in before[1]]
        before = batch, values


def test_model_that_does_not_say_that_it_can_gets_its_batch_on_the_host():
    class Keeping(AheadModel):
        def forward(self, batch: Features) -> Features:
            assert batch["x"].is_pinned()
            self.kept = batch["x"].sum().item()
            return super().forward(batch)

    computer = computer_of(Keeping())
    assert not computer.runs_ahead
    assert answers(computer, prepared(computer, numbers(1, 2))) == [2, 4]


@pytest.mark.parametrize("host", [False, True])
def test_model_whose_forward_returns_the_same_memory_each_time_does_not_run_ahead(host: bool):
    class Keeping(AheadModel):
        can_run_ahead = True

        def forward(self, batch: Features) -> Features:
            found = super().forward(batch)["twice"]
            if not hasattr(self, "kept"):
                self.kept = torch.empty(8, *found.shape[1:], device="cpu" if host else found.device)
            kept = self.kept[: len(found)]
            return {"twice": kept.copy_(found), "refused": torch.zeros(len(found))}

    for model, runs_ahead in ((AheadModel(), True), (Keeping(), False)):
        computer = computer_of(model)
        OwnPasses(computer).warm_up(model.warmup() * 2, [1])
        assert computer.runs_ahead == runs_ahead
        assert {size for _, size in model.steps} == {1}, "a batch was larger than the warm-up's"
        assert answers(computer, prepared(computer, numbers(1, 2))) == [2, 4]


def test_batch_that_fails_to_launch_is_computed_after_the_one_before():
    model = AheadModel()
    computer = computer_of(model)
    first = prepared(computer, numbers(1))
    computer.launch(first)
    second = prepared(computer, [{"n": 2}, {"n": 3, "do": "raise"}, {"n": 4}])
    computer.launch(second)
    assert answers(computer, first) == [2]
    assert answers(computer, second) == [4, "model_error", 8]


@pytest.mark.parametrize(("act", "code"), [("refuse", "model_error"), ("nan", "non_finite_output")])
def test_input_that_fails_after_the_launch_fails_alone(act: str, code: str):
    computer = computer_of(AheadModel())
    first = prepared(computer, [{"n": 1}, {"n": 2, "do": act}, {"n": 3}])
    computer.launch(first)
    second = prepared(computer, numbers(4))
    computer.launch(second)
    assert answers(computer, first) == [2, code, 6]
    assert answers(computer, second) == [8]


def test_batch_that_does_not_fit_beside_the_one_before_fits_after_it():
    computer = computer_of(AheadModel())
    first = prepared(computer, numbers(1))
    computer.launch(first)
    second = prepared(computer, numbers(2, 3))
    torch.sim.out_of_memory_after(0)
    computer.launch(second)
    assert answers(computer, first) == [2]
    assert answers(computer, second) == [4, 6]


def test_batch_too_large_for_the_device_is_halved_and_the_size_remembered():
    class Wide(AheadModel):
        can_run_ahead = True

        def forward(self, batch: Features) -> Features:
            torch.empty(len(batch["x"]) << 20, device=self.device)  # 4 MiB a row
            return super().forward(batch)

    computer = computer_of(model := Wide())
    torch.sim.empty_cache()
    torch.sim.set_per_process_memory_fraction(20 / 1024)
    batch = prepared(computer, numbers(*range(8)))
    computer.launch(batch)
    assert answers(computer, batch) == [2 * n for n in range(8)]
    model.steps.clear()
    batch = prepared(computer, numbers(*range(8)))
    computer.launch(batch)
    assert model.steps == []  # it is computed in parts
    assert answers(computer, batch) == [2 * n for n in range(8)]
    assert [size for name, size in model.steps if name == "forward"] == [4, 4]


def test_want_of_memory_that_shows_late_is_survived(monkeypatch: pytest.MonkeyPatch):
    errors = [torch.AcceleratorError("CUDA error: out of memory")]
    wait = HandOver.wait

    def wait_and_fail(handed_over: HandOver) -> None:
        wait(handed_over)
        if errors:
            raise errors.pop()

    computer = computer_of(AheadModel())
    batch = prepared(computer, numbers(1, 2))
    computer.launch(batch)
    monkeypatch.setattr(HandOver, "wait", wait_and_fail)
    assert answers(computer, batch) == [2, 4]
    assert not errors


@pytest.mark.parametrize("act", ["lose", "fault"])
def test_lost_device_ends_the_computation(act: str):
    computer = computer_of(AheadModel())
    first = prepared(computer, numbers(1))
    computer.launch(first)
    second = prepared(computer, [{"n": 2, "do": act}])
    with contextlib.suppress(torch.AcceleratorError):  # or it shows later
        computer.launch(second)
    with pytest.raises(torch.AcceleratorError):
        [computer.compute(each) for each in (first, second)]


@pytest.mark.measures
def test_time_of_a_batch_is_the_device_s_own_though_two_are_launched():
    computer = computer_of(AheadModel(busy_us=50_000))
    batches = [prepared(computer, numbers(1)) for _ in range(2)]
    for batch in batches:
        computer.launch(batch)
    for batch in batches:
        computer.wait(batch)
        answers(computer, batch)
        assert 0.05 <= batch.device_s < 0.09


def test_batch_is_stacked_into_pinned_memory_that_is_used_again():
    class Watching(AheadModel):
        can_run_ahead = False

        def forward(self, batch: Features) -> Features:
            assert batch["x"].is_pinned()
            addresses.append(batch["x"].data_ptr())
            return super().forward(batch)

    addresses: list[int] = []
    model = Watching()
    computer = computer_of(model)
    stacked = model.collate([{"x": torch.ones(64), "do": "ok"}])["x"]  # type: ignore[dict-item]
    assert stacked.is_pinned()
    for n in range(100):
        assert answers(computer, prepared(computer, numbers(n, n + 1))) == [2 * n, 2 * n + 2]
        torch.accelerator.synchronize()  # else the device may still have the memory
    # Earlier tests leave memory behind, and torch takes all of it before any is used again.
    assert {*addresses[60:]} <= {*addresses[:60]}


def test_numbers_of_several_dtypes_are_stacked_as_on_the_host():
    tensors = [torch.ones(2), torch.full((2,), 1 / 3, dtype=torch.float64), torch.ones(2).int()]
    for some in (tensors, tensors[::-1]):
        assert torch.equal(stack_pinned(some), torch.stack(some))
        assert stack_pinned(some).dtype == torch.float64


def test_cheap_items_of_a_large_batch_are_prepared_in_parts_by_several_threads():
    together = threading.Barrier(3)
    threads: list[str] = []

    class Meeting(AheadModel):
        def preprocess(self, item: Item) -> Features:
            name = threading.current_thread().name
            if name.startswith("prepare") and name not in threads:
                together.wait(timeout=60)
            threads.append(name)
            return super().preprocess(item)

    model = Meeting()
    model.load(Placement(devices=(DEVICE,)))
    preparer = Preparer(
        model,
        num_threads=3,
        staging=Staging(model, DEVICE),
        error_detail="name",
        pool_pays_s=math.inf,
        parts_pay_s=0.0,
    )
    for _ in range(2):
        batch = preparer.prepare(unprepared(1, *stored(numbers(*range(7)))))
        assert [int(each["x"][0]) for each in batch.features if each] == [*range(7)]
    assert sorted(threads.count(name) for name in {*threads}) == [2, 2, 3, 7]


def test_graphs_write_over_no_outputs_that_are_still_copied_back():
    class Doubling(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    class Graphing(AheadModel):
        can_run_ahead = True

        def forward(self, batch: Features) -> Features:
            y = graphed(batch["x"])
            assert isinstance(y, torch.Tensor)
            return {"twice": y, "refused": torch.zeros(len(y))}

    torch.sim.set_device(0)
    torch.ones(1, device=DEVICE)  # graphs are for a device in use
    graphed = Graphed(Doubling())
    computer = computer_of(Graphing())
    with graphed.capturing():
        graphed(torch.ones(2, 64, device=DEVICE))
    assert graphed.num_graphs == 1
    with torch.sim.held():
        batches = [prepared(computer, numbers(n, n + 1)) for n in range(4)]
        for batch in batches:
            computer.launch(batch)
    for n, batch in enumerate(batches):
        assert answers(computer, batch) == [2 * n, 2 * n + 2]
