"""`inferpool batch` as a user runs it: real photographs, broken files, and ends at any moment."""

import contextlib
import csv
import json
import os
import random
import signal
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import BytesIO, StringIO, TextIOWrapper
from multiprocessing import forkserver
from pathlib import Path
from subprocess import CompletedProcess

import psutil
import pyarrow.parquet as pq
import pytest

from inferpool.models.vision.photos import sample_jpegs
from inferpool.service.cli.main import run as run_command
from inferpool.workers.host.local import guest_forkserver
from tests.e2e import forked
from tests.e2e.broken_pictures import broken_pictures
from tests.e2e.running import ROOT, left_over, running, until
from tests.service.batch.test_sources import make_tar

_MODEL = "tests.small_classifier:SmallClassifier"
_TIMEOUT_S = 150.0
_NUMBERS = 300
_NUM_BEFORE_GATE = 100
_DEADLY = 150
_OWN_MODEL = """
from inferpool import Features, Model, TensorSpec


class Scale(Model):
    inputs = [TensorSpec(name="x", dtype="float32", shape=(-1, 3))]
    outputs = [TensorSpec(name="y", dtype="float32", shape=(-1, 3))]

    def forward(self, batch: Features) -> Features:
        return {"y": batch["x"] * 2}
"""


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Return a folder of photographs with two labels, some of them broken."""
    folder, jpegs = tmp_path_factory.mktemp("photos"), sample_jpegs()
    for number, data in enumerate((jpegs * 9)[:90]):
        path = folder / f"label {number % 2}" / f"{number:03}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    (folder / "label 0" / "cut.jpg").write_bytes(jpegs[0][:3000])
    (folder / "label 1" / "junk.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(99))
    (folder / "label 1" / "empty.gif").write_bytes(b"")
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """A run over numbers that stays before its middle until its gate is opened."""

    table: Path
    words: Sequence[object]
    gate: Path


@pytest.fixture
def numbers(tmp_path):
    """Return numbers one of which kills its worker."""
    table, settings, gate = (tmp_path / name for name in ("n.jsonl", "slow.toml", "gate"))
    gate.touch()
    open_to_all = tmp_path / "config.properties"  # a service would not start with it
    open_to_all.write_text("management_address=http://0.0.0.0:0\n")
    settings.write_text(
        f'torchserve = "{open_to_all}"\n'
        '[models.slow]\nsource = "tests.fault_model:GatedModel"\nmax_batch_size = 4\n'
        "batch_timeout_s = 100\n"
        f'options = {{ gate = "{gate}" }}\n'
    )
    acts = dict.fromkeys(range(_NUMBERS), "ok") | {_NUM_BEFORE_GATE: "wait", _DEADLY: "kill"}
    rows = [{"n": number, "do": act} for number, act in acts.items()]
    table.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return Numbers(table=table, words=[table, "--config", settings], gate=gate)


@pytest.fixture(scope="module")
def workers() -> Iterator[None]:
    """Fork the workers of all runs in this process from one that has imported torch."""
    with guest_forkserver():
        yield


@pytest.fixture
def batch(workers, monkeypatch):
    """Return a function that does a run in this process."""

    def batch(*arguments, model=_MODEL):
        words = words_of(*arguments, model=model)
        stdout = TextIOWrapper(BytesIO(), "utf-8")
        with redirect_stdout(stdout), redirect_stderr(StringIO()) as stderr:
            status = run_command(words)
        stdout.seek(0)
        return CompletedProcess(words, status, stdout.read(), stderr.getvalue())

    monkeypatch.chdir(ROOT)
    return batch


def words_of(*arguments, model=_MODEL):
    """Return the words of a run that reads in its own process, unless it is given readers."""
    own = ["--readers", "0", "--replicas", "1", *(["--model", model] if model else [])]
    return ["batch", *own, *map(str, arguments)]


def begin(*arguments, model=_MODEL, **options):
    """Start it as a process, in a session of its own."""
    return forked.popen(
        [*forked.COMMAND, *words_of(*arguments, model=model)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **{"cwd": ROOT, **options},
    )


def lines(path):
    """Return the answers in an output that are written to their end."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def num_lines(path):
    """Return how many answers are written."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_lines(process, path, num):
    """Wait until so many answers are written, or the run is over."""
    until(lambda: num_lines(path) >= num or process.poll() is not None, _TIMEOUT_S)


def family(process):
    """Return all processes of a run, which have its session."""
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if os.getsid(each.pid) == process.pid:
                found.append(each)
    return found


def readers_of(process):
    """Return the readers of a run: its grandchildren by the forkserver of `multiprocessing`."""
    return [
        reader
        for each in psutil.Process(process.pid).children()
        if f"from {forkserver.__name__}" in " ".join(each.cmdline())
        for reader in each.children()
    ]


def test_a_folder_with_broken_files_ends_with_a_list_and_a_confusion_matrix(
    batch, photos, tmp_path
):
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


def test_broken_pictures_of_every_kind_end_with_a_list(batch, tmp_path):
    folder = tmp_path / "broken"
    folder.mkdir()
    for name, data in broken_pictures().items():
        (folder / name).write_bytes(data)
    (folder / "good.jpg").write_bytes(sample_jpegs()[0])
    done = batch(folder, "--output", tmp_path / "out.jsonl", "--readers", 1)
    assert done.returncode == 4, done.stderr
    answers = {each["input"]: each for each in lines(tmp_path / "out.jsonl")}
    assert answers.keys() == broken_pictures().keys() | {"good.jpg"}
    failed = {name for name, each in answers.items() if "error" in each}
    assert failed == broken_pictures().keys() - {"a jpeg.png"}  # which the content tells
    for name in failed:
        assert f"{name}: " in done.stderr
    assert "Traceback" not in done.stderr
    assert f"{len(answers)} of {len(answers)} done, {len(failed)} failed" in done.stderr


def test_max_errors_stops_and_resume_goes_on_to_parquet(batch, photos, tmp_path):
    output = tmp_path / "out.parquet"
    done = batch(photos, "--output", output, "--max-errors", 1)
    assert done.returncode == 5, done.stderr
    assert not output.exists()
    assert "--resume and a larger --max-errors goes on" in done.stderr
    done = batch(photos, "--output", output, "--resume")
    assert done.returncode == 4, done.stderr
    assert "by an earlier run" in done.stderr
    assert pq.read_table(output)["index"].to_pylist() == list(range(93))


def test_texts_go_through_a_pool_in_free_order(batch, tmp_path):
    table = tmp_path / "t.jsonl"
    table.write_text("".join(f'{{"x": {number}}}\n' for number in range(200)) + "no JSON\n")
    done = batch(table, "--column", "x", "--order", "free", "--quiet", model="echo")
    assert done.returncode == 4, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted(each["index"] for each in answers) == list(range(201))
    assert [each["input"] for each in answers if "error" in each] == ["t.jsonl:201"]


@pytest.mark.slow
def test_a_model_of_ones_own_computes_alone_from_the_folder_where_it_lies(tmp_path):
    (tmp_path / "nets.py").write_text(_OWN_MODEL)
    (tmp_path / "inferpool.toml").write_text(
        '[models.scale]\nsource = "nets:Scale"\n[models.broken]\nsource = "nets:None"\n'
    )
    files = [("1.json", b"[1, 2, 3]"), ("2.json", b"[1, 2]"), ("3.json", b'"text"')]
    make_tar(tmp_path / "n.tar", files)
    process = begin(
        "n.tar",
        model=None,
        cwd=tmp_path,
        env=os.environ | {"XDG_STATE_HOME": str(tmp_path / "state"), "PYTHONPATH": str(ROOT)},
    )
    output, errors = process.communicate(timeout=_TIMEOUT_S)
    assert process.returncode == 4, errors
    good, *bad = map(json.loads, output.splitlines())
    assert good["prediction"] == [2, 4, 6]
    assert [each["error"]["code"] for each in bad] == ["invalid_input"] * 2
    assert not (tmp_path / "state").exists(), "jobs are for the service of these settings"
    assert "broken" not in errors


def test_a_model_that_cannot_be_had_ends_the_run_and_leaves_no_output(batch, photos, tmp_path):
    done = batch(photos, "--output", tmp_path / "o.csv", model="tests.no_such:Model")
    assert done.returncode in (1, 2), done.stderr
    assert "Traceback" not in done.stderr
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_a_reader_of_stdout_that_leaves_ends_the_run(numbers):
    process = begin(*numbers.words, model=None)
    assert json.loads(process.stdout.readline())["index"] == 0
    process.stdout.close()
    numbers.gate.unlink()
    errors = process.stderr.read()
    assert process.wait(_TIMEOUT_S) == 1
    assert "Traceback" not in errors
    process.stderr.close()


def test_a_service_is_asked_by_its_url(batch, photos, tmp_path):
    output = tmp_path / "out.csv"
    with running(_MODEL, "--replicas", "1") as service:
        done = batch(photos, "--output", output, "--url", service.url, model="another")
        assert done.returncode == 1, done.stderr
        assert "no model is called" in done.stderr
        done = batch(photos, "--output", output, "--resume", "--url", service.url, model=None)
    assert done.returncode == 4, done.stderr
    assert "93 of 93 done, 3 failed" in done.stderr
    with output.open(newline="") as file:
        assert [int(row["index"]) for row in csv.DictReader(file)] == list(range(93))


def test_a_killed_worker_and_an_input_that_kills_lose_no_answer(batch, numbers, tmp_path):
    output = tmp_path / "out.jsonl"
    table = numbers.table.read_text()
    numbers.table.write_text(table.replace('"n": 4, "do": "ok"', '"n": 4, "do": "wait"'))

    def kill():
        try:
            until(lambda: num_lines(output) >= 40, _TIMEOUT_S)  # by one replica: the other waits
            os.kill(lines(output)[-1]["prediction"]["pid"], signal.SIGKILL)
        finally:
            numbers.gate.unlink()

    with ThreadPoolExecutor(1) as threads:
        killing = threads.submit(kill)
        words = ["--output", output, "--order", "free", "--replicas", 2]
        done = batch(*numbers.words, *words, model=None)
        killing.result()
    assert done.returncode == 4, done.stderr
    check_answers(output)


def check_answers(output):
    """Check that the numbers have their answers."""
    answers = sorted(lines(output), key=lambda each: each["index"])
    assert [each["index"] for each in answers] == list(range(_NUMBERS))
    assert [each["index"] for each in answers if "error" in each] == [_DEADLY]
    assert answers[_DEADLY]["error"]["code"] in ("worker_crashed", "quarantined")
    assert all(
        each["prediction"]["twice"] == 2 * each["index"] for each in answers if "error" not in each
    )


@pytest.mark.slow
def test_ctrl_c_tells_what_is_done_and_resume_goes_on_unless_the_input_has_changed(
    batch, numbers, tmp_path
):
    output = tmp_path / "out.jsonl"
    process = begin(*numbers.words, "--output", output, "--readers", 1, model=None)
    wait_for_lines(process, output, 20)
    processes = family(process)
    (reader,) = readers_of(process)
    reader.suspend()  # nothing that hangs may hold it up
    os.killpg(process.pid, signal.SIGINT)
    numbers.gate.unlink()
    _, errors = process.communicate(timeout=_TIMEOUT_S)
    assert process.returncode == 130, errors
    assert f"of {_NUMBERS} done, 0 failed" in errors
    assert "with --resume goes on" in errors
    assert "Traceback" not in errors
    assert not left_over(processes, 60)
    num_before = len(lines(output))
    assert 20 <= num_before < _NUMBERS
    whole = numbers.table.read_text()
    numbers.table.write_text(whole.replace('"n": 3,', '"n": 33,'))
    done = batch(*numbers.words, "--output", output, "--resume", model=None)
    assert done.returncode == 2, done.stderr
    assert "begun with other inputs" in done.stderr
    assert len(lines(output)) == num_before


@pytest.mark.slow
def test_no_line_is_missing_or_twice_and_no_process_left_after_a_kill(batch, numbers, tmp_path):
    output = tmp_path / "out.jsonl"
    words = [*numbers.words, "--output", output, "--resume"]
    process = begin(*words, "--readers", 1, model=None)
    wait_for_lines(process, output, random.randint(1, _NUM_BEFORE_GATE - 10))
    processes = family(process)
    process.kill()
    process.communicate(timeout=_TIMEOUT_S)
    assert not left_over(processes, 60)
    numbers.gate.unlink()
    done = batch(*words, model=None)
    assert done.returncode == 4, done.stderr
    assert "by an earlier run" in done.stderr
    check_answers(output)
    assert not output.with_name(f"{output.name}.resume").exists()
