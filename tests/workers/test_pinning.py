import os

import pytest
import torch

from inferpool.models.accelerator.kinds import CUDA
from inferpool.models.spec import Placement
from inferpool.workers.inside.own_process import pin


def keep_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the variables that pinning sets taken back after the test."""
    for name in (CUDA.visible, *CUDA.environment, *CUDA.split_environment):
        monkeypatch.setenv(name, "as it was")


def test_share_of_the_memory_is_bounded_on_the_device_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
):
    bounds: list[tuple[float, str]] = []
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda fraction, device: bounds.append((fraction, str(device))),
    )
    keep_environment(monkeypatch)
    group = Placement(
        devices=("cuda:0", "cuda:1"),
        split="pipeline",
        visible=("GPU-a", "GPU-b"),
        num_threads=torch.get_num_threads(),
        memory_fraction=0.4,
    )
    pin(group.for_rank(1))
    assert bounds == [(0.4, "cuda:1")]


def test_ranks_of_a_split_replica_load_all_kernels_before_one_of_them_waits_for_another(
    monkeypatch: pytest.MonkeyPatch,
):
    keep_environment(monkeypatch)
    alone = Placement(devices=("cuda:0",), visible=("GPU-a",), num_threads=torch.get_num_threads())
    pin(alone)
    assert os.environ["CUDA_MODULE_LOADING"] == "as it was"
    pair = Placement(
        devices=("cuda:0", "cuda:1"),
        split="tensor",
        visible=("GPU-a", "GPU-b"),
        num_threads=torch.get_num_threads(),
    )
    pin(pair.for_rank(1))
    assert os.environ["CUDA_MODULE_LOADING"] == "EAGER"
