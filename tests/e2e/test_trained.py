"""A training run's folder that is served, and swapped for another one."""

from pathlib import Path

import pytest

from inferpool.service.cli.main import run
from tests.e2e.running import Running, running
from tests.e2e.swapping import ADMIN, KEYS
from tests.run_folders import COLOURS, TINY, colour_weights, write_colours, write_run

QUICK = ("--wait-s", "0", "--rollback-s", "0", "--max-latency-ratio", "1000")
"""A network that computes nothing is timed by chance."""


def labels_of(service: Running, images: list[tuple[Path, str]]) -> list[str]:
    """Return the best label of each image."""
    found = []
    for path, _ in images:
        answer = service.post(content=path.read_bytes(), headers={"Content-Type": "image/png"})
        assert answer.status_code == 200, answer.text
        best = answer.json()["predictions"][0][0]
        assert list(COLOURS)[best["index"]] == best["label"]
        found.append(best["label"])
    return found


@pytest.mark.slow
def test_a_run_is_served_and_swapped_only_for_one_that_is_no_worse(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("INFERPOOL_ADMIN_KEYS", ADMIN)
    held_out = write_colours(tmp_path / "images")
    truth = [label for _, label in held_out]
    runs = [
        write_run(
            tmp_path / f"colours-{wrong}",
            model=TINY,
            weights=colour_weights(num_wrong=wrong),
            validation=held_out,
        )
        for wrong in range(3)
    ]
    with running(str(runs[1]), "--front-ends", "1", "--replicas", "1", env=KEYS) as service:

        def swap(folder: Path) -> tuple[int, str]:
            arguments = ("swap", "colours-1", str(folder), *QUICK, "--url", service.url)
            status = run(["models", *arguments])
            return status, "".join(capsys.readouterr())

        found = labels_of(service, held_out)
        assert [a == b for a, b in zip(found, truth, strict=True)] == [True] * 16 + [False] * 8
        status, said = swap(runs[2])
        assert status == 1, said
        assert "accuracy 33.33%, accuracy before 66.67%, validated on 24 inputs" in said
        status, said = swap(runs[0])
        assert status == 0, said
        assert "accuracy 100.00%, accuracy before 66.67%" in said
        assert labels_of(service, held_out) == truth
        (runs[2] / "card.json").unlink()
        status, said = swap(runs[2])
        assert status == 2
        assert "has not ended" in said
        assert labels_of(service, held_out) == truth


def test_a_damaged_run_ends_the_start_with_the_name_of_its_file(tmp_path):
    folder = write_run(tmp_path / "run", model=TINY)
    (folder / "labels.txt").unlink()
    with (
        pytest.raises(AssertionError, match=r"labels\.txt"),
        running(str(folder), "--front-ends", "1", "--replicas", "1"),
    ):
        pass
