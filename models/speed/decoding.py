"""Tries fast decoding of inputs, compares it with the exact way, and keeps the verdict.

Worker processes only. It compares the model's answers with the chosen preset and fast decoding to
those of the exact network and exact decoding, so the tolerance bounds both changes together.
"""

import hashlib
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import msgspec
import torch
from torch import Tensor, nn

from inferpool.models.agreement import Agreement
from inferpool.models.base import Model
from inferpool.models.errors import ModelError
from inferpool.models.item import Features, Item
from inferpool.models.speed.names import SpeedReport
from inferpool.models.speed.trial import using_network
from inferpool.models.speed.verdicts import VerdictStore, fingerprint

logger = logging.getLogger(__name__)

_BATCH = 8
_LEAST_GAIN = 1.1
"""Least gain for which fast decoding is used; less may be noise."""
_LOCK_WAIT_S = 60.0


class DecodeTrial:
    """Comparison of the two ways in which a model can decode its inputs.

    Args:
        model: With its network chosen.
        exact: Network that the chosen one replaced.
        store: Place for verdicts.
    """

    def __init__(
        self, model: Model, exact: Callable[..., object] | None, store: VerdictStore
    ) -> None:
        self._model = model
        self._exact = exact
        self._store = store

    def choose(
        self, report: SpeedReport, *, is_wanted: bool, on_progress: Callable[[str], None]
    ) -> SpeedReport:
        """Let the model decode fast if that agrees, and return the completed report.

        Args:
            report: Report about the model's network.
            is_wanted: Whether the settings name `fast`: then it is used whatever it changes.
            on_progress: Called with what is being done.

        Raises:
            ModelError: The settings name `fast`, and this model cannot decode fast.
        """
        items = list(self._model.encoded_samples())
        if not items:
            if is_wanted:
                raise ModelError('decode = "fast" cannot be used: this model has only one decoder')
            return report
        began = time.monotonic()
        with torch.inference_mode():
            first = self._model.preprocess(items[0])
        key = self._key(first, report.preset)
        known = self._store.read(key)
        if known is None:
            wait = partial(on_progress, "waiting for the choice of a way to decode")
            with self._store.turn(key, _LOCK_WAIT_S, wait):
                known = self._store.read(key)
                if known is None:
                    on_progress("comparing ways to decode")
                    known = self._measure(items)
                    self._store.write(key, known)
        if known.decode == "exact" and is_wanted:
            logger.warning('decode = "fast" is not what "auto" would choose: %s', known.note)
            known = msgspec.structs.replace(known, decode="fast")
        report = msgspec.structs.replace(
            report,
            note="; ".join(each for each in (report.note, known.note) if each),
            measured_s=report.measured_s + time.monotonic() - began,
        )
        if known.decode == "exact":
            return report
        self._model.decode = "fast"
        return msgspec.structs.replace(
            report, decode="fast", decode_gain=known.decode_gain, deviation=known.deviation
        )

    def _key(self, features: Features, preset: str) -> str:
        network = self._exact if isinstance(self._exact, nn.Module) else nn.Identity()
        sample = hashlib.sha256()
        for name, tensor in sorted(features.items()):
            sample.update(name.encode())
            sample.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return fingerprint(network, self._model.tolerance, preset, sample.hexdigest()) + "-decode"

    def _measure(self, items: Sequence[Item]) -> SpeedReport:
        try:
            exact, fast, gain = self._decode(items)
            agreement = self._compare(exact, fast)
        except Exception as error:  # the model is the user's: it may raise anything
            logger.debug("fast decoding fails", exc_info=True)
            return SpeedReport(note=f"fast decoding fails: {error}")
        finally:
            self._model.decode = "exact"
        note = f"fast decoding {gain:.2f} x"
        if not agreement.is_within:
            return SpeedReport(
                note=f"{note}, refused: {agreement.text}",
                decode_gain=gain,
                deviation=agreement.deviation,
            )
        if gain < _LEAST_GAIN:
            return SpeedReport(note=note, decode_gain=gain)
        return SpeedReport(
            decode="fast", decode_gain=gain, deviation=agreement.deviation, note=note
        )

    @torch.inference_mode()
    def _decode(self, items: Sequence[Item]) -> tuple[list[Features], list[Features], float]:
        """Decode the samples both ways in turn, so that a slow moment hits both.

        Returns:
            The exact features, the fast ones, and how many times as fast those were.
        """
        exact, fast, ratios = [], [], []
        for item in items:
            features, exact_s = self._decode_one(item, "exact")
            exact.append(features)
            features, fast_s = self._decode_one(item, "fast")
            fast.append(features)
            ratios.append(exact_s / max(fast_s, 1e-9))
        return exact, fast, statistics.median(ratios)

    def _decode_one(self, item: Item, way: Literal["exact", "fast"]) -> tuple[Features, float]:
        self._model.decode = way
        began = time.thread_time()
        features = self._model.preprocess(item)
        return features, time.thread_time() - began

    def _compare(self, exact: Sequence[Features], fast: Sequence[Features]) -> Agreement:
        found = self._outputs(self._model.network, fast)
        return self._model.tolerance.judge(self._outputs(self._exact, exact), found)

    @torch.inference_mode()
    def _outputs(
        self, network: Callable[..., object] | None, features: Sequence[Features]
    ) -> dict[str, Tensor]:
        model = self._model
        parts: list[Features] = []
        with using_network(model, network):
            for start in range(0, len(features), _BATCH):
                outputs = model.forward(model.collate(features[start : start + _BATCH]))
                parts.append(model.postprocess({k: out.cpu() for k, out in outputs.items()}))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
