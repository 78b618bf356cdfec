"""Figures for people, without a judgement: throughput against a bare loop, and a trace.

On GPUs the model is ResNet-50. On the simulated device, which says nothing about speed, a tiny
network shows that the measurements work.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from inferpool.models.base import Model
from inferpool.models.sources.registry import build
from tests.e2e.running import ROOT, Running, faulty, running, until
from tests.gpu.conftest import Devices
from tests.models.items import image_item, jpeg, loaded

SMALL = "tests.small_classifier:SmallClassifier"


def source_on(devices: Devices) -> str:
    return SMALL if devices.is_simulated else "torchvision:resnet50"


@pytest.fixture(scope="module")
def model(devices: Devices) -> Model:
    """The model on the CPU, in this process."""
    return loaded(build(source_on(devices), None, {}))


@pytest.fixture(scope="module")
def bare(devices: Devices, model: Any) -> dict[str, float]:
    """Instances a second of a loop that copies batches, computes them, and copies back."""
    edge, batch, seconds = model.transform.crop, 64, 3.0
    if devices.is_simulated:
        batch, seconds = 8, 0.2
    device = torch.device(devices.kind, 0)
    network = model.build_network().eval().to(device)
    rates = {"float32": _rate(network, (batch, 3, edge, edge), seconds, devices)}
    if not devices.is_simulated:
        network.half().to(memory_format=torch.channels_last)
        rates["float16, channels last"] = _rate(network, (batch, 3, edge, edge), seconds, devices)
    item = image_item(jpeg("coffee"))
    began = time.perf_counter()
    for _ in range(20):
        model.preprocess(item)
    rates["JPEGs of 600 x 400 prepared by a core"] = 20 / (time.perf_counter() - began)
    del network
    devices.module.empty_cache()
    return {name: round(rate) for name, rate in rates.items()}


def _rate(network: nn.Module, shape: tuple[int, ...], seconds: float, devices: Devices) -> float:
    weight = next(network.parameters())
    x = torch.randn(shape).to(weight.dtype).pin_memory()
    if weight.dtype == torch.float16:
        x = x.to(memory_format=torch.channels_last).pin_memory()
    with torch.inference_mode():
        for _ in range(3):
            network(x.to(weight.device, non_blocking=True)).cpu()
        num, began = 0, time.perf_counter()
        while time.perf_counter() < began + seconds:
            network(x.to(weight.device, non_blocking=True)).cpu()
            num += len(x)
        devices.module.synchronize()
        return num / (time.perf_counter() - began)


@pytest.fixture(scope="module")
def service(
    devices: Devices, bare: dict[str, float], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    settings = faulty(source=source_on(devices), devices=devices.named(0), weights="none")
    settings["models"]["m"]["max_batch_size"] = 8 if devices.is_simulated else 64
    settings["cache_dir"] = str(tmp_path_factory.mktemp("cache"))  # type: ignore[assignment]
    speed = "exact" if devices.is_simulated else "auto"
    with running("--speed", speed, settings=settings) as service:
        yield service


@pytest.mark.parametrize("kind", ["tensor", "JPEG"])
@pytest.mark.slow
def test_throughput_beside_a_bare_loop(
    devices: Devices,
    service: Running,
    bare: dict[str, float],
    model: Any,
    kind: str,
    tmp_path: Path,
    record_property,
):
    body = tmp_path / ("x.npy" if kind == "tensor" else "photo.jpg")
    if kind == "tensor":
        edge = model.transform.crop
        np.save(body, np.random.default_rng(0).standard_normal((3, edge, edge), np.float32))
    else:
        body.write_bytes(jpeg("coffee"))
    # More tensors at once would not fit into the arena.
    connections = 16 if devices.is_simulated else 192 if kind == "tensor" else 512
    seconds = "1s" if devices.is_simulated else "10s"
    processes = "1" if devices.is_simulated else "4"
    command = [
        *(sys.executable, "-m", "tests.load", "closed", service.url, "--body", str(body)),
        *("-c", str(connections), "-d", seconds, "--processes", processes),
        *("--warmup", seconds, "--out", str(tmp_path / "load.json")),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "load.json").read_text())
    rate = found["good_per_s"]
    assert rate > 0, found
    (worker,) = service.workers()
    record_property("speed and decode", f"{worker['speed']}, {worker['decode']}")
    record_property("served per second", round(rate))
    record_property("errors", found["errors"])
    for name, each in bare.items():
        record_property(f"bare loop, {name}, per second", each)
    record_property("served / bare float32", round(rate / bare["float32"], 3))


@pytest.mark.slow
def test_trace_shows_what_a_worker_does_when(devices: Devices, trace_folder: Path, record_property):
    """The file is for https://ui.perfetto.dev."""
    trace_folder.mkdir(parents=True, exist_ok=True)
    file = trace_folder / f"trace_{devices.kind}.json"
    file.unlink(missing_ok=True)
    name = "TracedSmall" if devices.is_simulated else "TracedResNet"
    settings = faulty(
        source=f"tests.gpu.traced_models:{name}",
        devices=devices.named(0),
        options={"trace": str(file)},
        max_batch_size=4 if devices.is_simulated else 32,
    )
    with running(settings=settings) as service:
        photo = Path(trace_folder, "photo.jpg")
        photo.write_bytes(jpeg("coffee"))
        load = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.load", "closed", service.url, "-d", "60s"),
                *("--body", str(photo), "-c", "16" if devices.is_simulated else "128"),
            ],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            until(lambda: is_json(file))
        finally:
            load.kill()
            load.wait()
    photo.unlink()
    spans = [each for each in json.loads(file.read_text())["traceEvents"] if "dur" in each]
    # On a GPU decoders may prepare pictures in processes of their own, which no profiler sees.
    prepare = [*named(spans, "prepare"), *named(spans, "collate")]
    forward = named(spans, "forward")
    assert {span["tid"] for span in prepare} - {span["tid"] for span in forward}
    assert {"collate", "postprocess", "render"} <= {span["name"] for span in spans}
    length = max(s["ts"] + s["dur"] for s in forward) - min(s["ts"] for s in forward)
    record_property("file", str(file))
    hidden = overlap(prepare, forward) / max(1, sum(span["dur"] for span in forward))
    record_property("share of forward beside a preparation", round(hidden, 2))
    if not devices.is_simulated:
        kernels = [span for span in spans if span.get("cat") == "kernel"]
        assert kernels, "the profiler saw no kernel: is CUPTI there?"
        record_property("share of the time with a kernel", round(union(kernels) / length, 2))


def is_json(file: Path) -> bool:
    """Return True once a file is written to its end."""
    try:
        return bool(json.loads(file.read_text()))
    except (OSError, ValueError):
        return False


def named(spans: Iterable[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [
        span for span in spans if span["name"] == name and span.get("cat") != "gpu_user_annotation"
    ]


def overlap(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> float:
    """Return the time in which spans of both kinds run."""
    return union(one) + union(other) - union([*one, *other])


def union(spans: Iterable[dict[str, Any]]) -> float:
    """Return the time in which some span runs."""
    total = end = 0.0
    for span in sorted(spans, key=lambda span: span["ts"]):
        last = span["ts"] + span["dur"]
        total += max(0.0, last - max(span["ts"], end))
        end = max(end, last)
    return total
