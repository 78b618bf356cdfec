"""Tests of the process that `inferpool doctor` runs on a model."""

import json
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch

from inferpool.models.base import Model
from inferpool.models.item import Features, Item
from inferpool.models.spec import Placement
from tests.models.items import bytes_item

_PLACEMENT = {"devices": ["cpu"], "split": None}


class Lengths(Model):
    """A model that prints the shape of each batch; inputs are as long as their payloads."""

    def load(self, placement: Placement) -> None:
        """There is nothing to load."""

    def warmup(self) -> Sequence[Item]:
        return [bytes_item(bytes(length)) for length in (2, 5, 3)]

    def preprocess(self, item: Item) -> Features:
        return {"x": torch.zeros(len(item.payload))}

    def forward(self, batch: Features) -> Features:
        sys.stdout.write(f"batch of {list(batch['x'].shape)}\n")
        return batch


@pytest.mark.slow
def test_batches_are_timed_on_the_largest_input_so_that_they_can_be_compared():
    order = {
        "do": "measured",
        "name": "lengths",
        "source": "tests.workers.beside.test_probe:Lengths",
        "weights": None,
        "options": {},
        "placement": _PLACEMENT,
        "max_batch_size": 4,
    }
    done = subprocess.run(
        [sys.executable, "-m", "inferpool.workers.beside.probe"],
        input=json.dumps({"accelerator": "cuda", "devices": [], "models": [order]}),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    _, answer = [json.loads(line) for line in done.stdout.splitlines()]
    assert [size for size, _ in answer["predict_s"]] == [1, 4]
    said = [line for line in done.stderr.splitlines() if line.startswith("batch of")]
    assert said == ["batch of [1, 5]"] * 3 + ["batch of [4, 5]"] * 3
