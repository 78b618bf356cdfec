"""Tries fast ways to decode inputs, compares them with the exact way, and keeps the verdicts.

Worker processes only. It compares the model's answers with the chosen preset and another way to
decode to those of the exact network and exact decoding, so the tolerance bounds both changes
together. Each way is judged apart, and has a verdict of its own.
"""

import hashlib
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import torch
from torch import nn

from inferpool.models.accelerator.device import is_accelerator, name_of, synchronize
from inferpool.models.accelerator.failures import is_lost_device, lacks_resources
from inferpool.models.base import Model
from inferpool.models.errors import ModelError
from inferpool.models.item import Features, Item, Outputs
from inferpool.models.ragged import joined
from inferpool.models.spec import Decoding
from inferpool.models.speed.options import SpeedOptions
from inferpool.models.speed.trial import using_network
from inferpool.models.speed.verdicts import VerdictStore, fingerprint
from inferpool.models.speed_names import SpeedReport
from inferpool.models.tolerance import Agreement

logger = logging.getLogger(__name__)

_BATCH = 8
_LEAST_GAIN = 1.1
"""Least gain that another way must have; less may be noise."""
_LOCK_WAIT_S = 60.0
_TITLES = {"fast": "fast decoding", "device": "decoding on the device"}


class DecodeTrial:
    """Comparison of the ways to decode a model's inputs.

    Args:
        model: With its network chosen.
        exact: Network that the chosen one replaced.
        options: Its settings.
    """

    def __init__(
        self, model: Model, exact: Callable[..., object] | None, options: SpeedOptions
    ) -> None:
        self._model = model
        self._exact = exact
        self._store = VerdictStore(options.cache_dir)
        tensors = exact.state_dict().values() if isinstance(exact, nn.Module) else ()
        self._device = next((each.device for each in tensors), torch.device("cpu"))
        # A device works while this thread waits for it.
        usual = time.monotonic if is_accelerator(self._device) else time.thread_time
        self._clock = options.times.decode_clock or usual
        self._now = options.times.now
        # The CPU's ways gain alike from threads, and their time is measured within one.
        self._num_threads = options.prepare_threads if is_accelerator(self._device) else 1
        self._start_pool = options.start_pool

    def choose(
        self,
        report: SpeedReport,
        *,
        is_wanted: bool,
        measures: bool = True,
        on_progress: Callable[[str], None],
    ) -> SpeedReport:
        """Choose the model's fastest way to decode that agrees, and return the completed report.

        Args:
            report: Report about the model's network.
            is_wanted: Whether the settings name `fast`: then one is used even if answers change.
            measures: Whether to measure what the store has no verdict on. Otherwise the report is
                provisional then, and the model decodes exactly.
            on_progress: Called with what is being done.

        Raises:
            ModelError: The settings name `fast`, and this model cannot decode fast.
            torch.AcceleratorError: The device's context is lost.
        """
        items = list(self._model.encoded_samples())
        if not items:
            if is_wanted:
                raise ModelError('decode = "fast" cannot be used: this model has only one decoder')
            return report
        began = self._now()
        with torch.inference_mode():
            first = self._model.preprocess(items[0])
        ways = self._model.fast_decodings
        keys = [self._key(way, first, report.preset) for way in ways]
        if not measures and not all(map(self._store.read, keys)):
            return msgspec.structs.replace(report, is_provisional=True)
        verdicts = [
            self._verdict(way, key, items, on_progress) for way, key in zip(ways, keys, strict=True)
        ]
        # First those that may be used, then the faster.
        best = max(
            range(len(ways)), key=lambda i: (verdicts[i].decode != "exact", verdicts[i].decode_gain)
        )
        known = verdicts[best]
        if known.decode == "exact" and is_wanted:
            logger.warning('decode = "fast" is not what "auto" would choose: %s', known.note)
            known = msgspec.structs.replace(known, decode=ways[best])
        notes = [report.note, *(verdict.note for verdict in verdicts)]
        report = msgspec.structs.replace(
            report,
            note="; ".join(each for each in notes if each),
            measured_s=report.measured_s + self._now() - began,
        )
        if known.decode == "exact":
            return report
        self._model.decode = known.decode
        return msgspec.structs.replace(
            report,
            decode=known.decode,
            decode_gain=known.decode_gain,
            deviation=known.deviation,
        )

    def _verdict(
        self,
        way: Decoding,
        key: str,
        items: Sequence[Item],
        on_progress: Callable[[str], None],
    ) -> SpeedReport:
        if known := self._store.read(key):
            return known
        title = _TITLES[way]
        with self._store.turn(key, _LOCK_WAIT_S, partial(on_progress, f"waiting to try {title}")):
            if known := self._store.read(key):
                return known
            on_progress(f"comparing {title} with the exact way")
            known = self._measure(way, items)
            self._store.write(key, known)
        return known

    def _key(self, way: Decoding, features: Features, preset: str) -> str:
        network = self._exact if isinstance(self._exact, nn.Module) else nn.Identity()
        sample = hashlib.sha256()
        for name, tensor in sorted(features.items()):
            sample.update(name.encode())
            sample.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        facts = (preset, sample.hexdigest(), name_of(self._device), self._num_threads)
        return f"{fingerprint(network, self._model.tolerance, *facts)}-decode-{way}"

    def _measure(self, way: Decoding, items: Sequence[Item]) -> SpeedReport:
        title = _TITLES[way]
        try:
            exact, found, gain = self._decode(way, items)
            agreement = self._compare(exact, found)
        except Exception as error:  # the model is the user's: it may raise anything
            if is_lost_device(error):
                raise  # nothing more can be tried
            logger.debug("%s fails", title, exc_info=True)
            # What lacked memory may have it another time.
            return SpeedReport(note=f"{title} fails: {error}", is_cut_short=lacks_resources(error))
        finally:
            self._model.decode = "exact"
        note = f"{title} {gain:.2f} x"
        if not agreement.is_within:
            return SpeedReport(
                note=f"{note}, refused: {agreement.text}",
                decode_gain=gain,
                deviation=agreement.deviation,
            )
        if gain < _LEAST_GAIN:
            return SpeedReport(note=note, decode_gain=gain)
        return SpeedReport(decode=way, decode_gain=gain, deviation=agreement.deviation, note=note)

    @torch.inference_mode()
    def _decode(
        self, way: Decoding, items: Sequence[Item]
    ) -> tuple[list[Features], list[Features], float]:
        """Prepare batches of the samples both ways in turn, so that a slow moment hits both.

        Returns:
            The exact batches, the others, and how many times as fast the others were.
        """
        exact, found, ratios = [], [], []
        with self._preprocessing() as preprocess:
            self._prepare(items[:_BATCH], way, preprocess)  # the first time takes longer
            for start in range(0, len(items), _BATCH):
                chosen = items[start : start + _BATCH]
                batch, exact_s = self._prepare(chosen, "exact", preprocess)
                exact.append(batch)
                batch, found_s = self._prepare(chosen, way, preprocess)
                found.append(batch)
                ratios.append(exact_s / max(found_s, 1e-9))
        return exact, found, statistics.median(ratios)

    @contextmanager
    def _preprocessing(self) -> "Iterator[Callable[[Sequence[Item]], list[Features]]]":
        """Yield a function that preprocesses items, in as many threads as in service."""
        preprocess = torch.inference_mode()(self._model.preprocess)
        if self._num_threads == 1:
            yield lambda items: [*map(preprocess, items)]
            return
        with self._start_pool(self._num_threads, "try") as pool:
            yield lambda items: [*pool.map(preprocess, items)]

    def _prepare(
        self,
        items: Sequence[Item],
        way: Decoding,
        preprocess: Callable[[Sequence[Item]], list[Features]],
    ) -> tuple[Features, float]:
        """Prepare a batch of items, ready on the device; return how long that took."""
        model, device = self._model, self._device
        model.decode = way
        began = self._clock()
        batch = model.collate(preprocess(items))
        ready = {name: tensor.to(device) for name, tensor in batch.items()}
        synchronize(device)
        return ready, self._clock() - began

    def _compare(self, exact: Sequence[Features], found: Sequence[Features]) -> Agreement:
        outputs = self._outputs(self._model.network, found)
        return self._model.tolerance.judge(self._outputs(self._exact, exact), outputs)

    @torch.inference_mode()
    def _outputs(
        self, network: Callable[..., object] | None, batches: Sequence[Features]
    ) -> dict[str, Any]:
        model = self._model
        parts: list[Outputs] = []
        with using_network(model, network):
            for batch in batches:
                outputs = model.forward(batch)
                parts.append(model.postprocess({k: out.cpu() for k, out in outputs.items()}))
        return joined(parts)
