from pathlib import Path

import pytest

from inferpool.workers.host.mps import is_mps_running


@pytest.mark.parametrize(
    ("files", "runs"),
    [
        ({}, False),
        ({"mps/control": ""}, False),  # its socket stays when it ends
        ({"mps/control": "", "mps/nvidia-cuda-mps-control.pid": "7\n"}, True),  # elsewhere
        (
            {"mps/control": "", "mps/nvidia-cuda-mps-control.pid": "7", "proc/7/comm": "bash"},
            False,
        ),
        (
            {
                "mps/control": "",
                "mps/nvidia-cuda-mps-control.pid": "7",
                "proc/7/comm": "nvidia-cuda-mps",
            },
            True,
        ),
        ({"mps/nvidia-cuda-mps-control.pid": "7", "proc/7/comm": "nvidia-cuda-mps"}, False),
        ({"mps/control": "", "mps/nvidia-cuda-mps-control.pid": "?"}, False),
    ],
)
def test_service_runs_where_its_socket_and_its_process_are(
    tmp_path: Path, files: dict[str, str], runs: bool
):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert is_mps_running(tmp_path / "mps", tmp_path / "proc") == runs
