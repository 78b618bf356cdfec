import os
import subprocess

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from inferpool.models.errors import CheckpointError
from inferpool.workers.training.checkpoints import (
    Checkpoints,
    NoSpaceError,
    decoded,
    room_error,
)


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.getuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_the_newest_checkpoint_is_kept_with_the_best_weights_that_it_names(tmp_path):
    network = nn.Linear(2, 3)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.read() is None
    checkpoints.save_best(1, network)
    checkpoints.save(10, {"step": 10}, best_epoch=1)
    checkpoints.save_best(2, network)
    checkpoints.save_best(3, network)
    assert checkpoints.best(1).exists(), "a rank that is killed now goes on from step 10"
    assert not checkpoints.best(2).exists()
    checkpoints.save(20, {"step": 20}, best_epoch=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best-3.safetensors", "step-20.pt"]
    assert decoded(checkpoints.read())["step"] == Checkpoints(tmp_path).newest_step == 20
    assert torch.equal(load_file(checkpoints.best(3))["weight"], network.weight)


def test_a_full_disk_leaves_the_checkpoint_before(small_disk):
    checkpoints = Checkpoints(small_disk)
    checkpoints.save(1, {"step": 1}, best_epoch=0)
    with pytest.raises(NoSpaceError, match="No space left"):
        checkpoints.save(2, {"large": torch.zeros(1 << 20)}, best_epoch=0)
    with pytest.raises(NoSpaceError):
        checkpoints.save_best(1, nn.Linear(1024, 1024))
    assert [path.name for path in small_disk.iterdir()] == ["step-1.pt"]
    assert decoded(checkpoints.read()) == {"step": 1}


def test_too_little_room_is_said_with_the_figures(small_disk):
    assert "has room for" in room_error(small_disk, nn.Linear(8, 8), has_average=True)
    assert room_error(small_disk.parent, nn.Linear(8, 8), has_average=True) == ""


def test_a_checkpoint_runs_no_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "run"),)

    path = tmp_path / "step-1.pt"
    torch.save({"step": Evil()}, path)
    with pytest.raises(CheckpointError, match="is damaged"):
        decoded(path.read_bytes())
    assert not (tmp_path / "run").exists()
