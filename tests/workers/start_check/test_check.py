"""The check of a model on its own example, before its worker is ready."""

import re
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from inferpool.models.base import Model
from inferpool.models.border import checked
from inferpool.models.content import Content
from inferpool.models.errors import InputError, ModelError
from inferpool.models.example import own_example
from inferpool.models.item import Features, Item
from inferpool.models.spec import Placement, TensorSpec
from inferpool.workers.inside.compute import Computer
from inferpool.workers.inside.process import load
from inferpool.workers.shared.config import CheckReport
from inferpool.workers.shared.messages import Ready
from inferpool.workers.start_check.check import ReadyCheck
from inferpool.workers.start_check.networks import non_finite_weight, rounding_of
from tests.small_classifier import SmallClassifier
from tests.workers.contract import config_of

HERE = Path(__file__).name


def picture(width: int, height: int) -> bytes:
    encoded = BytesIO()
    Image.linear_gradient("L").resize((width, height)).convert("RGB").save(encoded, "PNG")
    return encoded.getvalue()


class Sound(Model):
    inputs: Sequence[TensorSpec] = (TensorSpec(name="x", dtype="float32", shape=(-1, 3)),)
    outputs: Sequence[TensorSpec] = (TensorSpec(name="y", dtype="float32", shape=(-1, 3)),)
    example: object = [1.0, 2.0, 3.0]
    num_forwards = 0

    def forward(self, batch: Features) -> Any:
        self.num_forwards += 1
        return {"y": self.compute(batch["x"])}

    def compute(self, x: Tensor) -> Any:
        return x * 2


class Raising(Sound):
    def compute(self, x: Tensor) -> Any:
        raise KeyError("weights")  # the line that must be named


class OfList(Sound):
    def forward(self, batch: Features) -> Any:
        return [batch["x"]]


class Squeezed(Sound):
    def compute(self, x: Tensor) -> Any:
        return x.squeeze(0)


class AnotherShape(Sound):
    outputs = (TensorSpec(name="y", dtype="float32", shape=(-1, 4)),)


class WrongExample(Sound):
    example: object = [1.0, 2.0]


class OwnExampleRefused(Sound):
    def preprocess(self, item: Item) -> Features:
        raise InputError("send something else")


class NotFinite(Sound):
    def compute(self, x: Tensor) -> Any:
        return x / 0


class UnsayableRender(Sound):
    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        return object()


class RaisingRender(Sound):
    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        return [][0]


class Random(Sound):
    def compute(self, x: Tensor) -> Any:
        return x + torch.rand(3)


class RandomAtFirst(Sound):
    def preprocess(self, item: Item) -> Features:
        return {"x": torch.rand(3)}


class Counting(Sound):
    def compute(self, x: Tensor) -> Any:
        return x * self.num_forwards


class OfBatch(Sound):
    def compute(self, x: Tensor) -> Any:
        return x - x.mean(0)


class OneByOne(Sound):
    def compute(self, x: Tensor) -> Any:
        assert len(x) == 1
        return x


class ForgotEval(Sound):
    net: nn.Module

    def load(self, placement: Placement) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))

    def compute(self, x: Tensor) -> Any:
        return self.net(x)


class ForgotEvalOfNorm(ForgotEval):
    def load(self, placement: Placement) -> None:
        self.net = nn.Sequential(nn.Conv1d(1, 1, 1), nn.BatchNorm1d(1))

    def compute(self, x: Tensor) -> Any:
        return self.net(x[:, None])[:, 0]


class BrokenWeights(ForgotEval):
    def load(self, placement: Placement) -> None:
        self.net = nn.Linear(3, 3).eval()
        with torch.no_grad():
            self.net.weight[1, 1] = torch.nan


class Flawed(Sound):
    def load(self, placement: Placement) -> None:
        self._load_flaws = ["it was exported in training mode"]


class Padding(Model):
    """Pads pictures to the largest one of the batch, and counts the pixels."""

    example = (picture(40, 30), "image/png")
    outputs = (TensorSpec(name="size", dtype="float32", shape=(-1, 1)),)

    def preprocess(self, item: Item) -> Features:
        with Image.open(BytesIO(item.payload)) as image:
            return {"size": torch.tensor([image.height, image.width])}

    def collate(self, instances: Sequence[Features]) -> Features:
        sizes = torch.stack([each["size"] for each in instances])
        return {"size": sizes.amax(0).expand(len(sizes), 2)}

    def forward(self, batch: Features) -> Features:
        return {"size": batch["size"].prod(1, keepdim=True).float()}


class PaddingUp(Padding):
    """Counts at least the pixels of a small picture, since its example is one."""

    example = (picture(10, 10), "image/png")

    def preprocess(self, item: Item) -> Features:
        size = super().preprocess(item)["size"]
        return {"size": size * 4 if size.prod() < 100 else size}


class PaddedTexts(Model):
    example = "a text"

    def preprocess(self, item: Item) -> Features:
        return {"ids": torch.tensor([*str(item.json()).encode()])}

    def collate(self, instances: Sequence[Features]) -> Features:
        ids = [each["ids"] for each in instances]
        return {"ids": nn.utils.rnn.pad_sequence(ids, batch_first=True)}

    def forward(self, batch: Features) -> Features:
        return {"mean": batch["ids"].float().mean(1)}  # over the padding, too


def ready_of(kind: type[Model], **changes: Any) -> Ready:
    return load(config_of(f"{__name__}:{kind.__name__}", **changes), lambda stage: None)[1]


@pytest.mark.parametrize("kind", [OfBatch, OneByOne], ids=lambda kind: kind.__name__)
def test_nothing_is_put_beside_the_example_where_batches_have_one_instance(kind: type[Model]):
    assert ready_of(kind, max_batch_size=1).checked == CheckReport(is_sample_finite=True)


class Bare(Sound):
    """Shows no instance, so one is made up from `inputs`."""

    example = None


class BareAndRaising(Bare):
    def compute(self, x: Tensor) -> Any:
        raise ValueError("no such numbers")


class BareAndRandom(Bare, Random):
    pass


class BareAndNotFinite(Bare, NotFinite):
    pass


class BareAndBroken(BrokenWeights):
    example = None


class ReadsItsOwn(Raising):
    example = None

    def preprocess(self, item: Item) -> Features:
        return {"x": torch.zeros(3)}


def test_what_an_instance_that_was_made_up_shows_is_only_warned_of():
    assert ready_of(Bare).checked == CheckReport(is_sample_finite=True)
    for kind, told in (
        (BareAndRaising, "fails on an instance that was made up: forward raised ValueError"),
        (BareAndRandom, "asked the same again"),
        (BareAndNotFinite, "gives NaN or an infinity in 'y' for an instance that was made up"),
    ):
        (warning,) = ready_of(kind).checked.warnings
        assert told in warning
    with pytest.raises(ModelError, match=r"its weight `net\.weight` is not finite"):
        ready_of(BareAndBroken)  # which is certain


def test_no_instance_is_made_up_for_a_model_that_reads_its_own_form():
    report = ready_of(ReadsItsOwn).checked
    assert report == CheckReport(not_checked=("its answers, since it has no `example`",))


class Counted(Sound):
    sizes: ClassVar[list[int]] = []

    def compute(self, x: Tensor) -> Any:
        self.sizes.append(len(x))
        return x


class Warmed(Counted):
    example = None

    def warmup(self) -> Sequence[Item]:
        return [Item(kind="json", payload=memoryview(b"[1, 2, 3]"))]


class WarmedTwice(Warmed):
    def warmup(self) -> Sequence[Item]:
        return [*super().warmup(), Item(kind="json", payload=memoryview(b"[4, 5, 6]"))]


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [(Counted, [1, 1, 2]), (Warmed, [1, 8, 1, 2]), (WarmedTwice, [1, 8, 1])],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_passes_of_the_warm_up_are_not_repeated(
    kind: type[Counted], sizes: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kind, "sizes", [])
    ready_of(kind)
    assert kind.sizes == sizes
    kind.sizes.clear()
    ready_of(kind, checked=CheckReport())
    assert kind.sizes == [each for each in sizes[:2] if kind is not Counted]


def test_pass_that_takes_long_is_not_repeated(monkeypatch: pytest.MonkeyPatch):
    model = checked(Counted())
    monkeypatch.setattr(Counted, "sizes", [])
    example = own_example(model)
    assert example is not None
    check = ReadyCheck(model, config_of(), example.item, [], long_s=0.0)
    report = check.run(Computer(model, num_threads=1))
    assert Counted.sizes == [1]
    assert report.not_checked == (
        "the same again, since it took 0.0 s",
        "beside another one, since it took 0.0 s",
    )


class Rounding(Sound):
    """Answers like a network of 16 bits, whose sums depend on the size of the batch."""

    def load(self, placement: Placement) -> None:
        self.net = nn.Linear(3, 3, dtype=torch.bfloat16)

    def compute(self, x: Tensor) -> Any:
        return x * (1 + 0.03 * (len(x) - 1))


class Pictured(SmallClassifier):
    """Records the sizes of its batches."""

    sizes: ClassVar[list[int]] = []

    def forward(self, batch: Features) -> Features:
        self.sizes.append(len(batch["image"]))
        return super().forward(batch)


def test_other_picture_goes_with_the_warm_up_if_it_fits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Pictured, "sizes", [])
    assert ready_of(Pictured).checked == CheckReport(is_sample_finite=True)
    assert Pictured.sizes == [1, 8, 1]


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_archive_that_trains_or_has_broken_weights_is_refused(tmp_path: Path):
    def ready(network: nn.Module, **options: object) -> Ready:
        path = tmp_path / "a.pt2"
        free = ({0: torch.export.Dim("batch", max=64)},)
        example = (torch.rand(3, 4),)
        torch.export.save(torch.export.export(network, example, dynamic_shapes=free), path)
        return load(config_of(str(path), options=options), lambda stage: None)[1]

    training = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
    with pytest.raises(ModelError, match=r"exported in training mode: dropout \(1\)"):
        ready(training)
    assert ready(training, repeatable=False).checked.declared == ("repeatable = False",)
    broken = nn.Linear(4, 4).eval()
    with torch.no_grad():
        broken.bias[0] = torch.inf
    with pytest.raises(ModelError, match=r"its weight `_module\.bias` is not finite"):
        ready(broken)
    assert ready(nn.Linear(4, 4).eval()).checked == CheckReport(is_sample_finite=True)


class Listed(ForgotEval):
    """Keeps its networks in a list, in a dict, and in an object."""

    def load(self, placement: Placement) -> None:
        torch.manual_seed(0)
        self.kept = SimpleNamespace(stages={"first": [nn.Linear(3, 3), nn.Dropout(0.5)]})

    def compute(self, x: Tensor) -> Any:
        for each in self.kept.stages["first"]:
            x = each(x)
        return x


class ListedBroken(Listed):
    def load(self, placement: Placement) -> None:
        super().load(placement)
        first = self.kept.stages["first"]
        first[1].eval()
        with torch.no_grad():
            first[0].weight[0] = torch.nan


class Masked(BareAndNotFinite):
    """Has a mask among its weights, and no answer for some numbers that nobody sends."""

    def load(self, placement: Placement) -> None:
        self.net = nn.Linear(3, 3)
        self.net.mask = nn.Parameter(torch.full((3, 3), -torch.inf).triu(1), requires_grad=False)


def test_mask_among_the_weights_is_no_broken_weight():
    (warning,) = ready_of(Masked).checked.warnings
    assert "its weight" not in warning


@pytest.mark.parametrize(
    "kind",
    [
        dtype
        for name in dir(torch)
        if isinstance(dtype := getattr(torch, name), torch.dtype) and dtype.is_floating_point
    ],
    ids=str,
)
def test_weights_of_every_format_can_be_looked_through(kind: torch.dtype):
    model = Sound()
    raw = torch.zeros(4, dtype=torch.uint8).repeat(kind.itemsize).view(kind)
    vars(model)["net"] = nn.ParameterList([nn.Parameter(raw, requires_grad=False)])
    assert non_finite_weight(model) == ""
    assert rounding_of(model, {}) <= 0.125


class Stamped(Sound):
    """Sound, but says when it has answered."""

    num_rendered = 0

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        type(self).num_rendered += 1
        return {"y": outputs["y"].tolist(), "answer": f"number {self.num_rendered}"}


class StampedTexts(Stamped):
    """Pads its outputs, so that only the answers tell whether they are the same."""

    example: object = "a text"

    def preprocess(self, item: Item) -> Features:
        return {"x": torch.tensor([*str(item.json()).encode()]).float()}

    inputs = ()
    outputs = ()

    def collate(self, instances: Sequence[Features]) -> Features:
        x = [each["x"] for each in instances]
        return {"x": nn.utils.rnn.pad_sequence(x, batch_first=True)}


@pytest.mark.parametrize("kind", [Stamped, StampedTexts], ids=lambda kind: kind.__name__)
def test_render_that_draws_or_tells_the_time_is_told_of_and_not_refused(kind: type[Model]):
    (warning,) = ready_of(kind).checked.warnings
    assert re.search(rf"renders the same outputs otherwise.*{HERE}:\d+\)", warning)
    report = ready_of(kind, check="warn").checked
    assert report.is_sample_finite


class ChangingInPlace(Sound):
    """Changes its outputs in place as it renders them, which it may."""

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        return outputs["y"].mul_(100).tolist()


class RendersNaN(Sound):
    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        return {"score": float("nan")}


class Autocast(Sound):
    """Computes in 16 bits, which neither its weights nor its outputs show."""

    def compute(self, x: Tensor) -> Any:
        y = (x.bfloat16() * 2).float()
        return y * (1 + 0.004 * (len(x) - 1))


class AutocastOfBatch(Autocast):
    def compute(self, x: Tensor) -> Any:
        return super().compute(x) - x.mean(0)


class HasFlaws(Sound):
    """Keeps something of its own under a name that a server might use."""

    def load(self, placement: Placement) -> None:
        self.flaws = ["scratch", "dent"]


class NeedsParameter(Sound):
    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        if "top" not in parameters:
            raise InputError("say how many in `top`")
        return outputs["y"].tolist()


def test_model_whose_answer_needs_a_parameter_is_not_refused_for_lack_of_it():
    report = ready_of(NeedsParameter).checked
    assert report == CheckReport(
        is_sample_finite=True,
        not_checked=("its answers, since render wants more: say how many in `top`",),
    )


class Drawing(Sound):
    def render_content(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        return Content(bytes(len(outputs["y"])), "image/png")


class DrawingWrongly(Sound):
    def render_content(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        return Contents(b"", "image/png")  # type: ignore[name-defined]  # noqa: F821


class DrawingWithParameter(Sound):
    def render_content(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        raise InputError("say a colour")


def test_the_content_of_a_model_that_answers_with_json_too_is_tried_on_the_example():
    assert ready_of(Drawing).interface.media_types == ("image/png",)
    with pytest.raises(ModelError, match="render_content raised NameError"):
        ready_of(DrawingWrongly)
    assert ready_of(DrawingWithParameter).checked.not_checked == (
        "its answers, since render_content wants more: say a colour",
    )


class OneAtOnce(Sound):
    """Fits into the memory alone, so that calls are computed one by one."""

    def compute(self, x: Tensor) -> Any:
        if len(x) > 1:
            raise torch.OutOfMemoryError("too many rows for me")
        return x


def test_model_that_fits_into_the_memory_alone_is_not_refused():
    report = ready_of(OneAtOnce).checked
    assert report == CheckReport(
        is_sample_finite=True,
        not_checked=("beside another one, for which the memory does not suffice",),
    )


class FindsBright(Pictured):
    """Fails on a picture without anything bright in it."""

    def warmup(self) -> Sequence[Item]:
        return [Item(kind="image", payload=memoryview(picture(40, 30)))]

    def forward(self, batch: Features) -> Features:
        for each in batch["image"]:
            (each > 0.7 * each.max().clamp(min=self.brightest)).nonzero()[0]
        return super().forward(batch)

    brightest = 0.0

    def load(self, placement: Placement) -> None:
        super().load(placement)
        self.brightest = float(self.preprocess(self.warmup()[0])["image"].max())


class Tabular(Sound):
    """Looks numbers of a row up in tables, which on a GPU must not fail once."""

    inputs = (
        TensorSpec(name="ids", dtype="int64", shape=(-1, 2)),
        TensorSpec(name="x", dtype="float32", shape=(-1, 3)),
    )
    example: object = {"ids": [2, 900], "x": [350.0, 1.0, -3.0]}
    failed: ClassVar[list[str]] = []

    def forward(self, batch: Features) -> Any:
        ids, kinds = batch["ids"], batch["x"][:, 1].long()
        if (ids[:, 0] > 2).any() or (ids[:, 1] > 900).any() or (kinds > 1).any() or (ids < 1).any():
            self.failed.append("index out of range")
        x = batch["x"] + (ids.float().mean() if self.is_of_batch else 0)
        return {"y": x}

    is_of_batch = False


class TabularOfBatch(Tabular):
    is_of_batch = True


def test_mate_of_an_example_has_no_larger_numbers_than_it():
    for kind in (Tabular, TabularOfBatch):
        ready_of(kind, check="warn")
    assert Tabular.failed == []


class FewWords(PaddedTexts):
    """Reads a limited number of words."""

    example = "a text of eight words and no more"

    def preprocess(self, item: Item) -> Features:
        words = str(item.json()).split()
        assert len(words) <= 9
        return super().preprocess(item)


class AsksElsewhere(Sound):
    """Needs another service, which is not there yet."""

    def compute(self, x: Tensor) -> Any:
        try:
            raise ConnectionRefusedError("nobody listens")
        except OSError as error:
            raise RuntimeError("no features") from error


class BareAndLarge(Bare):
    def compute(self, x: Tensor) -> Any:
        raise torch.OutOfMemoryError("too much for me")


def test_model_that_another_start_may_help_is_not_refused_for_good():
    with pytest.raises(RuntimeError, match="no features"):
        ready_of(AsksElsewhere)
    (warning,) = ready_of(AsksElsewhere, check="warn").checked.warnings
    assert "no features" in warning


def test_instance_that_was_made_up_may_be_too_large():
    (warning,) = ready_of(BareAndLarge).checked.warnings
    assert "fails on an instance that was made up: forward raised" in warning


class Guarded:
    """Refuses to be looked at, as proxies do outside of what they stand for."""

    __slots__ = ()

    @property
    def __dict__(self) -> Any:
        raise RuntimeError("not here")


class KeepsOddThings(ForgotEval):
    """Keeps objects that cannot be looked at beside its network."""

    def load(self, placement: Placement) -> None:
        self.odd = [Guarded(), object(), lambda: 0, {1: self}, [self] * 3]
        super().load(placement)


REFUSED: dict[type[Model], str] = {
    Raising: rf"fails on its own example: forward raised KeyError: 'weights' \(.*{HERE}:\d+\)",
    OfList: r"returned 'y' of shape \[1, 3\] for an instance, where it declares \[3\]",
    Squeezed: r"returned 3 rows of 'y' for a batch of 1",
    AnotherShape: r"returned 'y' of shape \[3\] for each instance, where it declares \[4\]",
    WrongExample: r"preprocess raised InputError: instance: expected 3 numbers, found 2",
    OwnExampleRefused: r"preprocess raised InputError: send something else",
    NotFinite: r"gives NaN or an infinity in 'y' for its own example.*`finite_outputs = False`",
    BrokenWeights: r"in 'y' for its own example: its weight `net.weight` is not finite",
    UnsayableRender: rf"render must return a value that JSON can say.*{HERE}:\d+\)",
    RaisingRender: rf"render raised IndexError: list index out of range \(.*{HERE}:\d+\)",
    Random: rf"asked the same again.*off by.*{HERE}:\d+\); say `repeatable = False`",
    RandomAtFirst: r"asked the same again",
    Counting: r"asked the same again.*off by 1 ",
    OfBatch: r"beside another instance than alone.*`alone_as_in_batch = False`",
    OneByOne: rf"beside itself.*forward raised AssertionError.*{HERE}:\d+\)",
    ForgotEval: r"`net.1` \(Dropout\) is in training mode: call `self.net.eval\(\)` in `load`",
    ForgotEvalOfNorm: r"beside another.*`net.1` \(BatchNorm1d\) is in training mode",
    Flawed: r"^it was exported in training mode",
    PaddingUp: r"beside another instance than alone.*`alone_as_in_batch = False`",
    PaddedTexts: r"beside another instance than alone.*`alone_as_in_batch = False`",
    RendersNaN: r"own example: the answer .* has nan at score, for which",
    Listed: r"call `self\.kept\.stages\['first'\]\[1\]\.eval\(\)`",
    ListedBroken: r"weight `kept\.stages\['first'\]\[0\]\.weight` is not",
    KeepsOddThings: r"call `self\.net\.eval\(\)`",
    AutocastOfBatch: r"beside another instance than alone",
    TabularOfBatch: r"beside another instance than alone",
    FewWords: r"beside another instance than alone",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_model_that_cannot_answer_its_own_example_rightly_is_refused(kind: type[Model]):
    with pytest.raises(ModelError, match=REFUSED[kind]) as caught:
        ready_of(kind)
    assert str(caught.value).endswith('set check = "warn" or "off" to serve it as it is')
    report = ready_of(kind, check="warn").checked
    (warning,) = report.warnings
    assert re.search(REFUSED[kind], warning)
    assert ready_of(kind, check="off").checked == CheckReport()
    assert ready_of(kind, checked=report).checked is report


DECLARED: dict[type[Model], dict[str, bool]] = {
    Random: {"repeatable": False},
    Counting: {"repeatable": False},
    ForgotEval: {"repeatable": False},
    OfBatch: {"alone_as_in_batch": False},
    PaddingUp: {"alone_as_in_batch": False},
    NotFinite: {"finite_outputs": False},
    RendersNaN: {"finite_outputs": False},
}


@pytest.mark.parametrize("kind", DECLARED, ids=lambda kind: kind.__name__)
def test_what_a_class_says_is_meant_is_not_refused(
    kind: type[Model], monkeypatch: pytest.MonkeyPatch
):
    for name, value in DECLARED[kind].items():
        monkeypatch.setattr(kind, name, value, raising=False)
    report = ready_of(kind).checked
    assert report.declared == tuple(f"{name} = False" for name in DECLARED[kind])
    assert report.warnings == ()


SOUND = [
    *(Sound, Padding, ChangingInPlace, HasFlaws, Rounding, Autocast, Tabular, FindsBright),
]


@pytest.mark.parametrize("kind", SOUND, ids=lambda kind: kind.__name__)
def test_sound_model_passes(kind: type[Model]):
    assert ready_of(kind).checked == CheckReport(is_sample_finite=True)
