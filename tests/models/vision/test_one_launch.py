"""The kernel that makes a network's input of pictures: by Triton's interpreter, and compiled."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_kernel_is_at_most_one_level_off_pillow_for_any_sizes():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.vision.one_launch_check", "--num", "40"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_kernel_compiles_for_a_gpu(tmp_path, monkeypatch):
    """Triton's compiler refuses some of what its interpreter accepts. It needs no GPU for that."""
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from inferpool.models.vision import one_launch
    from inferpool.models.vision.picture_facts import REACHES

    kernel = one_launch._transform
    for interpolation, reach in REACHES.items():
        known = {
            "step_colour": 1,  # as in channels_last
            "FACTS": 14 if reach else 14 + 2 * 224,
            "FILTER": interpolation.value,
            "REACH": reach,
            "ROWS": one_launch._ROWS,
            "COLUMNS": one_launch._COLUMNS,
        }
        types = {"facts": "*i64", "normalization": "*fp32", "out": "*bf16"}
        signature = {
            name: "constexpr" if name in known else types.get(name, "i32")
            for name in kernel.arg_names
        }
        source = ASTSource(fn=kernel, signature=signature, constexprs=known)
        options = {"num_warps": 4, "enable_fp_fusion": False}
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert made.asm["cubin"]
