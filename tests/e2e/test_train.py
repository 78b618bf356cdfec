"""`inferpool train` as a user runs it: digits, kills, stops, broken images, and the service."""

import contextlib
import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
from torch.distributed.launcher.api import LaunchConfig

from inferpool import testing
from inferpool.models.files.run_folder import RunFolder, read_card
from inferpool.service.cli.main import run as run_command
from inferpool.workers.training import launch
from inferpool.workers.training.group import RankPlace
from tests.e2e.running import ROOT, left_over, until
from tests.forked_ranks import launch_forked, start_command, train_forked
from tests.ports import free_port
from tests.training_network import TINY, write_digits
from tests.workers.training.gradients import gradients, write_gradients

_TIMEOUT_S = 150.0
_NUM_BROKEN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a command wrote."""

    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of digits, some of them broken."""
    folder = write_digits(tmp_path_factory.mktemp("digits"))
    for path in broken_among(folder):
        path.write_bytes(path.read_bytes()[:60])
    return folder


def broken_among(digits: Path) -> list[Path]:
    every = sorted(digits.rglob("*.png"))
    return every[:: len(every) // _NUM_BROKEN][:_NUM_BROKEN]


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """Let ranks import from the tests, and undo what commands in this process leave behind."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with mock.patch.dict(os.environ, {"PYTHONPATH": path}):
        yield


@pytest.fixture(scope="module")
def whole(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Written]:
    """Return a run that nothing has disturbed, and what its command wrote."""
    run = tmp_path_factory.mktemp("whole") / "run"
    return run, train(*small(digits, run))


def train(*words: object, status: int = 0) -> Written:
    """Run the command in this process, with ranks that import nothing."""
    with (
        mock.patch.object(launch, "launch_agent", train_forked),
        redirect_stdout(StringIO()) as stdout,
        redirect_stderr(StringIO()) as stderr,
    ):
        assert run_command(["train", *map(str, words)]) == status, stderr.getvalue()
    return Written(stdout=stdout.getvalue(), stderr=stderr.getvalue())


def forked_ranks() -> list[psutil.Process]:
    """Return what forkservers of this process have forked: ranks, and what other tests have."""
    servers = psutil.Process().children()
    ranks = [each for server in servers for each in server.children()]
    return [each for each in ranks if each.status() != psutil.STATUS_ZOMBIE]


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


def has_taken(run: Path, step: int) -> bool:
    return last_step(run) >= step


def start_of(run: Path) -> int:
    """Return the step at which its ranks were started the last time."""
    return [int(str(event["step"])) for event in events(run) if event["event"] == "started"][-1]


def num_starts(run: Path) -> int:
    return sum(event["event"] == "started" for event in events(run))


def wait_for_start(run: Path, num_kills: int) -> None:
    """Wait until the ranks have started again after this number of kills."""

    def has_started() -> bool:
        found = events(run)
        deaths = [number for number, event in enumerate(found) if is_death(event)]
        since = found[deaths[-1] :] if deaths else found
        return len(deaths) == num_kills and any(each["event"] == "started" for each in since)

    until(has_started, _TIMEOUT_S)


def is_death(event: dict[str, object]) -> bool:
    """Return whether it tells of a rank that was killed, or that another has lost it."""
    return "of this host died (" in str(event.get("text"))


def is_rank(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return "inferpool.workers.training.rank" in process.cmdline()
    return False


def predictions(run: Path) -> list[dict[str, str]]:
    with RunFolder(run).predictions.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_a_run_is_served_with_the_accuracy_that_it_was_judged_with(whole):
    run, written = whole
    card = read_card(run)
    assert card.scores.accuracy > 0.8, written.stderr
    assert card.data.num_validation == 120
    assert "held out, 10 labels (digits: not mirrored)" in written.stderr
    assert "inferpool serve" in written.stdout
    assert RunFolder(run).report.read_text().startswith("<!doctype html>")
    assert [*RunFolder(run).tensorboard.glob("events.*")]
    assert not RunFolder(run).checkpoints.exists()
    assert events(run)[-1]["status"] == "done"

    answers = predictions(run)
    assert card.scores.num_images == len(answers)
    with testing.client(str(run)) as client:
        served = client.predict_many([Path(answer["path"]) for answer in answers])
        for each, answer in zip(served, answers, strict=True):
            assert each.top.label == answer["predicted"]
            assert each.top.score == pytest.approx(float(answer["score"]), abs=1e-5)


def test_broken_images_are_left_out_and_listed(digits, whole):
    run, written = whole
    broken = {str(path) for path in broken_among(digits)}
    with RunFolder(run).skipped.open(newline="") as file:
        skipped = {row["path"]: row["reason"] for row in csv.DictReader(file)}
    assert skipped.keys() == broken
    assert all(skipped.values())
    assert f"{len(broken)} images could not be read" in written.stdout
    assert read_card(run).data.num_skipped == len(broken)
    assert not broken & {answer["path"] for answer in predictions(run)}


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_same_weights_bit_for_bit(digits, whole, tmp_path):
    parts, stop = tmp_path / "parts", tmp_path / "stop"
    stop.write_text(str(os.getpid()))
    options = ["--options", "stop_at=20", "--options", f"stop_file={stop}"]
    train(*small(digits, parts), "--quiet", *options, status=128 + signal.SIGTERM)
    assert not RunFolder(parts).card.exists()
    assert events(parts)[-1]["status"] == "stopped"
    assert events(parts)[-1]["step"] == 20
    train("--output", parts, "--resume", "--quiet")
    assert RunFolder(whole[0]).weights.read_bytes() == RunFolder(parts).weights.read_bytes()
    assert predictions(whole[0]) == predictions(parts)


@pytest.mark.slow
def test_a_run_survives_kills_of_its_ranks_with_the_same_predictions(tmp_path):
    digits, num_kills, passes = write_digits(tmp_path / "digits", 160), 3, 20
    calm, shot, kills = tmp_path / "calm", tmp_path / "shot", tmp_path / "kills"
    words: list[object] = ["--processes", 2, "--batch-size", 16, "--quiet"]
    words += ["--checkpoint-minutes", 0.0005]  # with nearly each step
    # Each start but the last one takes fewer steps than that before it is killed: 57 in all.
    words += ["--options", f"wait_at={passes}", "--options", f"wait_file={kills}"]
    kills.write_text("none")
    train(*small(digits, calm, epochs=12), *words)
    assert last_step(calm) == 96
    chance = random.Random(7)

    def kill() -> None:
        """Kill a rank of each start but the last one, while it trains or waits for that."""
        try:
            for number in range(num_kills):
                kills.write_text(str(number))
                wait_for_start(shot, number)
                # Its latest 8 steps may not be told yet while it waits.
                step = start_of(shot) + chance.randrange(passes - 8)
                until(partial(has_taken, shot, step), _TIMEOUT_S)
                time.sleep(chance.uniform(0, 0.2))
                chance.choice([each for each in forked_ranks() if each not in others]).kill()
        finally:
            kills.write_text("none")

    kills.write_text("0")
    others = forked_ranks()
    with ThreadPoolExecutor(1) as threads:
        killer = threads.submit(kill)
        train(*small(digits, shot, epochs=12), *words)
        killer.result()
    assert sum(map(is_death, events(shot))) == num_kills
    assert predictions(shot) == predictions(calm)


def test_two_processes_give_the_gradients_of_one(tmp_path):
    digits, output = write_digits(tmp_path / "digits", 60), tmp_path / "two.pt"
    one = gradients(digits, RankPlace(rank=0, num_ranks=1, local_rank=0, num_local=1))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
    )
    launch_forked(config, write_gradients, digits, output)
    two = torch.load(output, weights_only=True)
    assert one.keys() == two.keys()
    for name, gradient in one.items():
        assert gradient.dtype == torch.float64
        largest = gradient.abs().max()
        assert largest > 0, name
        torch.testing.assert_close(two[name], gradient, rtol=0, atol=1e-6 * float(largest))


@pytest.mark.slow
def test_a_loss_of_nan_ends_the_run_with_the_batch_kept(digits, tmp_path):
    run = tmp_path / "run"
    words = ["--options", "nan_at=5", "--processes", 2, "--learning-rate", "0.001"]
    written = train(*small(digits, run), *words, status=1)
    reason = written.stderr.splitlines()[-1]
    assert "inferpool train: the loss is nan at step 5" in reason
    assert str(RunFolder(run).nan) in reason
    kept = torch.load(RunFolder(run).nan / "rank-0.pt", weights_only=True)
    assert kept["pixels"].shape == (len(kept["images"]), 3, 32, 32)
    assert all(Path(path).exists() for path in kept["images"])
    assert events(run)[-1]["status"] == "failed"


def test_a_network_that_raises_ends_the_run_at_once(digits, tmp_path):
    run = tmp_path / "run"
    written = train(*small(digits, run), "--options", "raise_at=3", status=1)
    assert written.stderr.endswith(
        "inferpool train: ValueError: this network is broken beyond repair\n"
    )
    assert 'raise ValueError("this network is broken' in written.stderr, "the traceback is shown"
    assert num_starts(run) == 1


@pytest.mark.slow
def test_a_command_starts_ranks_again_trains_alone_and_ends_with_them(digits, tmp_path):
    run = tmp_path / "run"
    words = [sys.executable, "-m", "inferpool", "train", *small(digits, run, epochs=5000)]
    process = subprocess.Popen([*map(str, words), "--quiet"], cwd=ROOT)
    family: list[psutil.Process] = []
    ranks: list[psutil.Process] = []
    try:
        for num_kills in range(2):
            for each in ranks:
                each.kill()
            wait_for_start(run, num_kills)
            family = psutil.Process(process.pid).children(recursive=True)
            ranks = [each for each in family if is_rank(each)]
            assert len(ranks) == 1
        assert any("died (by SIGKILL)" in str(event.get("text")) for event in events(run))
        written = train("--output", run, "--resume", status=2)
        assert "another process trains there" in written.stderr
    finally:
        process.kill()
        process.wait()
    assert not left_over(family), "no rank or reader outlives the command"


@pytest.mark.slow
def test_two_hosts_train_one_network_and_refuse_to_train_two(digits, tmp_path):
    def train_on_hosts(*odd: object) -> list[tuple[Path, int | None, str]]:
        """Return the folders of two hosts, the exit statuses and what they wrote."""
        port = free_port()
        several = ["--nodes", 2, "--rdzv", f"127.0.0.1:{port}", "--quiet"]
        runs = [tmp_path / f"{port}-{name}" for name in "ab"]
        hosts = [
            start_command(
                ["train", *map(str, [*small(digits, run, epochs=1), *several, *words])],
                run.with_suffix(".log"),
            )
            for run, words in zip(runs, ((), odd), strict=True)
        ]
        for host in hosts:
            host.join(_TIMEOUT_S)
            host.kill()
        return [
            (run, host.exitcode, run.with_suffix(".log").read_text())
            for run, host in zip(runs, hosts, strict=True)
        ]

    same = train_on_hosts()
    assert [status for _, status, _ in same] == [0, 0], same
    one, two = (RunFolder(run) for run, _, _ in same)
    assert one.weights.read_bytes() == two.weights.read_bytes()
    assert predictions(one.path) == predictions(two.path)
    for _, status, error in train_on_hosts("--seed", 3):
        assert status == 1
        assert "the hosts do not train the same" in error


def test_a_wrong_command_leaves_the_run_that_it_would_have_replaced(digits, whole, tmp_path):
    run = whole[0]
    anew = [*small(digits, run), "--overwrite"]
    wrong: list[tuple[list[object], str]] = [
        ([tmp_path / "nothing", "--output", run, "--overwrite"], "nothing"),
        ([*anew, "--model", "torchvision:resnet81"], "resnet81"),
        ([*anew, "--devices", "cuda:77"], "cuda:77"),
        ([*anew, "--weights", run], "lies in the run that --overwrite removes"),
        ([digits, "--output", run], "--resume goes on with it, --overwrite begins anew"),
        (["--output", run, "--resume"], "has ended"),
        ([digits, "--output", digits], "has other files"),
    ]
    before = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    for words, problem in wrong:
        written = train(*words, status=2)
        assert problem in written.stderr
        assert len(written.stderr.splitlines()) <= 2, written.stderr
    assert {path: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
