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
from multiprocessing import forkserver

import psutil
import pyarrow.parquet as pq
import pytest

from inferpool.models.vision.photos import sample_jpegs
from inferpool.service.tools.trial.processes import is_alive
from tests.e2e.broken_pictures import broken_pictures
from tests.e2e.running import FAULTY, ROOT, running
from tests.service.batch.test_sources import make_tar

_MODEL = "tests.small_classifier:SmallClassifier"
_TIMEOUT_S = 100.0
_NUMBERS = 300
_OWN_MODEL = """
from inferpool import Features, Model, TensorSpec


class Scale(Model):
    inputs = [TensorSpec(name="x", dtype="float32", shape=(-1, 3))]
    outputs = [TensorSpec(name="y", dtype="float32", shape=(-1, 3))]

    def forward(self, batch: Features) -> Features:
        return {"y": batch["x"] * 2}
"""


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


@pytest.fixture
def numbers(tmp_path):
    """Return arguments of a run over numbers that takes seconds, and kills workers once."""
    (tmp_path / "slow.toml").write_text(
        f'[models.slow]\nsource = "{FAULTY}"\noptions = {{ forward_s = 0.05 }}\n'
        "max_batch_size = 4\n"
    )
    rows = [{"n": number, "do": "kill" if number == 150 else "ok"} for number in range(_NUMBERS)]
    (tmp_path / "n.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return [tmp_path / "n.jsonl", "--config", tmp_path / "slow.toml"]


def command(*arguments, model=_MODEL):
    """Return the command line of a run."""
    own = ["--readers", "1", "--replicas", "1", *(["--model", model] if model else [])]
    return [sys.executable, "-m", "inferpool", "batch", *own, *map(str, arguments)]


def batch(*arguments, model=_MODEL, cwd=ROOT, env=None):
    """Run it to its end."""
    return subprocess.run(
        command(*arguments, model=model),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        cwd=cwd,
        env=env,
    )


def begin(*arguments, model=_MODEL):
    """Start it in a session of its own."""
    return subprocess.Popen(
        command(*arguments, model=model),
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )


def lines(path):
    """Return the answers in an output."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_for_lines(process, path, num):
    """Wait until so many answers are written, or the run is over."""
    until = time.monotonic() + _TIMEOUT_S
    while process.poll() is None:
        assert time.monotonic() < until
        with contextlib.suppress(FileNotFoundError):
            if path.read_bytes().count(b"\n") >= num:
                return
        time.sleep(0.005)


def family(process):
    """Return all processes of a run, which have its session."""
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if os.getsid(each.pid) == process.pid:
                found.append(each)
    return found


def wait_until_gone(processes):
    """Wait until none of some processes is left."""
    until = time.monotonic() + 60
    while left := [each for each in processes if is_alive(each)]:
        assert time.monotonic() < until, left
        time.sleep(0.05)


def readers_of(process):
    """Return the readers of a run: its grandchildren by the forkserver of `multiprocessing`."""
    return [
        reader
        for each in psutil.Process(process.pid).children()
        if f"from {forkserver.__name__}" in " ".join(each.cmdline())
        for reader in each.children()
    ]


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


def test_broken_pictures_of_every_kind_end_with_a_list(tmp_path):
    folder = tmp_path / "broken"
    folder.mkdir()
    for name, data in broken_pictures().items():
        (folder / name).write_bytes(data)
    (folder / "good.jpg").write_bytes(sample_jpegs()[0])
    done = batch(folder, "--output", tmp_path / "out.jsonl")
    assert done.returncode == 4, done.stderr
    answers = {each["input"]: each for each in lines(tmp_path / "out.jsonl")}
    assert answers.keys() == broken_pictures().keys() | {"good.jpg"}
    failed = {name for name, each in answers.items() if "error" in each}
    assert failed == broken_pictures().keys() - {"a jpeg.png"}  # which the content tells
    for name in failed:
        assert f"{name}: " in done.stderr
    assert "Traceback" not in done.stderr
    assert f"{len(answers)} of {len(answers)} done, {len(failed)} failed" in done.stderr


def test_max_errors_stops_and_resume_goes_on_to_parquet(photos, tmp_path):
    output = tmp_path / "out.parquet"
    done = batch(photos, "--output", output, "--max-errors", 1)
    assert done.returncode == 5, done.stderr
    assert not output.exists()
    assert "--resume and a larger --max-errors goes on" in done.stderr
    done = batch(photos, "--output", output, "--resume")
    assert done.returncode == 4, done.stderr
    assert "by an earlier run" in done.stderr
    assert pq.read_table(output)["index"].to_pylist() == list(range(93))


def test_texts_go_through_a_pool_in_free_order(tmp_path):
    table = tmp_path / "t.jsonl"
    table.write_text("".join(f'{{"x": {number}}}\n' for number in range(200)) + "no JSON\n")
    done = batch(table, "--column", "x", "--order", "free", "--quiet", model="echo")
    assert done.returncode == 4, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(each["index"] for each in answers) == list(range(201))
    assert [each["input"] for each in answers if "error" in each] == ["t.jsonl:201"]


def test_a_model_of_ones_own_computes_alone_from_the_folder_where_it_lies(tmp_path):
    (tmp_path / "nets.py").write_text(_OWN_MODEL)
    (tmp_path / "inferpool.toml").write_text(
        '[models.scale]\nsource = "nets:Scale"\n[models.broken]\nsource = "nets:None"\n'
    )
    files = [("1.json", b"[1, 2, 3]"), ("2.json", b"[1, 2]"), ("3.json", b'"text"')]
    make_tar(tmp_path / "n.tar", files)
    done = batch(
        "n.tar",
        model=None,
        cwd=tmp_path,
        env=os.environ | {"XDG_STATE_HOME": str(tmp_path / "state"), "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 4, done.stderr
    good, *bad = map(json.loads, done.stdout.splitlines())
    assert good["prediction"] == [2, 4, 6]
    assert [each["error"]["code"] for each in bad] == ["invalid_input"] * 2
    assert not (tmp_path / "state").exists(), "jobs are for the service of these settings"
    assert "broken" not in done.stderr


def test_a_model_that_cannot_be_had_ends_the_run_and_leaves_no_output(photos, tmp_path):
    done = batch(photos, "--output", tmp_path / "o.csv", model="tests.no_such:Model")
    assert done.returncode in (1, 2), done.stderr
    assert "Traceback" not in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["photos"]


def test_a_reader_of_stdout_that_leaves_ends_the_run(numbers):
    process = subprocess.Popen(
        command(*numbers, model=None), stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["index"] == 0
    process.stdout.close()
    _, errors = process.communicate(timeout=_TIMEOUT_S)
    assert process.returncode == 1
    assert b"Traceback" not in errors


def test_a_service_is_asked_by_its_url(photos, tmp_path):
    output = tmp_path / "out.csv"
    with running(_MODEL) as service:
        done = batch(photos, "--output", output, "--url", service.url, model="another")
        assert done.returncode == 1, done.stderr
        assert "no model is called" in done.stderr
        done = batch(photos, "--output", output, "--resume", "--url", service.url, model=None)
    assert done.returncode == 4, done.stderr
    assert "93 of 93 done, 3 failed" in done.stderr
    with output.open(newline="") as file:
        assert [int(row["index"]) for row in csv.DictReader(file)] == list(range(93))


def test_killed_workers_and_readers_and_an_input_that_kills_lose_no_answer(numbers, tmp_path):
    output = tmp_path / "out.jsonl"
    process = begin(*numbers, "--output", output, "--replicas", 2, model=None)
    wait_for_lines(process, output, 20)
    for reader in readers_of(process):
        reader.kill()
    wait_for_lines(process, output, 40)
    pids = {each["prediction"]["pid"] for each in lines(output)}
    assert len(pids) == 2, "both replicas compute"
    os.kill(pids.pop(), signal.SIGKILL)
    _, errors = process.communicate(timeout=_TIMEOUT_S)
    assert process.returncode == 4, errors
    answers = lines(output)
    assert [each["index"] for each in answers] == list(range(_NUMBERS))
    assert [each["index"] for each in answers if "error" in each] == [150]
    assert answers[150]["error"]["code"] in ("worker_crashed", "quarantined")
    assert all(
        each["prediction"]["twice"] == 2 * each["index"] for each in answers if "error" not in each
    )


def test_ctrl_c_tells_what_is_done_and_resume_goes_on_unless_the_input_has_changed(
    numbers, tmp_path
):
    output = tmp_path / "out.jsonl"
    process = begin(*numbers, "--output", output, model=None)
    wait_for_lines(process, output, 20)
    processes = family(process)
    readers_of(process)[0].suspend()  # nothing that hangs may hold it up
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=_TIMEOUT_S)
    assert process.returncode == 130, errors
    assert f"of {_NUMBERS} done, 0 failed" in errors
    assert "with --resume goes on" in errors
    assert "Traceback" not in errors
    wait_until_gone(processes)
    num_before = len(lines(output))
    assert 20 <= num_before < _NUMBERS
    table = numbers[0]
    whole = table.read_text()
    table.write_text(whole.replace('"n": 3,', '"n": 33,'))
    done = batch(*numbers, "--output", output, "--resume", model=None)
    assert done.returncode == 2, done.stderr
    assert "begun with other inputs" in done.stderr
    assert len(lines(output)) == num_before


def kill_and_resume(photos, output, num_kills, *more):
    """SIGKILL runs when a random number of lines is there, then let one end."""
    target = 0
    for _ in range(num_kills):
        target = min(80, target + random.randint(1, 80 // num_kills))
        process = begin(photos, "--output", output, "--resume", *more)
        wait_for_lines(process, output, target)
        time.sleep(random.random() / 100)
        processes = family(process)
        process.kill()
        process.communicate(timeout=_TIMEOUT_S)
        wait_until_gone(processes)
    done = batch(photos, "--output", output, "--resume", *more)
    assert done.returncode == 4, done.stderr
    assert sorted(each["index"] for each in lines(output)) == list(range(93))
    assert not output.with_name(f"{output.name}.resume").exists()


def test_no_line_is_missing_or_twice_and_no_process_left_after_two_kills(photos, tmp_path):
    kill_and_resume(photos, tmp_path / "out.jsonl", 2)
    answers = lines(tmp_path / "out.jsonl")
    assert [each["index"] for each in answers] == list(range(93))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_line_is_missing_or_twice_after_ten_kills(photos, tmp_path):
    kill_and_resume(photos, tmp_path / "out.jsonl", 10, "--order", "free")
