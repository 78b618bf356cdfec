"""Float32 on GPUs: as it is with `exact`, rounded to TF32 where a preset says so."""

import subprocess
import sys

import pytest
import torch

from inferpool.models.accelerator.device import has_tf32, tf32, use_float32

PINNED = """
import torch
from inferpool.models.accelerator.device import has_tf32
from inferpool.models.spec import Placement
from inferpool.workers.inside.own_process import pin

assert has_tf32()
pin(Placement(devices=("cpu",)))
assert not has_tf32()
assert not torch.backends.cudnn.allow_tf32
assert torch.backends.cudnn.conv.fp32_precision != "tf32"
with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
    assert torch.get_float32_matmul_precision() == "highest"
torch.backends.cudnn.conv.fp32_precision = "tf32"  # a model asks for it when it is loaded
assert has_tf32()
print("float32")
"""


@pytest.fixture
def float32():
    use_float32()
    yield
    torch.backends.cudnn.allow_tf32 = True


@pytest.mark.slow
def test_a_worker_computes_float32_before_any_model_is_loaded_and_leaves_all_switches_usable():
    # Pinning is for a process of its own.
    found = subprocess.run([sys.executable, "-c", PINNED], capture_output=True, text=True)
    assert found.stdout == "float32\n", found.stderr


def test_rounding_ends_with_the_block_also_after_an_error(float32):
    def fail():
        with tf32():
            assert torch.backends.cudnn.conv.fp32_precision == "tf32"
            assert torch.backends.cuda.matmul.fp32_precision == "tf32"
            raise ValueError("in it")

    with pytest.raises(ValueError, match="in it"):
        fail()
    assert not has_tf32()
