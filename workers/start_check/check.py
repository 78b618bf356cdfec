"""Checks a loaded model on an instance of its own, before its worker is ready. In workers only.

The instance goes the whole way of a call: alone, again, and beside another one. A model is refused
if it fails, if its answer cannot be sent or is not finite, or if it answers otherwise another time.
With an instance that was made up, it is only warned of.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from inferpool.models.accelerator.failures import (
    is_lost_device,
    is_out_of_memory,
    is_unanswered,
    lacks_resources,
    raised,
)
from inferpool.models.attached import attached
from inferpool.models.base import Model
from inferpool.models.errors import InputError, ModelError
from inferpool.models.files.modules import is_ours, line_of
from inferpool.models.item import Features, Item, Outputs
from inferpool.models.overrides import bad_return, is_overridden, place_of, rendering_of
from inferpool.models.sources.made_up import made_up, shrunk, varied
from inferpool.models.texts import described, text_of
from inferpool.models.tolerance import ValueTolerance
from inferpool.workers.inside.checks import BrokenPromiseError
from inferpool.workers.inside.compute import Computer
from inferpool.workers.inside.outcomes import (
    NotFiniteAnswerError,
    check_size,
    encoder,
    outgoing_of,
)
from inferpool.workers.inside.shortage import release
from inferpool.workers.shared.config import REFUSED, CheckReport, WorkerConfig
from inferpool.workers.start_check.likeness import (
    are_close,
    floats_of,
    form_of,
    form_text,
    is_rounding,
    without_same,
)
from inferpool.workers.start_check.networks import (
    BF16_ROUNDING,
    Formats,
    non_finite_weight,
    rounding_in,
    rounding_of,
    training_text,
)
from inferpool.workers.start_check.own_passes import OwnPasses, Pass

logger = logging.getLogger(__name__)

LONG_S = 1.0
"""A pass that took longer is not repeated."""
_LEAST_ROUNDING = 1e-5
_ROUNDINGS = {"bf16": BF16_ROUNDING, "fp16": 2**-7, "tf32": 2**-7}
"""Largest deviation of an output with a preset, as a part of its largest value: 8 epsilons."""
_PROMISES = ("repeatable", "alone_as_in_batch", "finite_outputs")


class ReadyCheck:
    """Check of one model, which is loaded. Use it in the thread that computes."""

    def __init__(
        self,
        model: Model,
        config: WorkerConfig,
        example: Item | None,
        samples: Sequence[Item],
        *,
        preset: str = "exact",
        long_s: float = LONG_S,
    ) -> None:
        """Choose the instance: the model's example, its first sample, or one that is made up.

        Args:
            model: The model.
            config: Configuration of the worker; says whether the model is checked here.
            example: The model's own example.
            samples: Instances of its warm-up.
            preset: Speed preset that it computes with.
            long_s: Seconds after which a pass counts as too long to be repeated.
        """
        self._model = model
        self._config = config
        self._example = example
        self._samples = samples
        self._long_s = long_s
        self._rounding = _ROUNDINGS.get(preset.rpartition("_")[2], _LEAST_ROUNDING)
        self._is_made_up = example is None and (not samples or model._makes_samples)
        self._generator = torch.Generator().manual_seed(0)
        self._item = example or (samples[0] if samples else None)
        if self._item is None and not is_overridden(model, "preprocess"):
            self._item = made_up(model.inputs, self._generator)
        self._step = "preprocess"
        self._has_other = len(samples) > 1  # in the warm-up, besides the first one
        self._known: dict[int, Pass] = {}  # of the warm-up with the instance first, by size
        self._formats = Formats()
        self._is_steady = True  # the same outputs are rendered alike each time
        self._encode = encoder(are_finite=model.finite_outputs)
        self._warnings: list[str] = []
        self._not_checked: list[str] = []
        self._media_types: tuple[str, ...] = ()

    @property
    def is_off(self) -> bool:
        """True if the settings say so, or another worker of the version has done it."""
        return self._config.check == "off" or self._config.checked is not None

    def warm_up(self, computer: Computer, sizes: Sequence[int]) -> float:
        """Compute the samples in some sizes, and keep what that shows; see `OwnPasses.warm_up`.

        A single sample is computed beside another one, if one that fits can be made of it.

        Raises:
            ModelError: The model is refused, since it fails on its first sample.
        """
        passes, needed = OwnPasses(computer), self._config.max_batch_size
        warm_up = partial(passes.warm_up, sizes=sizes, needed=needed, on_pass=self._keep)
        if other := self._other_to_warm():
            try:
                longest_s = warm_up([*self._samples, other])
                self._has_other = True
                return longest_s
            except raised() as error:  # it may be the other's fault
                if is_lost_device(error) or lacks_resources(error):
                    raise
                logger.debug("another instance does not fit beside it", exc_info=True)
                self._known.clear()
        try:
            return warm_up(self._samples)
        except raised() as error:
            is_ours = self._item is self._samples[0] and not self._known
            if is_ours and not self._is_made_up and not self.is_off:
                self._step = "the warm-up"
                self._refuse_raised(error, "")
            raise

    def _other_to_warm(self) -> Item | None:
        """Return an instance to compute beside a single sample; None if there must be none."""
        model, samples = self._model, self._samples
        is_one = len(samples) == 1 and self._item is samples[0] and self._config.max_batch_size > 1
        if self.is_off or not is_one or not (model.repeatable and model.alone_as_in_batch):
            return None
        try:
            other = _there(varied(samples[0]))
            with torch.inference_mode():
                one, two = model.preprocess(samples[0]), model.preprocess(other)
                fits = form_of(one) == form_of(two) and model.bucket(one) == model.bucket(two)
        except raised():  # the model is the user's: it may refuse what was made up
            return None
        return other if fits else None

    def _keep(self, size: int, one: Pass) -> None:
        """Store a pass of the warm-up, so that it need not be repeated."""
        if self._item is self._samples[0]:
            self._known[size] = one

    def run(self, computer: Computer) -> CheckReport:
        """Check the model, unless that is off, and choose the sample of the canaries.

        Raises:
            ModelError: The model is refused; says why, and what to do.
        """
        known = self._config.checked or CheckReport()
        report = known if self.is_off else self._checked(computer)
        first = self._samples[0] if self._samples else None
        sample = self._example if self._example and report.is_sample_finite else first
        is_known = self._item is not None and sample is self._item
        computer.use_sample(sample, report.is_sample_finite if is_known else None)
        return report

    def _checked(self, computer: Computer) -> CheckReport:
        is_finite: bool | None = None
        for flaw in self._model._load_flaws:
            self._refuse(flaw, is_certain=True)
        if self._item is not None:
            with torch.inference_mode():
                is_finite = self._run(computer, self._item)
        else:
            lacks = "" if is_overridden(self._model, "preprocess") else " or complete `inputs`"
            self._not_checked.append(f"its answers, since it has no `example`{lacks}")
        return CheckReport(
            warnings=tuple(self._warnings),
            not_checked=tuple(self._not_checked),
            declared=tuple(f"{x} = False" for x in _PROMISES if not getattr(self._model, x)),
            media_types=self._media_types,
            is_sample_finite=is_finite,
        )

    def _run(self, computer: Computer, item: Item) -> bool | None:
        """Check the instance; return whether its outputs were finite, if they were computed."""
        model = self._model
        try:
            features = self._prepared(item)
            alone = self._known.get(1) or self._computed(computer, [features])
            answer = None
            if alone.is_finite:
                answer = self._answer(item, alone.outputs)
                if is_overridden(model, "render_content"):
                    self._step = "render_content"
                    self._shown(_content_of(model, alone.outputs, item.parameters))
                if answer is not None:
                    self._is_steady = are_close(answer, self._answer(item, alone.outputs))
        except raised() as error:
            self._refuse_raised(error, "")
            return None
        if not alone.is_finite:
            self._refuse_non_finite(alone)
            return False
        if not model.repeatable:
            return True
        if not self._is_steady:
            place = place_of(model, rendering_of(model)[0])
            self._warn(
                f"{self._name} renders the same outputs otherwise another time ({place}); say "
                "`repeatable = False` in its class if that is meant"
            )
        # The first pass of all is often the slowest one by far.
        took_s = min([alone.took_s, *(one.took_s / size for size, one in self._known.items())])
        if took_s > self._long_s:
            self._not_checked.append(f"the same again, since it took {took_s:.1f} s")
        elif not self._is_repeated(computer, item, alone, answer):
            return True
        if model.alone_as_in_batch and self._config.max_batch_size > 1:
            sizes = [size for size in self._known if size > 1]
            if sizes and self._has_other:
                beside: Pass | None = self._known[max(sizes)]
            elif took_s > self._long_s:
                beside = None
                self._not_checked.append(f"beside another one, since it took {took_s:.1f} s")
            else:
                beside = self._beside(computer, item, features)
            if beside is not None:
                self._compare_beside(computer, item, alone, beside, answer)
        return True

    def _is_repeated(self, computer: Computer, item: Item, alone: Pass, answer: object) -> bool:
        try:
            again = self._computed(computer, [self._prepared(item)])
            other = self._answer(item, again.outputs)
        except raised() as error:
            self._refuse_raised(error, " when it is asked again")
            return False
        if difference := self._difference(computer, alone, again, answer, other):
            self._refuse(
                f"{self._name} answers otherwise when it is asked the same again ({difference})"
                f"{hint(self._model, 'repeatable')}"
            )
        return not difference

    def _compare_beside(
        self, computer: Computer, item: Item, alone: Pass, beside: Pass, answer: object
    ) -> None:
        try:
            other = self._answer(item, beside.outputs)
        except raised() as error:
            self._refuse_raised(error, " beside another instance")
            return
        if difference := self._difference(computer, alone, beside, answer, other):
            self._refuse(
                f"{self._name} answers otherwise beside another instance than alone "
                f"({difference}){hint(self._model, 'alone_as_in_batch')}"
            )

    def _beside(self, computer: Computer, item: Item, features: Features) -> Pass | None:
        """Compute the instance before another one, or before itself if no other one fits."""
        for other in self._others(item, features):
            try:
                return self._computed(computer, [features, other()])
            except raised() as error:  # it may be the other's fault
                if is_lost_device(error):
                    raise
                if lacks_resources(error):
                    release(error)
                    break
                logger.debug("another instance does not fit beside it", exc_info=True)
        try:
            return self._computed(computer, [features, features])
        except raised() as error:
            if is_out_of_memory(error):  # calls are computed one by one then
                release(error)
                self._not_checked.append(
                    "beside another one, for which the memory does not suffice"
                )
                return None
            self._refuse_raised(error, " beside itself (is max_batch_size = 1 meant?)")
            return None

    def _others(self, item: Item, features: Features) -> Iterator[Callable[[], Features]]:
        """Yield what makes the features of other instances, the best first."""
        if others := [each for each in self._samples[:2] if each is not item]:
            yield lambda: _alike(self._model, features, self._prepared(others[-1]))
        yield lambda: _alike(self._model, features, self._prepared(_there(varied(item))))
        if not is_overridden(self._model, "preprocess"):
            yield lambda: shrunk(features, self._generator)

    def _prepared(self, item: Item) -> Features:
        self._step = "preprocess"
        return self._model.preprocess(item)

    def _computed(self, computer: Computer, chosen: Sequence[Features]) -> Pass:
        self._step = "forward"
        hash(self._model.bucket(chosen[0]))
        return OwnPasses(computer).try_out(chosen)

    def _answer(self, item: Item, outputs: Outputs) -> object:
        """Return the answer as JSON, if the model renders it itself; check that it can be sent."""
        self._step, render_batch = rendering_of(self._model)
        if not is_overridden(self._model, self._step):
            outgoing_of(outputs, 1).row(0, bytes)
            return None
        return self._shown(*render_batch(_copied(outputs), [item.parameters]))

    def _shown(self, value: object) -> object:
        """Return a rendered value as JSON; check that it can be sent."""
        if isinstance(value, InputError):  # such as for a missing parameter
            told = f"its answers, since {self._step} wants more: {text_of(value)}"
            self._not_checked += [] if told in self._not_checked else [told]
            return None
        if hasattr(value, "json_hint"):
            self._media_types, shown = attached("form of content")(self._model, value)
            return shown
        return _sent(self._model, self._encode, value)

    def _difference(
        self, computer: Computer, first: Pass, other: Pass, answer: object, another: object
    ) -> str:
        """Return how two passes differ by more than the model's tolerance; empty if they do not."""
        one, two = floats_of(first.outputs), floats_of(other.outputs)
        if form_of(one) != form_of(two) or len(one) < len(first.outputs):
            # Outputs of another size, or not in tensors: only the answers can be compared.
            if is_overridden(self._model, rendering_of(self._model)[0]):
                is_same = not self._is_steady or are_close(answer, another)
                return "" if is_same else "another answer"
            return f"outputs of the form {form_text(two)} instead of {form_text(one)}"
        most = max(self._rounding, rounding_of(self._model, one))
        if all(is_rounding(one[name], two[name], most) for name in one):
            return ""
        for name in one:
            one[name], two[name] = without_same(one[name], two[name])
        try:
            agreement = self._model.tolerance.judge(one, two)
        except Exception:  # a tolerance may need more than one instance
            logger.debug("the tolerance cannot judge one instance", exc_info=True)
            agreement = ValueTolerance().judge(one, two)
        if agreement.is_within:
            return ""
        most = self._rounding_seen(computer)
        return (
            "" if all(is_rounding(one[name], two[name], most) for name in one) else agreement.text
        )

    def _rounding_seen(self, computer: Computer) -> float:
        """Return the rounding of the formats that the model computes in."""
        if not self._formats.found and self._item is not None:
            try:
                features = self._prepared(self._item)
                with self._formats:
                    self._computed(computer, [features])
            except raised() as error:  # such as a compiler's that knows no such modes
                if is_lost_device(error):
                    raise
                logger.debug("the formats of the model cannot be seen", exc_info=True)
        return rounding_in(self._formats.found)

    def _refuse_non_finite(self, alone: Pass) -> None:
        names = [
            name
            for name, x in floats_of(alone.outputs).items()
            if x.is_floating_point() and not x.isfinite().all()
        ]
        weights = non_finite_weight(self._model)
        because = f": its weight `{weights}` is not finite" if weights else ""
        self._refuse(
            f"{self._name} gives NaN or an infinity in {', '.join(map(repr, names))} for "
            f"{self._instance}{because}; if that is meant, say `finite_outputs = False`",
            is_certain=bool(weights),
        )

    def _refuse_raised(self, error: BaseException, when: str) -> None:
        may_pass = lacks_resources(error) or (is_unanswered(error) and self._config.check == "on")
        if is_lost_device(error) or (may_pass and not self._is_made_up):
            raise error  # another start may succeed
        where = f" ({line})" if (line := line_of(error, type(self._model).__module__)) else ""
        is_ours = isinstance(error, ModelError | BrokenPromiseError)  # which says all by itself
        step = "" if is_ours else f"{self._step} raised "
        text = (text_of(error) if is_ours else described(error)).partition("\n")[0]
        level = logging.WARNING if self._is_made_up else logging.ERROR
        logger.log(level, "%s fails on %s", self._name, self._instance, exc_info=error)
        hint = training_text(self._model)
        self._refuse(f"{self._name} fails on {self._instance}{when}: {step}{text}{where}{hint}")

    def _refuse(self, text: str, *, is_certain: bool = False) -> None:
        """Refuse the model; only warn of an uncertain fault that a made-up instance shows."""
        if self._config.check == "on" and (is_certain or not self._is_made_up):
            raise ModelError(f"{text}; {REFUSED}")
        self._warn(text)

    def _warn(self, text: str) -> None:
        logger.warning("%s", text)
        self._warnings.append(text)

    @property
    def _name(self) -> str:
        return type(self._model).__name__

    @property
    def _instance(self) -> str:
        return "an instance that was made up" if self._is_made_up else "its own example"


def _alike(model: Model, features: Features, others: Features) -> Features:
    """Return the others' features, if the model puts both into one batch."""
    if model.bucket(features) != model.bucket(others):
        raise ValueError("another bucket")
    model.collate([features, others])
    return others


def _content_of(model: Model, outputs: Outputs, parameters: Mapping[str, object]) -> object:
    """Return what a model that renders content besides JSON renders, or that it wants more."""
    one = {name: output[0] for name, output in _copied(outputs).items()}
    try:
        return model.render_content(one, parameters)
    except InputError as error:
        return error


def _copied(outputs: Outputs) -> dict[str, Any]:
    """Copy outputs, since `render` may change them in place."""
    return {name: x.clone() if hasattr(x, "clone") else x for name, x in outputs.items()}


def _sent(model: Model, encode: Callable[[object], bytes], value: object) -> object:
    """Return an answer as it comes out of JSON; check that it can be sent."""
    try:
        text = encode(value)
    except NotFiniteAnswerError as error:
        raise BrokenPromiseError(
            f"the {error}; if that is meant, say `finite_outputs = False`"
        ) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise bad_return(model, "render", "a value that JSON can say", text_of(error)) from None
    check_size(len(text))
    return msgspec.json.decode(text)


def hint(model: Model, promise: str) -> str:
    """Return what to do about answers that differ."""
    place = place_of(model, "forward")
    where = f" ({place})" if place and not is_ours(place) else ""
    says = f"say `{promise} = False` in its class, or in its options, if that is meant"
    return f"{where}{training_text(model)}; {says}"


def _there(item: Item | None) -> Item:
    if item is None:
        raise ValueError("nothing can be made of it")
    return item
