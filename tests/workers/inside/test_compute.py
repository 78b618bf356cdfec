"""Outcomes of each item of a batch, in one process, with models that fail on purpose."""

import asyncio
import base64
import json
import logging
import math
import re
import signal
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import inferpool.workers.inside.compute
import inferpool.workers.inside.preparing
import inferpool.workers.inside.shortage
import inferpool.workers.start_check.own_passes
from inferpool.models.base import Model
from inferpool.models.item import Features, Item
from inferpool.models.spec import Kind, TensorSpec
from inferpool.models.upload import Upload, pack_form
from inferpool.workers.inside.checks import BrokenPromiseError
from inferpool.workers.inside.compute import Computer
from inferpool.workers.inside.outcomes import TensorOutputs
from inferpool.workers.shared.config import ErrorDetail
from inferpool.workers.shared.messages import ItemError, ItemRef, Outcome
from tests.models.items import json_item, tensor_item


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """Run a test in torch's inference mode, like a worker."""
    with torch.inference_mode():
        yield


class DoublingModel(Model):
    """Doubles numbers, or does what a test wants; keeps the sizes of its batches."""

    outputs: Sequence[TensorSpec] = (TensorSpec(name="y", dtype="float32", shape=(-1,)),)

    def __init__(self, y: Callable[[torch.Tensor], torch.Tensor] = lambda x: x * 2) -> None:
        self.sizes: list[int] = []
        self.y = y

    def preprocess(self, item: Item) -> Features:
        value = item.json()
        return {"x": torch.as_tensor(value, dtype=torch.float32)}

    def forward(self, batch: Features) -> Features:
        self.sizes.append(len(batch["x"]))
        return self.double(batch["x"])

    def double(self, x: torch.Tensor) -> Features:
        return {"y": self.y(x)}


def computer_of(model: Model, **options: Any) -> Computer:
    return Computer(model, num_threads=1, **options)


def compute(
    model: Model, values: Sequence[object], computer: Computer | None = None
) -> list[object]:
    """Return the answer to each value: a number, or the code of an error."""
    computer = computer or computer_of(model)
    bodies = [json.dumps(value).encode() for value in values]
    refs = [ItemRef("json", 0, len(body), math.inf) for body in bodies]
    outcomes = computer.compute(computer.prepare(1, refs, [memoryview(body) for body in bodies]))
    return [read(outcome) for outcome in outcomes]


def read(outcome: Outcome) -> object:
    if isinstance(outcome, ItemError):
        return outcome.code
    assert isinstance(outcome, bytes)
    return json.loads(outcome)


@pytest.mark.parametrize(
    ("y", "values", "expected", "sizes"),
    [
        (torch.sqrt, [4, -1, 9], [2, "non_finite_output", 3], [3]),
        (lambda x: 1 / x.half(), [1, 0, 2], [1, "non_finite_output", 0.5], [3]),
        (lambda x: 1 / x.bfloat16(), [1, 0, 2], [1, "non_finite_output", 0.5], [3]),
        (lambda x: 1 / x.double(), [1, 0, 2], [1, "non_finite_output", 0.5], [3]),
        # One input makes the outputs of all others NaN.
        (
            lambda x: x * 2 + 0 * x.log().sum(),
            [1, 2, -1, 3],
            [2, 4, "non_finite_output", 6],
            [4, 2, 2, 1, 1],
        ),
        (
            lambda x: x[:, None].expand(-1, 3) if (x < 0).any() else x * 2,
            [1, 2, -1, 3],
            [2, 4, "model_error", 6],
            [4, 2, 2, 1, 1],
        ),
    ],
    ids=["root", "half", "bfloat16", "double", "spoilt", "shape"],
)
def test_outputs_that_are_not_finite_or_of_a_wrong_shape_fail_alone(
    y: Callable[[torch.Tensor], torch.Tensor],
    values: list[int],
    expected: list[object],
    sizes: list[int],
):
    model = DoublingModel(y)
    assert compute(model, values) == expected
    assert model.sizes == sizes


class OddError(BaseException):
    """No `Exception`, as some libraries have them."""


@pytest.fixture
def no_ctrl_c() -> Iterator[None]:
    """Handle SIGINT by another function than Python's, as workers do."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("no_ctrl_c")
@pytest.mark.parametrize(
    "error",
    [
        SystemExit(),
        KeyboardInterrupt(),
        GeneratorExit(),
        asyncio.CancelledError(),
        OddError(),
        BaseExceptionGroup("two", [OddError(), ValueError()]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_no_exception_fails_the_instance_that_raised_it(error: BaseException):
    steps = ("preprocess", "bucket", "collate", "forward", "postprocess", "render", "encode")

    class Leaving(DoublingModel):
        """Raises in the step whose number is negative in the input."""

        def preprocess(self, item: Item) -> Features:
            features = super().preprocess(item)
            self._leave("preprocess", features)
            return features

        def bucket(self, features: Features) -> None:
            self._leave("bucket", features)

        def collate(self, instances: Sequence[Features]) -> Features:
            batch = super().collate(instances)
            self._leave("collate", batch)
            return batch

        def forward(self, batch: Features) -> Features:
            self._leave("forward", batch)
            return super().forward(batch)

        def postprocess(self, outputs: Features) -> Features:
            self._leave("postprocess", {"x": outputs["y"] / 2})
            return outputs

        def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
            self._leave("render", {"x": outputs["y"] / 2})
            if outputs["y"] == -2 * len(steps):
                return SimpleNamespace(tolist=self._raise)
            return outputs["y"].item()

        def _leave(self, step: str, features: Features) -> None:
            if (features["x"] == -1 - steps.index(step)).any():
                self._raise()

        def _raise(self) -> None:
            raise error

    values = [*range(len(steps)), *(-1 - n for n in range(len(steps)))]
    expected = [*(2 * n for n in range(len(steps))), *["model_error"] * len(steps)]
    assert compute(Leaving(), values) == expected
    computer = Computer(Leaving(), num_threads=2)
    computer.preparer._pool_pays_s = 0.0  # so that other threads prepare
    for _ in range(2):
        assert compute(Leaving(), values, computer) == expected


def test_complex_numbers_and_sparse_tensors_are_held_to_be_finite_too():
    class Odd(DoublingModel):
        def double(self, x: torch.Tensor) -> Features:
            part = torch.complex(x * 2, torch.where(x < 0, torch.nan, 0.0)).conj()
            sparse = torch.where(x > 8, torch.inf, x).to_sparse()
            return {"y": x * 2, "part": part, "sparse": sparse}

        def render(self, outputs: Features, parameters: object) -> object:
            return outputs["y"].item()

    assert compute(Odd(), [1, -1, 9, 3]) == [2, "non_finite_output", "non_finite_output", 6]


def test_large_numbers_whose_sum_overflows_are_finite():
    assert "non_finite_output" not in compute(DoublingModel(lambda x: x * 3e38), [1, 1, 1])


def test_model_may_declare_that_its_outputs_need_not_be_finite():
    class UncheckedModel(DoublingModel):
        finite_outputs = False

    assert compute(UncheckedModel(torch.sqrt), [4, -1]) == [2, None]


RENDERED = (
    (math.nan, "nan"),
    ([1.0, [None, float("inf")]], "inf at [1][1]"),
    ({"scores": [{"score": 1.0}, {"score": float("-inf")}]}, "-inf at scores[1].score"),
    ({"a": np.float32("nan")}, "nan at a"),
    ({"a": np.array([0.5, np.nan])}, "nan at a[1]"),
    ({"a": torch.tensor([[1.0], [math.nan]])}, "nan at a[1][0]"),
    ((1, (2, math.nan)), "nan at [1][1]"),
)


@pytest.mark.parametrize(("answer", "found"), RENDERED, ids=[found for _, found in RENDERED])
def test_rendered_answer_that_is_not_finite_fails_alone_and_its_place_is_named(
    answer: object, found: str, caplog: pytest.LogCaptureFixture
):
    class Odd(DoublingModel):
        def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
            return answer if outputs["y"].item() == 4 else null

    null = [None, "null", {"null": None}]
    assert compute(Odd(), [1, 2, 3]) == [null, "non_finite_output", null]
    assert f"the model's answer to this input has {found}, for which" in caplog.text
    meant = type("Meant", (Odd,), {"finite_outputs": False})()
    assert "non_finite_output" not in compute(meant, [1, 2, 3])


class RootModel(Model):
    """Takes the square root of what clients send, or raises if that is NaN."""

    inputs = (TensorSpec(name="x", dtype="float32", shape=(-1, 2)),)

    def __init__(self, *, raises: bool = False) -> None:
        self.raises = raises

    def forward(self, batch: Features) -> Features:
        if self.raises and batch["x"].isnan().any():
            raise ValueError("NaN")
        return {"y": batch["x"].sqrt()}


def ask(model: Model, item: Item, *, kind: Kind | None = None, **options: Any) -> Outcome:
    computer = computer_of(model, **options)
    ref = ItemRef(kind or item.kind, 0, len(item.payload), math.inf, headers=tuple(item.headers))
    (outcome,) = computer.compute(computer.prepare(1, [ref], [item.payload]))
    return outcome


def test_nan_that_a_client_sent_is_the_clients_error(caplog: pytest.LogCaptureFixture):
    sent = torch.tensor([1.0, math.nan])
    as_json = json_item({"x": {"b64": base64.b64encode(sent.numpy()).decode()}})
    for raises in (False, True):
        for item in (tensor_item({"x": sent}), tensor_item({"": sent}), as_json):
            outcome = ask(RootModel(raises=raises), item)
            assert isinstance(outcome, ItemError)
            assert outcome.code == "invalid_input"
            assert re.match(r"(tensor 'x'|the tensor): nan at \[1\]: ", outcome.message)
    assert "ERROR" not in caplog.text
    outcome = ask(RootModel(), tensor_item({"x": torch.tensor([1.0, -1.0])}))
    assert isinstance(outcome, ItemError)
    assert outcome.code == "non_finite_output"


def test_model_that_answers_nan_with_a_number_gets_it():
    class Counting(RootModel):
        def forward(self, batch: Features) -> Features:
            return {"y": batch["x"].isnan().sum(1)}

    assert ask(Counting(), tensor_item({"x": torch.tensor([1.0, math.nan])})) == b"1"


def test_output_that_is_missing_fails_the_input_that_causes_it():
    class Missing(DoublingModel):
        def double(self, x: torch.Tensor) -> Features:
            return {} if (x < 0).any() else super().double(x)

    assert compute(Missing(), [1, -1]) == [2, "model_error"]


def test_any_length_will_do_where_the_declared_shape_has_minus_one():
    class Long(DoublingModel):
        outputs = (TensorSpec(name="y", dtype="float32", shape=(-1, -1)),)

    model = Long(lambda x: x[:, None].expand(-1, 1 + len(x)))
    assert compute(model, [1, 2]) == [[1, 1, 1], [2, 2, 2]]
    assert compute(model, [1]) == [[1, 1]]


SHORTAGES = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    MemoryError(),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    torch.AcceleratorError("CUDA error: out of memory"),
]


class Hungry(DoublingModel):
    """Computes at most three rows at once, or none of several columns."""

    def __init__(self, error: Exception = SHORTAGES[0]) -> None:
        super().__init__()
        self._error = error
        self.most = 3

    def double(self, x: torch.Tensor) -> Features:
        if len(x) > self.most or x.dim() > 1:
            raise self._error
        return {"y": x * 2}


@pytest.mark.parametrize("error", SHORTAGES, ids=lambda error: str(error)[:20])
def test_batch_that_does_not_fit_is_halved_and_its_size_remembered(error: Exception):
    model = Hungry(error)
    computer = computer_of(model)
    assert compute(model, range(8), computer) == [0, 2, 4, 6, 8, 10, 12, 14]
    assert model.sizes == [8, 4, 2, 2, 4, 2, 2]
    model.sizes.clear()
    assert compute(model, range(5), computer) == [0, 2, 4, 6, 8]
    assert model.sizes == [2, 2, 1]


def test_input_that_needs_too_much_memory_does_not_make_batches_of_others_small():
    def y(x: torch.Tensor) -> torch.Tensor:
        if (x < 0).any():
            raise MemoryError
        return x * 2

    model = DoublingModel(y)
    computer = computer_of(model)
    assert compute(model, [1, 2, -1, 3], computer) == [2, 4, "model_error", 6]
    model.sizes.clear()
    assert compute(model, range(8), computer) == [2 * n for n in range(8)]
    assert model.sizes == [8]


def test_size_grows_again_when_the_memory_is_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inferpool.workers.inside.shortage, "_GOOD_BATCHES", 3)
    model = Hungry()
    computer = computer_of(model)
    compute(model, range(8), computer)
    model.sizes.clear()
    model.most = 100
    for _ in range(3):
        compute(model, range(4), computer)
    assert model.sizes == [2, 2, 2, 2, 4]


def test_size_that_has_grown_too_far_shrinks_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inferpool.workers.inside.shortage, "_GOOD_BATCHES", 2)
    model = Hungry()
    computer = computer_of(model)
    for _ in range(4):
        assert compute(model, range(4), computer) == [0, 2, 4, 6]
    assert model.sizes == [4, 2, 2, 2, 2, 4, 2, 2, 2, 2]


def test_progress_is_reported_for_each_part_but_the_first():
    told: list[int] = []
    model = Hungry()
    computer = computer_of(model, on_progress=lambda: told.append(len(model.sizes)))
    compute(model, range(3), computer)
    assert told == []
    compute(model, range(4), computer)
    assert told == [2, 3]


def test_items_that_get_late_while_a_batch_is_halved_are_not_computed():
    now = [0.0]

    class SlowHungry(Hungry):
        def double(self, x: torch.Tensor) -> Features:
            now[0] += 1
            return super().double(x)

    model = SlowHungry()
    computer = computer_of(model)
    refs = [ItemRef("json", 0, 1, 1.5 if n == 3 else math.inf) for n in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        for module in (inferpool.workers.inside.compute, inferpool.workers.inside.preparing):
            patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
        outcomes = computer.compute(computer.prepare(1, refs, [memoryview(b"1")] * 4))
    assert [read(outcome) for outcome in outcomes] == [2, 2, 2, "deadline_exceeded"]
    assert model.sizes == [4, 2, 1]


def test_size_is_remembered_for_its_shape_alone():
    class Wide(Hungry):
        outputs = ()

        def double(self, x: torch.Tensor) -> Features:
            return {"y": x * 2} if x.dim() > 1 else super().double(x)

    model = Wide()
    computer = computer_of(model)
    compute(model, range(4), computer)
    model.sizes.clear()
    compute(model, [[1, 2]] * 4, computer)
    assert model.sizes == [4]


def test_size_is_remembered_for_what_the_network_gets_however_long_the_inputs_are():
    class Decoding(Hungry):
        """Its instances are as different as encoded pictures, and its batches alike."""

        def preprocess(self, item: Item) -> Features:
            return {"x": torch.full((item.json() + 1,), float(item.json()))}

        def collate(self, instances: Sequence[Features]) -> Features:
            return {"x": torch.stack([each["x"][0] for each in instances])}

    model = Decoding()
    computer = computer_of(model)
    assert compute(model, range(4), computer) == [0, 2, 4, 6]
    model.sizes.clear()
    assert compute(model, range(10, 14), computer) == [20, 22, 24, 26]
    assert model.sizes == [2, 2]


@pytest.mark.parametrize(("length", "sizes"), [(120, [2, 2]), (300, [4])])
def test_sizes_are_shared_by_inputs_of_about_the_same_length(length: int, sizes: list[int]):
    class Long(DoublingModel):
        outputs = ()

        def double(self, x: torch.Tensor) -> Features:
            if len(x) > 3 and x.shape[1] < 200:
                raise MemoryError
            return {"y": x[:, 0] * 2}

    model = Long()
    computer = computer_of(model)
    compute(model, [[1.0] * 100] * 4, computer)
    model.sizes.clear()
    assert compute(model, [[1.0] * length] * 4, computer) == [2] * 4
    assert model.sizes == sizes


def test_input_that_does_not_fit_alone_fails_with_the_reason(caplog: pytest.LogCaptureFixture):
    outcome = ask(Hungry(), json_item([1, 2]))
    assert isinstance(outcome, ItemError)
    assert outcome.message.startswith("out of memory on this input alone: OutOfMemoryError")


def test_tensors_of_a_batch_that_did_not_fit_are_gone_when_its_halves_are_computed():
    held: list[weakref.ref[torch.Tensor]] = []
    errors: list[Exception] = []  # a model may keep them, and they keep their frames

    def y(x: torch.Tensor) -> torch.Tensor:
        assert all(tensor() is None for tensor in held)
        large = x * 2
        if len(x) > 2:
            held.append(weakref.ref(large))
            errors.append(torch.OutOfMemoryError())
            raise errors[-1]
        return large

    assert compute(DoublingModel(y), range(8)) == [0, 2, 4, 6, 8, 10, 12, 14]
    assert len(held) == 3


def test_lost_context_ends_the_computation():
    def y(x: torch.Tensor) -> torch.Tensor:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(torch.AcceleratorError):
        compute(DoublingModel(y), [1, 2])


def answering(answers: Sequence[float]) -> DoublingModel:
    """Return a model with these answers to batches of zeros."""
    left = iter(answers)
    return DoublingModel(lambda x: x + next(left))


def canaries(model: Model, num: int) -> list[list[str]]:
    """Return the codes of the errors of each of some canaries."""
    sample = Item(kind="json", payload=memoryview(b"0"))
    computer = computer_of(model, sample=sample)
    codes = []
    for id in range(num):
        prepared = computer.prepare_sample(id)
        assert prepared.is_canary
        errors = computer.judge_sample(computer.compute(prepared))
        codes.append([error.code for error in errors if isinstance(error, ItemError)])
    return codes


def test_canary_computes_the_models_sample():
    model = answering([1, 2])
    assert canaries(model, 2) == [[], []]
    assert model.sizes == [1, 1]


@pytest.mark.parametrize("odd", ["conj", "neg", "sparse"])
def test_canary_succeeds_if_the_outputs_cannot_be_serialised(odd: str):
    def y(x: torch.Tensor) -> torch.Tensor:
        conj = torch.complex(x, x).conj()
        return {"conj": conj, "neg": conj.imag, "sparse": x.to_sparse()}[odd]

    assert canaries(DoublingModel(y), 1) == [[]]


def test_lazy_tensors_are_resolved_and_sparse_ones_refused():
    conj = torch.tensor([1 + 2j], dtype=torch.complex64).conj()
    (whole,) = TensorOutputs({"y": conj}, 1).row(0, bytes)
    (part,) = TensorOutputs({"y": conj.imag}, 1).row(0, bytes)
    assert whole.data == b"\0\0\x80\x3f\0\0\0\xc0"
    assert part.data == b"\0\0\0\xc0"
    with pytest.raises(BrokenPromiseError, match="'y' as a sparse or quantized tensor"):
        TensorOutputs({"y": torch.eye(2).to_sparse()}, 2)


def test_canary_finds_a_model_that_has_gone_bad():
    assert canaries(answering([1, math.nan]), 2) == [[], ["non_finite_output"]]


def test_sample_that_never_had_a_finite_output_is_not_held_against_the_model(
    caplog: pytest.LogCaptureFixture,
):
    with caplog.at_level(logging.WARNING):
        assert canaries(answering([math.nan, math.nan]), 2) == [[], []]
    assert caplog.text.count("for a sample of its own is not finite") == 1


def test_canary_of_a_model_without_a_sample_succeeds():
    computer = computer_of(DoublingModel())
    assert computer.compute(computer.prepare_sample(1)) == []


def test_value_that_json_has_no_form_for_fails_its_instance_alone(
    caplog: pytest.LogCaptureFixture,
):
    class Odd(DoublingModel):
        def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
            value = outputs["y"].item()
            return {1: object()} if value == 4 else value

    model = Odd()
    assert compute(model, [1, 2, 3]) == [2, "model_error", 6]
    assert model.sizes == [3]
    assert "render must return a value that JSON can say, got a object" in caplog.text
    assert "test_compute.py:" in caplog.text


@pytest.mark.parametrize(
    "method",
    ["preprocess", "bucket", "collate", "forward", "postprocess", "render", "render_batch"],
)
def test_the_method_that_failed_is_named(method: str):
    def fail(*_: object) -> object:
        raise ValueError

    failing = type("Failing", (DoublingModel,), {method: fail})()
    outcome = ask(failing, json_item(1))
    assert isinstance(outcome, ItemError)
    assert outcome.message.removeprefix("instance: ").startswith(f"{method} raised ValueError")


class ReadingModel(DoublingModel):
    """Reads JSON as a careless author would."""

    example: object = {"x": [1]}

    def preprocess(self, item: Item) -> Features:
        value: Any = item.json()
        if value == "bug":
            raise RuntimeError("bug")
        x = value["x"]
        if x == "long":
            raise OverflowError
        return {"x": torch.tensor(float(x[0]))}


UNFIT = [
    ({"y": 1}, "KeyError"),
    ([], "TypeError"),
    ({"x": []}, "IndexError"),
    ({"x": ["a"]}, "ValueError"),
    ({"x": "long"}, "OverflowError"),
    ({"x": [None]}, "TypeError"),
]


def test_json_that_preprocess_raises_on_is_the_clients_error_logged_once_for_each_line(
    caplog: pytest.LogCaptureFixture,
):
    computer = computer_of(ReadingModel())
    for _ in range(2):
        answers = compute(ReadingModel(), [value for value, _ in UNFIT], computer)
        assert answers == ["unfit_input"] * len(UNFIT)
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    # `[]` and `{"y": 1}` raise at one line, each another error; the last two of one type at one.
    assert len(caplog.records) == 6
    assert "preprocess raised KeyError: 'x' on a client's JSON at " in caplog.text
    assert "; a KeyError of this line is not logged again" in caplog.text
    caplog.clear()
    assert compute(ReadingModel(), ["bug"], computer) == ["model_error"]
    assert "ERROR" in caplog.text


@pytest.mark.parametrize("detail", ["name", "text"])
def test_setting_decides_whether_clients_see_what_preprocess_raised(detail: ErrorDetail):
    for value, name in UNFIT:
        outcome = ask(ReadingModel(), json_item(value), error_detail=detail)
        assert isinstance(outcome, ItemError)
        text = rf"{name}: .*" if detail == "text" else name
        assert re.fullmatch(rf"instance: preprocess raised {text}", outcome.message)


def test_error_that_the_models_own_example_raises_too_is_the_models(
    caplog: pytest.LogCaptureFixture,
):
    class Odd(ReadingModel):
        example: object = {"z": 1}

    assert compute(Odd(), [{"y": 1}, [], {"x": ["a"]}]) == [
        "model_error", "unfit_input", "unfit_input"
    ]  # fmt: skip
    assert "preprocess failed on an input: KeyError: 'x'" in caplog.text


def test_a_form_that_preprocess_raises_on_is_the_clients_error(caplog: pytest.LogCaptureFixture):
    class Captioned(DoublingModel):
        form = "instance"

        def preprocess(self, item: Item) -> Features:
            value: Any = item.json()
            return {"x": torch.tensor(float(len(value["image"].data)))}

    for given, found in [
        ({"image": Upload(data=b"jpg")}, 6.0),
        ({"text": b'"jpg"'}, "unfit_input"),
        ({"image": b'"photo.jpg"'}, "unfit_input"),  # its client forgot the @
        ({"image": Upload(data=b"jpg"), "k": b"[1e999]"}, "invalid_input"),
    ]:
        pieces, headers = pack_form(given.items())
        item = Item(kind="form", payload=memoryview(b"".join(pieces)), headers=headers)
        assert read(ask(Captioned(), item)) == found
    assert "preprocess raised KeyError: 'image' on a client's form at " in caplog.text
    for text, found in [(b'{"image":{"b64":"anBn"}}', 6.0), (b'{"image":"jpg"}', "unfit_input")]:
        assert read(ask(Captioned(), json_item(text), kind="fields")) == found


def test_only_json_of_a_client_is_to_blame_for_what_preprocess_raises():
    class Picky(RootModel):
        def preprocess(self, item: Item) -> Features:
            raise ValueError("no")

    assert read(ask(Picky(), tensor_item({"x": torch.ones(2)}))) == "model_error"
    outcome = ask(Picky(), tensor_item({"x": torch.tensor([1, math.inf])}))
    assert isinstance(outcome, ItemError)
    assert outcome.message.startswith("tensor 'x': inf at [1]")
    outcome = ask(Picky(), tensor_item({"": torch.tensor([1, math.inf])}))
    assert isinstance(outcome, ItemError)
    assert outcome.message.startswith("the tensor: inf at [1]"), "a raw body names none"


@pytest.mark.parametrize("value", [{"y": 1}, {"x": []}])
def test_long_whole_number_that_is_not_what_preprocess_raised_about_is_not_blamed(
    value: dict[str, object],
):
    body = json.dumps({"id": 10**20, **value}).encode()
    outcome = ask(ReadingModel(), json_item(body))
    assert isinstance(outcome, ItemError)
    assert outcome.message.startswith("instance: preprocess raised ")


@pytest.mark.parametrize("digits", [20, 400])
def test_whole_number_that_no_tensor_can_hold_is_named_with_its_place(digits: int):
    class Counting(ReadingModel):
        def preprocess(self, item: Item) -> Features:
            return {"x": torch.tensor(item.json()["x"])}  # type: ignore[index]  # of any form

    outcome = ask(Counting(), json_item(b'{"x": [1, %s]}' % (b"9" * digits)))
    assert isinstance(outcome, ItemError)
    assert outcome.code == "invalid_input"
    assert re.fullmatch(r"instance: 9{20,30}.* at x\[1\] is out of range", outcome.message)


@pytest.mark.parametrize(
    ("detail", "told"),
    [
        ("name", r"forward raised ValueError; the service's log has the rest"),
        ("text", r"forward raised ValueError: secret"),
        ("traceback", r"(?s)forward raised ValueError: secret\nTraceback .*in double\n.*secret"),
    ],
)
def test_setting_decides_how_much_of_an_exception_clients_see(detail: ErrorDetail, told: str):
    def y(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("secret")

    outcome = ask(DoublingModel(y), json_item(1), error_detail=detail)
    assert isinstance(outcome, ItemError)
    assert re.fullmatch(told, outcome.message)
