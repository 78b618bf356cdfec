"""`inferpool train` as a user runs it: digits, kills, stops, broken images, and the service."""

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from inferpool.models.files.run_folder import RunFolder, read_card
from tests.e2e.running import ROOT
from tests.ports import free_port
from tests.training_network import TINY, write_digits

_TIMEOUT_S = 150.0


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return write_digits(tmp_path_factory.mktemp("digits"))


def train(*words: object, check: int | None = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(*words), cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert check is None or done.returncode == check, done.stderr
    return done


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "inferpool", "train", *map(str, words)]


def small(digits: Path, output: Path, *, epochs: int = 4) -> list[object]:
    """Return arguments of a run of seconds."""
    words = [digits, "--model", TINY, "--weights", "none", "--output", output, "--epochs", epochs]
    return [*words, "--threads", 1, "--priority", "normal", "--image-size", 32]


def events(run: Path) -> list[dict[str, object]]:
    path = RunFolder(run).metrics
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def last_step(run: Path) -> int:
    return max((int(str(event["step"])) for event in events(run)), default=0)


def wait_for(run: Path, process: subprocess.Popen[bytes], step: int) -> None:
    """Wait until a run has taken so many steps, with checkpoints from the first on."""
    until = time.monotonic() + _TIMEOUT_S
    while last_step(run) < step:
        assert process.poll() is None, "it has ended early"
        assert time.monotonic() < until
        time.sleep(0.05)


def predictions(run: Path) -> list[dict[str, str]]:
    with RunFolder(run).predictions.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_is_served_with_the_accuracy_that_it_was_judged_with(digits, tmp_path):
    run = tmp_path / "run"
    done = train(*small(digits, run, epochs=12))
    card = read_card(run)
    assert card.scores.accuracy > 0.9, done.stderr
    assert card.scores.num_images == card.data.num_validation == 120
    assert "held out, 10 labels (digits: not mirrored)" in done.stderr
    assert "inferpool serve" in done.stdout
    assert RunFolder(run).report.read_text().startswith("<!doctype html>")
    assert [*RunFolder(run).tensorboard.glob("events.*")]
    assert not RunFolder(run).checkpoints.exists()
    assert events(run)[-1]["status"] == "done"

    listed = tmp_path / "held_out.txt"
    answers = predictions(run)
    listed.write_text("".join(f"{answer['path']}\n" for answer in answers))
    out = tmp_path / "served.jsonl"
    batch = [sys.executable, "-m", "inferpool", "batch", listed, "--model", run]
    subprocess.run(
        [*batch, "--speed", "exact", "--output", out, "--quiet"], cwd=ROOT, check=True, timeout=170
    )
    served = [json.loads(line)["prediction"][0] for line in out.read_text().splitlines()]
    assert [each["label"] for each in served] == [answer["predicted"] for answer in answers]
    for each, answer in zip(served, answers, strict=True):
        assert each["score"] == pytest.approx(float(answer["score"]), abs=1e-5)

    again = train(*small(digits, run), check=2)
    assert "--resume goes on with it, --overwrite begins anew" in again.stderr
    assert "has ended" in train("--output", run, "--resume", check=2).stderr


def test_a_stopped_run_goes_on_to_the_same_weights_bit_for_bit(digits, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(*small(digits, whole), "--quiet")
    process = subprocess.Popen(command(*small(digits, parts), "--quiet"), cwd=ROOT)
    wait_for(parts, process, 10)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert not RunFolder(parts).card.exists()
    assert events(parts)[-1]["status"] == "stopped"
    train("--output", parts, "--resume", "--quiet")
    assert RunFolder(whole).weights.read_bytes() == RunFolder(parts).weights.read_bytes()
    assert predictions(whole) == predictions(parts)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_survives_kills_of_its_ranks_with_the_same_accuracy(digits, tmp_path, num_ranks):
    calm, shot = tmp_path / "calm", tmp_path / "shot"
    words = ["--processes", num_ranks, "--checkpoint-minutes", 0.01, "--quiet"]
    train(*small(digits, calm, epochs=30), *words)
    process = subprocess.Popen(command(*small(digits, shot, epochs=30), *words), cwd=ROOT)
    chance = random.Random(7)
    step = 0
    for _ in range(3):
        step += chance.randrange(20, 120)
        wait_for(shot, process, step)
        ranks = psutil.Process(process.pid).children()
        victim = chance.choice([each for each in ranks if "training.rank" in str(each.cmdline())])
        victim.kill()
    assert process.wait(_TIMEOUT_S) == 0
    assert sum("SIGKILL" in str(event.get("text")) for event in events(shot)) == 3
    assert predictions(shot) == predictions(calm)


def test_two_processes_give_the_gradients_of_one(digits, tmp_path):
    for num_ranks in (1, 2):
        subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", str(num_ranks), "-m", "tests.workers.training.gradients"),
                *(str(digits), str(tmp_path / f"{num_ranks}.pt")),
            ],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=True,
            timeout=170,
        )
    one, two = (torch.load(tmp_path / f"{num}.pt", weights_only=True) for num in (1, 2))
    assert one.keys() == two.keys()
    for name, gradient in one.items():
        assert gradient.dtype == torch.float64
        largest = gradient.abs().max()
        assert largest > 0, name
        torch.testing.assert_close(two[name], gradient, rtol=0, atol=1e-6 * float(largest))


def test_broken_images_are_left_out_and_listed(tmp_path):
    digits, run = write_digits(tmp_path / "digits", 300), tmp_path / "run"
    every = sorted(digits.rglob("*.png"))
    broken = every[::20]
    for path in broken:
        path.write_bytes(path.read_bytes()[:60])
    done = train(*small(digits, run, epochs=2))
    with RunFolder(run).skipped.open(newline="") as file:
        skipped = {row["path"]: row["reason"] for row in csv.DictReader(file)}
    assert skipped.keys() == {str(path) for path in broken}
    assert all(skipped.values())
    assert f"{len(broken)} images could not be read" in done.stdout
    assert read_card(run).data.num_skipped == len(broken)
    assert not {str(path) for path in broken} & {answer["path"] for answer in predictions(run)}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_loss_of_nan_ends_the_run_with_the_batch_kept(digits, tmp_path, num_ranks):
    run = tmp_path / "run"
    words = ["--options", "nan_at=5", "--processes", num_ranks, "--learning-rate", "0.001"]
    done = train(*small(digits, run), *words, check=1)
    reason = done.stderr.splitlines()[-1]
    assert "inferpool train: the loss is nan at step 5" in reason
    assert str(RunFolder(run).nan) in reason
    kept = torch.load(RunFolder(run).nan / "rank-0.pt", weights_only=True)
    assert kept["pixels"].shape == (len(kept["images"]), 3, 32, 32)
    assert all(Path(path).exists() for path in kept["images"])
    assert events(run)[-1]["status"] == "failed"


def test_a_network_that_raises_ends_the_run_at_once(digits, tmp_path):
    run = tmp_path / "run"
    done = train(*small(digits, run), "--options", "raise_at=3", check=1)
    assert done.stderr.endswith(
        "inferpool train: ValueError: this network is broken beyond repair\n"
    )
    assert 'raise ValueError("this network is broken' in done.stderr, "the traceback is shown"
    assert sum(event["event"] == "started" for event in events(run)) == 1


def test_only_one_process_trains_in_a_folder(digits, tmp_path):
    run = tmp_path / "run"
    process = subprocess.Popen(command(*small(digits, run, epochs=500), "--quiet"), cwd=ROOT)
    try:
        wait_for(run, process, 1)
        done = train("--output", run, "--resume", check=2)
        assert "another process trains there" in done.stderr
        ranks = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(ranks, timeout=20)
    assert not alive, "no rank outlives the command"


@pytest.mark.slow
def test_two_hosts_train_one_network_and_refuse_to_train_two(digits, tmp_path):
    def hosts(port, *odd):
        several = ["--nodes", 2, "--rdzv", f"127.0.0.1:{port}", "--quiet"]
        return [
            subprocess.Popen(
                command(*small(digits, tmp_path / f"{port}-{name}"), *several, *words),
                cwd=ROOT,
                stderr=subprocess.PIPE,
                text=True,
            )
            for name, words in (("a", ()), ("b", odd))
        ]

    def ends(processes):
        return [
            (process.communicate(timeout=_TIMEOUT_S)[1], process.returncode)
            for process in processes
        ]

    port = free_port()
    assert [status for _, status in ends(hosts(port))] == [0, 0]
    one, two = (RunFolder(tmp_path / f"{port}-{name}") for name in "ab")
    assert one.weights.read_bytes() == two.weights.read_bytes()
    assert predictions(one.path) == predictions(two.path)
    for error, status in ends(hosts(free_port(), "--seed", 3)):
        assert status == 1
        assert "the hosts do not train the same" in error


def test_a_wrong_command_leaves_the_run_that_it_would_have_replaced(digits, tmp_path):
    run = tmp_path / "run"
    train(*small(digits, run, epochs=1), "--quiet")
    before = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    for words in (
        [tmp_path / "nothing", "--output", run, "--overwrite"],
        [digits, "--output", run, "--overwrite", "--model", "torchvision:resnet81"],
        [digits, "--output", run, "--overwrite", "--devices", "cuda:77"],
        [digits, "--output", run, "--overwrite", "--weights", run, "--model", TINY],
        [digits, "--output", run],
        [digits, "--output", digits],
    ):
        done = train(*words, check=2)
        assert len(done.stderr.splitlines()) <= 2, done.stderr
    assert {path: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
