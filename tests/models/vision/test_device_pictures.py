"""A network's input made of pictures by one launch, on the simulated device."""

import errno
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from inferpool.models.errors import InputError
from inferpool.models.item import Item
from inferpool.models.spec import Placement
from inferpool.models.vision import device_pictures
from inferpool.models.vision.classifier import Classifier
from tests.models.items import encoded, image_item, photo, tensor_item
from tests.simulated_accelerator import pictures as simulated
from tests.small_classifier import SmallClassifier

pytestmark = pytest.mark.simulated

JPEGS = [image_item(encoded(photo(name))) for name in ("astronaut", "coffee", "chelsea")]
PNG = image_item(encoded(photo("coffee"), "PNG"))
PIXELS = tensor_item({"": torch.from_numpy(np.array(photo("rocket")))})
GRAY = tensor_item({"": torch.from_numpy(np.array(photo("coffee").convert("L")))})
COLOURS_FIRST = tensor_item({"": torch.from_numpy(np.array(photo("chelsea"))).permute(2, 0, 1)})
OWN = tensor_item({"": torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(0))})
HOLLOW = JPEGS[0].payload.tobytes()
HOLLOW = HOLLOW[: HOLLOW.index(b"\xff\xda")] + b"\xff\xd9"
"""A JPEG with all of its headers, and no pixels."""


@pytest.fixture(autouse=True)
def healthy() -> Iterator[None]:
    yield
    torch.sim.revive(0)
    torch.sim.synchronize()


@pytest.fixture
def launches(monkeypatch) -> list[int]:
    """Sizes of the batches that were launched."""
    sizes: list[int] = []
    transform = simulated.transform

    def counted(images, *others):
        sizes.append(len(images))
        transform(images, *others)

    monkeypatch.setattr(simulated, "transform", counted)
    return sizes


def loaded(decode: str = "device") -> Classifier:
    model = SmallClassifier()
    with torch.inference_mode():
        model.load(Placement(devices=("sim:0",)))
    model.decode = decode
    return model


@torch.inference_mode()
def batch_of(model: Classifier, items: list[Item]) -> Tensor:
    return model.collate([model.preprocess(item) for item in items])["image"]


@torch.inference_mode()
def logits_of(model: Classifier, items: list[Item]) -> Tensor:
    return model.forward({"image": batch_of(model, items)})["logits"].cpu()


@pytest.mark.parametrize(
    "items",
    [
        JPEGS,
        [PIXELS, GRAY, COLOURS_FIRST],
        [*JPEGS, PNG, PIXELS],
        [OWN, JPEGS[0], PIXELS, OWN, PNG, GRAY, JPEGS[1]],
    ],
    ids=["jpegs", "pixels", "pictures", "inputs"],
)
def test_a_batch_gets_the_exact_answers_by_one_launch(items: list[Item], launches: list[int]):
    wanted = logits_of(loaded("exact"), items)
    model = loaded()
    assert model._pictures_on_gpu is not None
    launches.clear()  # of the check
    torch.testing.assert_close(logits_of(model, items), wanted)
    assert launches == [len(items) - items.count(OWN)]


def test_little_memory_is_pinned_however_large_the_pictures_are(monkeypatch):
    items = [*JPEGS, PIXELS, GRAY, COLOURS_FIRST]
    wanted = logits_of(loaded("exact"), items)
    model = loaded()
    most, pinned, empty = 1 << 20, [], torch.empty

    def counted(*size, **options):
        out = empty(*size, **options)
        pinned.append(out.nbytes if out.is_pinned() else 0)
        return out

    monkeypatch.setattr(device_pictures, "_MAX_PINNED_BYTES", most)
    monkeypatch.setattr(torch, "empty", counted)
    torch.testing.assert_close(logits_of(model, items), wanted)
    assert max(pinned) <= most < PIXELS.payload.nbytes + GRAY.payload.nbytes


@pytest.mark.parametrize(
    ("shape", "message"), [((1, 40_000_000, 3), "pixels"), ((0, 4, 3), "no pixels")]
)
def test_pixels_of_a_size_that_cannot_be_are_refused_alike(shape: tuple[int, ...], message: str):
    item = tensor_item({"": torch.empty(shape, dtype=torch.uint8)})
    errors = []
    for decode in ("exact", "device"):
        with pytest.raises(InputError, match=message) as error:
            loaded(decode).preprocess(item)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


def test_a_jpeg_that_the_device_refuses_is_decoded_on_the_cpu_for_the_same_launch(
    launches: list[int], monkeypatch
):
    model = loaded()
    blank = torch.zeros(32, 32, 3, dtype=torch.uint8)
    monkeypatch.setattr(model, "_exact_pixels", lambda payload: blank)
    wanted = logits_of(model, [JPEGS[0], tensor_item({"": blank}), JPEGS[1]])
    launches.clear()
    found = logits_of(model, [JPEGS[0], image_item(HOLLOW), JPEGS[1]])
    torch.testing.assert_close(found, wanted)
    assert launches == [3]


def test_the_input_has_the_dtype_and_layout_of_the_network():
    model = loaded()
    wanted = batch_of(model, JPEGS)
    model.network.input_dtype, model.network.memory_format = torch.bfloat16, torch.channels_last
    found = batch_of(model, JPEGS)
    assert found.dtype is torch.bfloat16
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found.float().cpu(), wanted.cpu(), atol=0.02, rtol=0)


def test_an_input_for_a_network_that_was_replaced_since_is_converted():
    model = loaded()
    wanted = logits_of(model, JPEGS)
    batch = batch_of(model, JPEGS).to(torch.float16)
    with torch.inference_mode():
        found = model.forward({"image": batch})["logits"].cpu()
    torch.testing.assert_close(found, wanted, atol=0.01, rtol=0)


def off(images, windows, interpolation, normalization, out) -> None:
    windows = np.add(windows, [[0, 0, 1, 0]])
    torch.ops.simulated.transform(
        out, images, windows.reshape(-1).tolist(), interpolation.value, normalization
    )


def broken(*args: object) -> None:
    raise RuntimeError("no compiler")


def full(*args: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("transform", "reason"),
    [(off, "off by"), (broken, "no compiler"), (full, "No space left")],
    ids=["off", "broken", "full"],
)
def test_a_launch_that_fails_its_check_is_not_used(
    transform: Callable[..., None], reason: str, monkeypatch, caplog
):
    monkeypatch.setattr(simulated, "transform", transform)
    model = loaded()
    wanted = logits_of(loaded("exact"), JPEGS)
    torch.testing.assert_close(logits_of(model, JPEGS), wanted, atol=0.02, rtol=0)
    assert model._pictures_on_gpu is None
    assert reason in caplog.text


def test_a_lack_of_memory_is_told_as_one():
    model = loaded()
    batch_of(model, JPEGS)
    torch.sim.synchronize()
    torch.sim.out_of_memory_after(3)  # each JPEG takes memory; then the result
    with pytest.raises(torch.OutOfMemoryError):
        batch_of(model, JPEGS)
    assert len(batch_of(model, JPEGS)) == len(JPEGS)
