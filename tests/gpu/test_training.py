"""`inferpool train` on a device: bf16, pinned batches of readers, and the network served there."""

import pytest

from inferpool.models.files.run_folder import read_card
from tests.e2e import forked
from tests.e2e.running import running
from tests.run_folders import COLOURS, TINY, write_colours


@pytest.mark.slow
def test_a_network_is_trained_and_served_on_a_device(devices, tmp_path):
    for path, label in write_colours(tmp_path / "all", 40):
        folder = tmp_path / "colours" / label
        folder.mkdir(parents=True, exist_ok=True)
        path.rename(folder / path.name)
    run, device = tmp_path / "run", devices.named(0)
    done = forked.run(
        [
            *(*forked.COMMAND, "train", str(tmp_path / "colours")),
            *("--model", TINY, "--weights", "none", "--output", str(run)),
            *("--epochs", "6", "--learning-rate", "0.1", "--workers", "1", "--devices", device),
        ],
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    assert "in bf16" in done.stderr
    assert read_card(run).scores.accuracy == 1.0
    with running(str(run), "--devices", device, "--speed", "exact") as service:
        held_out = (run / "validation.csv").read_text().splitlines()[1:]
        for line in held_out[:6]:
            path, _, label = line.rpartition(",")
            with open(path, "rb") as file:
                answer = service.http.post(
                    f"{service.url}/predict",
                    content=file.read(),
                    headers={"Content-Type": "image/png"},
                )
            assert answer.json()["predictions"][0][0]["label"] == label
            assert label in COLOURS
