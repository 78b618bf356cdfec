import pytest
import torch

from inferpool.models.spec import Placement
from inferpool.workers.inside.own_process import pin


def test_share_of_the_memory_is_bounded_on_the_device_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
):
    bounds: list[tuple[float, str]] = []
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda fraction, device: bounds.append((fraction, device)),
    )
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    group = Placement(
        devices=("cuda:0", "cuda:1"),
        split="pipeline",
        visible=("GPU-a", "GPU-b"),
        num_threads=torch.get_num_threads(),
        memory_fraction=0.4,
    )
    pin(group.for_rank(1))
    assert bounds == [(0.4, "cuda:1")]
