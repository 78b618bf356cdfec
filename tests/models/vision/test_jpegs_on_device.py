"""JPEGs decoded on the simulated device, whose decoder makes torchvision's calls to CUDA."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from inferpool.models.accelerator.device import SideStream
from inferpool.models.spec import Placement
from inferpool.models.vision.gpu_jpegs import Decode, GpuJpegs, decoder_on
from inferpool.models.vision.transforms import ImageTransform
from tests.models.items import encoded, image_item, photo
from tests.simulated_accelerator import jpegs as simulated
from tests.small_classifier import SmallClassifier

pytestmark = pytest.mark.simulated

TRANSFORM = ImageTransform(resize=36, crop=32)
NAMES = ("astronaut", "coffee", "chelsea", "rocket")
DATAS = [encoded(photo(name)) for name in NAMES]
ROTTEN = DATAS[0][:400] + b"\xff\xd9"  # no header says that it is
HOLLOW = DATAS[0][: DATAS[0].index(b"\xff\xda")] + b"\xff\xd9"
"""A JPEG with all of its headers, and no pixels."""


@pytest.fixture(autouse=True)
def healthy() -> Iterator[None]:
    yield
    torch.sim.revive(0)
    torch.sim.synchronize()


@pytest.fixture
def jpegs() -> GpuJpegs:
    return GpuJpegs(decoder(), TRANSFORM)


@pytest.fixture
def model() -> SmallClassifier:
    model = SmallClassifier()
    with torch.inference_mode():
        model.load(Placement(devices=("sim:0",)))
    return model


def decoder() -> Decode:
    decode = decoder_on(torch.device("sim:0"))
    assert decode is not None
    return decode


def accepted(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def never(payload: memoryview) -> Tensor:
    raise AssertionError("the device decodes this one")


def off_by(pixels: Tensor, data: bytes) -> int:
    exact = SmallClassifier()._exact_pixels(memoryview(data))
    return int((pixels.cpu().int() - exact.int()).abs().max())


def test_decoding_writes_over_nothing_that_queued_work_will_read():
    decode = decoder()
    (image,) = decode([accepted(DATAS[0])])
    expected = image.cpu().int().sum().item()
    torch.sim.busy(100_000)
    total = image.int().sum()  # which waits, while the memory of the image goes
    del image
    (other,) = decode([accepted(encoded(photo("astronaut").rotate(180)))])
    assert total.item() == expected
    assert other.shape == (3, 512, 512)


def test_preparing_beside_computing_changes_no_answer(model: SmallClassifier):
    model.decode = "device"
    items = [image_item(data) for data in DATAS]
    with torch.inference_mode():
        wanted = [one(model, [item]) for item in items]
    torch.sim.set_delay_us(200, 0)
    found: list[Tensor] = []
    side = SideStream("sim:0")

    def prepared(start: int) -> Callable[[], Tensor]:
        chosen = [items[(start + i) % len(items)] for i in range(3)]
        with torch.inference_mode(), side.in_use():
            batch = model.collate([model.preprocess(item) for item in chosen])
            moment = side.mark()

        def compute() -> Tensor:
            with torch.inference_mode():
                moment.take(batch.values())
                return model.forward(batch)["logits"]

        return compute

    coming = prepared(0)
    try:
        for start in range(1, 9):
            after: list[Callable[[], Tensor]] = []
            thread = threading.Thread(target=lambda n=start, to=after: to.append(prepared(n)))
            logits = coming()
            thread.start()
            found.append(logits.cpu())
            thread.join()
            del logits
            (coming,) = after
    finally:
        torch.sim.set_delay_us(0, 0)
    for start, logits in enumerate(found):
        for row in range(3):
            torch.testing.assert_close(logits[row], wanted[(start + row) % len(items)])


def one(model: SmallClassifier, items: list) -> Tensor:
    batch = model.collate([model.preprocess(item) for item in items])
    return model.forward(batch)["logits"][0].cpu()


@pytest.mark.parametrize("damaged", [ROTTEN, HOLLOW], ids=["header", "pixels"])
def test_a_damaged_jpeg_is_for_the_cpu_and_the_others_for_the_device(
    jpegs: GpuJpegs, damaged: bytes
):
    sent: list[int] = []

    def on_cpu(payload: memoryview) -> Tensor:
        sent.append(len(payload))
        return torch.zeros(32, 32, 3, dtype=torch.uint8)

    datas = [*DATAS, damaged, *DATAS]
    pixels = jpegs.pixels([accepted(data) for data in datas], on_cpu)
    assert sent == [len(damaged)]
    assert pixels[4].device.type == "cpu"
    assert max(off_by(pixels[i], datas[i]) for i in range(len(datas)) if i != 4) <= 2


@pytest.mark.parametrize("num_allocations", [0, 2, 6])
def test_a_lack_of_memory_is_told_as_one(jpegs: GpuJpegs, num_allocations: int):
    torch.sim.synchronize()
    torch.sim.out_of_memory_after(num_allocations)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        jpegs.pixels([accepted(data) for data in DATAS], never)
    pixels = jpegs.pixels([accepted(data) for data in DATAS], never)
    assert max(map(off_by, pixels, DATAS)) <= 2


def test_a_lack_of_nvjpegs_own_memory_is_told_as_one(jpegs: GpuJpegs, monkeypatch):
    def decode(*args: object, **kwargs: object) -> list[Tensor]:
        raise RuntimeError("Error while decoding JPEG images: Failed to decode jpeg stream: 5")

    monkeypatch.setattr(simulated, "decode_jpeg", decode)
    with pytest.raises(torch.OutOfMemoryError):
        decoder()([accepted(DATAS[0])])


@pytest.mark.parametrize("num_jpegs", [1, 4])
@pytest.mark.parametrize("num_operations", [None, 0, 3])
def test_a_lost_device_is_told_as_one(jpegs: GpuJpegs, num_operations: int | None, num_jpegs: int):
    torch.sim.synchronize()
    if num_operations is None:
        torch.sim.lose(0)
    else:
        torch.sim.fault_after(num_operations)

    def decode() -> None:
        jpegs.pixels([accepted(data) for data in DATAS[:num_jpegs]], never)
        torch.sim.synchronize()  # a fault of the resizing shows here

    with pytest.raises(torch.AcceleratorError):
        decode()


def test_work_that_a_failed_decoding_began_is_over_when_its_error_is_told():
    decode = decoder()
    torch.sim.set_delay_us(20_000, 0)
    try:
        with pytest.raises(RuntimeError, match="Error while decoding"):
            decode([accepted(DATAS[0]), accepted(HOLLOW)])
    finally:
        torch.sim.set_delay_us(0, 0)
    assert simulated._streams[torch.device("sim:0")].query()


def test_a_batch_takes_few_calls_for_each_jpeg(jpegs: GpuJpegs):
    class Calls(TorchDispatchMode):
        num = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.num += 1
            return func(*args, **(kwargs or {}))

    decoded = decoder()([accepted(data) for data in DATAS * 8])
    with torch.inference_mode(), Calls() as calls:
        TRANSFORM.device_pixels(decoded)
    assert calls.num / len(decoded) < 3


@pytest.mark.slow
def test_long_pictures_take_no_more_memory_than_others():
    """Their weights take far more than their pixels."""
    long = [torch.zeros(3, 24, 12_000, dtype=torch.uint8, device="sim:0") for _ in range(16)]
    torch.sim.synchronize()
    torch.sim.reset_peak_memory_stats()
    before = torch.sim.memory_allocated()
    bicubic = ImageTransform(resize=256, crop=224, interpolation=Image.Resampling.BICUBIC)
    assert len(bicubic.device_pixels(long)) == len(long)
    assert torch.sim.max_memory_allocated() - before < 500_000_000
