"""The choice between the CPU's and the device's fast decoder, on the simulated device."""

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inferpool.models.spec import Placement
from inferpool.models.speed.choose import choose
from tests.models.speed.pace import Encoded, Pace, options, quietly
from tests.simulated_accelerator import jpegs

pytestmark = pytest.mark.simulated

Decode = Callable[..., list[Tensor]]


def on(device: str, model: Encoded | None = None) -> Encoded:
    model = model or Encoded()
    with torch.inference_mode():
        model.load(Placement(devices=(device,)))
    return model


@pytest.fixture(autouse=True)
def revived() -> Iterator[None]:
    yield
    torch.sim.revive(0)


@pytest.fixture
def decoder(monkeypatch) -> Callable[[Callable[[Decode, list[Tensor]], list[Tensor]]], None]:
    """Replace the device's decoder; the new one is given the old one to call."""
    usual = jpegs.decode_jpeg

    def replace_by(change: Callable[[Decode, list[Tensor]], list[Tensor]]) -> None:
        def decode(encoded: list[Tensor], **options: Any) -> list[Tensor]:
            return change(functools.partial(usual, **options), encoded)

        monkeypatch.setattr(jpegs, "decode_jpeg", decode)

    return replace_by


@pytest.mark.parametrize(
    ("measured", "chosen"),
    [
        ({"fast": 2.0, "device": 3.0}, "device"),
        ({"fast": 3.0, "device": 2.0}, "fast"),
        ({"fast": 1.0, "device": 1.0}, "exact"),
    ],
)
def test_auto_takes_the_fastest_way_that_agrees(pace: Pace, measured, chosen: str):
    pace.decode_gains = measured
    model = pace.of(on("sim:0"))
    report = choose(model, pace.options("folded", decode="auto"), quietly)
    assert (model.decode, report.decode) == (chosen, chosen)
    assert report.decode_gain == pytest.approx(measured.get(chosen, 1.0))
    assert "fast decoding" in report.note
    assert "decoding on the device" in report.note
    assert ("decoding on the device, " in report.text()) is (chosen == "device")


def test_a_device_that_decodes_otherwise_is_refused_and_the_cpu_decodes_fast(pace: Pace, decoder):
    pace.decode_gains = {"fast": 2.0, "device": 3.0}
    decoder(lambda decode, encoded: [255 - image for image in decode(encoded)])
    for speed, wanted in (("folded", "auto"), ("exact", "fast")):
        model = pace.of(on("sim:0"))
        report = choose(model, pace.options(speed, decode=wanted), quietly)
        assert (model.decode, report.decode) == ("fast", "fast")
        assert report.decode_gain == pytest.approx(2.0)
        assert "decoding on the device 3.00 x, refused: the best label" in report.note


def test_verdicts_of_cpus_and_devices_are_kept_apart(tmp_path: Path):
    keys: list[set[str]] = []
    for device in ("cpu", "sim:0"):
        choose(on(device), options("exact", cache_dir=tmp_path, decode="fast"), quietly)
        keys.append({path.name for path in tmp_path.glob("*.json")})
    assert len(keys[0]) == 1
    assert len(keys[1]) == 3


def test_the_time_that_the_device_takes_to_decode_counts(pace: Pace, decoder):
    are_idle: list[bool] = []

    def slowly(decode: Decode, encoded: list[Tensor]) -> list[Tensor]:
        images = decode(encoded)
        torch.sim.busy(100_000)  # the last thing that makes them ready
        return images

    def clock() -> float:
        are_idle.append(torch.sim.current_stream().query())
        return pace()

    decoder(slowly)
    times = replace(pace.times(), decode_clock=clock)
    choose(on("sim:0"), options("exact", decode="fast", times=times), quietly)
    ends = are_idle[1::2]
    assert len(ends) == 6  # three batches for each way: one that is no measure, exact, the way
    assert all(ends)


def test_a_lack_of_memory_is_no_lasting_verdict(decoder, tmp_path: Path):
    def refuse(decode: Decode, encoded: list[Tensor]) -> list[Tensor]:
        raise RuntimeError("Error while decoding JPEG images: CUDA out of memory. Tried to")

    decoder(refuse)
    model = on("sim:0")
    choose(model, options("exact", cache_dir=tmp_path, decode="fast"), quietly)
    verdicts = [path.read_text() for path in tmp_path.glob("*-device.json")]
    assert len(verdicts) == 1
    assert '"is_cut_short": true' in verdicts[0]


def test_a_lack_of_memory_that_the_driver_tells_does_not_end_the_worker(pace: Pace):
    class Refusing(Encoded):
        def collate(self, instances):
            if self.decode == "device":
                raise torch.AcceleratorError("CUDA error: out of memory")
            return super().collate(instances)

    pace.decode_gains = {"fast": 2.0, "device": 3.0}
    model = pace.of(on("sim:0", Refusing()))
    report = choose(model, pace.options("exact", decode="fast"), quietly)
    assert (model.decode, report.decode) == ("fast", "fast")


def test_a_device_that_is_lost_meanwhile_ends_the_choice(decoder):
    def lose(decode: Decode, encoded: list[Tensor]) -> list[Tensor]:
        torch.sim.lose(0)
        return decode(encoded)

    decoder(lose)
    with pytest.raises(torch.AcceleratorError):
        choose(on("sim:0"), options("exact", decode="fast"), quietly)


def test_the_exact_way_is_measured_with_the_threads_of_the_service():
    names: set[str] = set()

    class Noting(Encoded):
        def preprocess(self, item):
            names.add(threading.current_thread().name.partition("_")[0])
            return super().preprocess(item)

    for device, found in (("sim:0", {"MainThread", "try"}), ("cpu", {"MainThread"})):
        names.clear()
        model = on(device, Noting())
        choose(model, options("exact", decode="fast", prepare_threads=3), quietly)
        assert names == found
