"""`inferpool batch` as a user runs it: real photographs, broken files, and ends at any moment."""

import contextlib
import csv
import json
import os
import random
import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest

from inferpool.models.vision.photos import sample_jpegs
from tests.e2e.running import ROOT, running

_MODEL = "tests.small_classifier:SmallClassifier"
_TIMEOUT_S = 100.0


@pytest.fixture
def photos(tmp_path):
    """Return a folder of photographs with two labels, some of them broken."""
    folder = tmp_path / "photos"
    for number, data in enumerate((sample_jpegs() * 9)[:90]):
        path = folder / f"label {number % 2}" / f"{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (folder / "label 0" / "cut.jpg").write_bytes(sample_jpegs()[0][:3000])
    (folder / "label 1" / "junk.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(99))
    (folder / "label 1" / "empty.gif").write_bytes(b"")
    return folder


def command(*arguments, model=_MODEL):
    """Return the command line of a run."""
    own = ["--readers", "1", "--replicas", "1", "--model", model]
    return [sys.executable, "-m", "inferpool", "batch", *map(str, arguments), *own]


def batch(*arguments, **options):
    """Run it to its end."""
    return subprocess.run(
        command(*arguments, **options), capture_output=True, text=True, timeout=_TIMEOUT_S, cwd=ROOT
    )


def lines(path):
    """Return the answers in an output."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_folder_with_broken_files_ends_with_a_list_and_a_confusion_matrix(photos, tmp_path):
    output = tmp_path / "out.jsonl"
    done = batch(photos, "--output", output)
    assert done.returncode == 4, done.stderr
    answers = lines(output)
    assert [each["index"] for each in answers] == list(range(93))
    assert [each["input"] for each in answers] == sorted(each["input"] for each in answers)
    failed = {each["input"] for each in answers if "error" in each}
    assert failed == {"label 0/cut.jpg", "label 1/empty.gif", "label 1/junk.png"}
    for name in failed:
        assert f"{name}: " in done.stderr
    right = sum(
        each["prediction"][0]["label"] == each["label"] for each in answers if "error" not in each
    )
    assert f"accuracy {right / 90:.2%}, top-5" in done.stderr
    assert "others" in done.stderr
    assert "93 of 93 done, 3 failed" in done.stderr


def test_max_errors_stops_and_resume_goes_on_to_parquet(photos, tmp_path):
    output = tmp_path / "out.parquet"
    done = batch(photos, "--output", output, "--max-errors", 1)
    assert done.returncode == 5, done.stderr
    assert not output.exists()
    done = batch(photos, "--output", output, "--resume")
    assert done.returncode == 4, done.stderr
    assert "by an earlier run" in done.stderr
    assert pq.read_table(output)["index"].to_pylist() == list(range(93))
    again = batch(photos, "--output", output, "--resume")  # nothing is left to do
    assert "(93 by an earlier run)" in again.stderr


def test_texts_go_through_a_pool_in_free_order(tmp_path):
    table = tmp_path / "t.jsonl"
    table.write_text("".join(f'{{"x": {number}}}\n' for number in range(200)) + "no JSON\n")
    done = batch(table, "--column", "x", "--order", "free", "--quiet", model="echo")
    assert done.returncode == 4, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(each["index"] for each in answers) == list(range(201))
    assert [each["input"] for each in answers if "error" in each] == ["t.jsonl:201"]


def test_a_model_that_cannot_be_had_ends_the_run(photos, tmp_path):
    done = batch(photos, "--output", tmp_path / "o.csv", model="tests.no_such:Model")
    assert done.returncode in (1, 2), done.stderr
    assert "Traceback" not in done.stderr


def test_a_service_is_asked_by_its_url(photos, tmp_path):
    output = tmp_path / "out.csv"
    with running(_MODEL) as service:
        done = batch(photos, "--output", output, "--url", service.url, model="another")
        assert done.returncode == 1, done.stderr
        assert "no model is called" in done.stderr
        asked = command(photos, "--output", output, "--resume")[:-2]
        done = subprocess.run(
            [*asked, "--url", service.url],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            cwd=ROOT,
        )
    assert done.returncode == 4, done.stderr
    assert "93 of 93 done, 3 failed" in done.stderr
    with output.open(newline="") as file:
        assert [int(row["index"]) for row in csv.DictReader(file)] == list(range(93))


def kill_and_resume(photos, output, num_kills, *more):
    """SIGKILL runs when a random number of lines is there, then let one end."""
    target = 0
    for _ in range(num_kills):
        target = min(80, target + random.randint(1, 80 // num_kills))
        process = subprocess.Popen(
            command(photos, "--output", output, "--resume", *more),
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        until = time.monotonic() + _TIMEOUT_S
        while process.poll() is None and time.monotonic() < until:
            with contextlib.suppress(FileNotFoundError):
                if output.read_bytes().count(b"\n") >= target:
                    break
            time.sleep(random.random() / 100)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    done = batch(photos, "--output", output, "--resume", *more)
    assert done.returncode == 4, done.stderr
    assert [each["index"] for each in sorted(lines(output), key=lambda each: each["index"])] == (
        list(range(93))
    )


def test_no_line_is_missing_or_twice_after_two_kills(photos, tmp_path):
    kill_and_resume(photos, tmp_path / "out.jsonl", 2)
    answers = lines(tmp_path / "out.jsonl")
    assert [each["index"] for each in answers] == list(range(93))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_no_line_is_missing_or_twice_after_ten_kills(photos, tmp_path):
    kill_and_resume(photos, tmp_path / "out.jsonl", 10, "--order", "free")
