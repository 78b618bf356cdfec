"""The kernel that makes a network's input of pictures, by Triton's interpreter."""

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
