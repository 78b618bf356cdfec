import errno
from types import SimpleNamespace

import pytest
import torch

from inferpool.models.accelerator.failures import lacks_resources
from inferpool.models.errors import CheckpointError, InputError
from inferpool.models.vision.images import decode_image
from inferpool.workers.inside import outcomes as outcomes_module
from inferpool.workers.inside.checks import BrokenPromiseError
from inferpool.workers.inside.outcomes import TensorOutputs, bounded, error_of
from inferpool.workers.inside.own_process import reporting_failures
from inferpool.workers.shared.messages import ItemError, ItemRef, StartFailed, Stored, TensorBlob
from tests.fuzz import bombs

REF = ItemRef("json", 0, 1, 0.0)


def test_answers_that_exceed_one_message_become_errors_and_the_rest_is_sent(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(outcomes_module, "MAX_BATCH_BYTES", 100)
    stored = [TensorBlob("y", "uint8", (10_000,), Stored(0, 10_000))]
    inline = [TensorBlob("y", "uint8", (50,), bytes(50))]
    no = ItemError("model_error", "no")
    found = bounded([b"1" * 40, inline, b"1" * 40, stored, no, b"1" * 10])
    assert [each.code if isinstance(each, ItemError) else "ok" for each in found] == [
        *("ok", "ok", "exhausted", "ok", "model_error", "ok")
    ]


def test_size_of_an_expanded_output_is_that_of_its_bytes_when_sent():
    row = torch.zeros(1, 1).expand(3, (1 << 28) + 1)
    with pytest.raises(BrokenPromiseError, match="has 1,073,741,828 bytes"):
        TensorOutputs({"y": row}, 3)
    TensorOutputs({"y": torch.zeros(1, 1, dtype=torch.uint8).expand(3, 1 << 28)}, 3)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.ENOSPC, "No space left on device"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
def test_lack_of_memory_or_descriptors_is_not_blamed_on_an_input_or_a_model(error: Exception):
    found = error_of(error, "preprocess", REF, "name")
    assert found.code == "exhausted"
    assert "another try" in found.message
    wrapped = CheckpointError("cannot be read")
    wrapped.__cause__ = error
    assert lacks_resources(wrapped)
    assert error_of(InputError("no"), "preprocess", REF, "name").code == "invalid_input"
    assert not lacks_resources(OSError("image file is truncated"))


def test_a_decoder_without_memory_does_not_blame_the_picture(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("inferpool.models.vision.images.JpegImageFile.load", fail)
    with pytest.raises(MemoryError):
        decode_image(bombs.jpeg())


@pytest.mark.parametrize(("cause", "permanent"), [(MemoryError(), False), (KeyError("w"), True)])
def test_model_that_failed_to_load_for_lack_of_memory_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, cause: Exception, permanent: bool
):
    said: list[StartFailed] = []
    monkeypatch.setattr("inferpool.workers.inside.own_process.os._exit", said.index)
    with (
        pytest.raises(ValueError, match="not in list"),
        reporting_failures(SimpleNamespace(put=said.append)),  # type: ignore[arg-type]  # all it uses
    ):
        raise CheckpointError("cannot be read") from cause
    assert said == [StartFailed("cannot be read", permanent=permanent)]
