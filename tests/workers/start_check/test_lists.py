"""The check of models whose outputs are lists, with a tensor for each instance."""

from typing import Any

import pytest
import torch

from inferpool.models.border import checked
from inferpool.models.errors import ModelError
from inferpool.models.item import Features
from inferpool.workers.inside.compute import Computer
from inferpool.workers.shared.config import CheckReport
from inferpool.workers.start_check.check import ReadyCheck
from tests.models.items import json_item
from tests.ragged_model import RaggedBoxes
from tests.workers.contract import config_of


def check(model: RaggedBoxes) -> CheckReport:
    example = json_item(model.example)
    return ReadyCheck(checked(model), config_of(), example, []).run(Computer(model, num_threads=1))


def test_sound_model_passes():
    assert not check(RaggedBoxes()).warnings


class FewerBeside(RaggedBoxes):
    def forward(self, batch: Features) -> Any:
        return [
            {name: output[: 3 - len(batch["x"])] for name, output in one.items()}
            for one in super().forward(batch)
        ]


class FewerAgain(RaggedBoxes):
    num_left = 2

    def forward(self, batch: Features) -> Any:
        self.num_left -= 1
        return {"boxes": [torch.ones(self.num_left, 4)], "labels": [torch.arange(self.num_left)]}


class Shifted(RaggedBoxes):
    def forward(self, batch: Features) -> Any:
        return [one | {"boxes": one["boxes"] + len(batch["x"])} for one in super().forward(batch)]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (FewerBeside, r"than alone \(outputs of the form 'boxes' \[1, 1, 4\]"),
        (FewerAgain, r"the same again \(outputs of the form 'boxes' \[1, 0, 4\]"),
        (Shifted, r"beside another instance than alone \(off by"),
    ],
)
def test_another_number_or_other_numbers_are_another_answer(kind: type[RaggedBoxes], told: str):
    with pytest.raises(ModelError, match=told):
        check(kind())


def test_other_number_beside_others_may_be_meant():
    class Meant(FewerBeside):
        alone_as_in_batch = False

    assert check(Meant()).declared == ("alone_as_in_batch = False",)


def test_list_that_cannot_be_sent_is_refused():
    class Sparse(RaggedBoxes):
        outputs = ()

        def forward(self, batch: Features) -> Any:
            return {"boxes": [torch.eye(2).to_sparse() for _ in batch["x"]]}

    with pytest.raises(ModelError, match="'boxes' as a sparse or quantized tensor"):
        check(Sparse())
