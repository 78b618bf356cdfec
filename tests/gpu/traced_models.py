"""Classifiers that write down what their worker does when, for https://ui.perfetto.dev."""

import threading
from collections.abc import Mapping, Sequence

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from inferpool.models.item import Features, Item
from inferpool.models.spec import Placement
from inferpool.models.vision.classifier import Classifier
from inferpool.models.vision.zoo import TorchvisionClassifier
from tests.small_classifier import SmallClassifier

_FIRST, _LAST = 30, 60
"""Forward passes between which everything is written down."""


class Traced(Classifier):
    """Profiles its process for some batches, with all threads and the device's own activity.

    It writes the file in a thread beside: no batch waits for it.
    """

    trace: str
    """The file."""

    def load(self, placement: Placement) -> None:
        super().load(placement)
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        self._num_forwards = 0

    def preprocess(self, item: Item) -> Features:
        with record_function("prepare"):
            return super().preprocess(item)

    def collate(self, instances: Sequence[Features]) -> Features:
        with record_function("collate"):
            return super().collate(instances)

    def forward(self, batch: Features) -> Features:
        self._num_forwards += 1
        if self._num_forwards == _FIRST:
            self._profile.start()
        elif self._num_forwards == _LAST:
            self._profile.stop()
            write = self._profile.export_chrome_trace
            threading.Thread(target=write, args=(self.trace,), daemon=True).start()
        with record_function("forward"):
            return super().forward(batch)

    def postprocess(self, outputs: Features) -> Features:
        with record_function("postprocess"):
            return super().postprocess(outputs)

    def render_batch(
        self, outputs: Features, parameters: Sequence[Mapping[str, object]]
    ) -> Sequence[object]:
        with record_function("render"):
            return super().render_batch(outputs, parameters)


class TracedSmall(Traced, SmallClassifier):
    """A classifier that takes no time."""

    def __init__(self, *, trace: str) -> None:
        super().__init__()
        self.trace = trace


class TracedResNet(Traced, TorchvisionClassifier):
    """ResNet-50 with random weights."""

    def __init__(self, *, trace: str) -> None:
        super().__init__("resnet50", weights=None)
        self.trace = trace
        torch.backends.cudnn.benchmark = False
