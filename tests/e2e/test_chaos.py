"""The command `inferpool chaos`, short, on real services."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import forked

pytestmark = [pytest.mark.measures, pytest.mark.slow]


def chaos(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forked.run([*forked.COMMAND, "chaos", *arguments], timeout=300)


def kept(folder: Path, *arguments: str, replicas: int = 2) -> dict[str, Any]:
    """Return the report on a service of echo, whose promise must have been kept.

    Faults meet workers at work. No call expires, however slow the machine is.
    """
    config = folder / "inferpool.toml"
    config.write_text(
        "default_timeout_s = 200\n"
        f'[models.echo]\nsource = "echo"\nreplicas = {replicas}\nbatch_timeout_s = 1.5\n'
        "options = { delay_s = 0.01 }\n"
    )
    done = chaos("--config", str(config), "--json", "--requests", "500", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The promise was kept" in done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["problems"] == []
    assert report["chaos"]["right"] == report["chaos"]["sent"] >= 500, report["chaos"]
    return report


def kept_under(folder: Path, *faults: str) -> dict[str, Any]:
    """Have these faults alone strike a service, and return the report."""
    usual = [f"--{each}-every=0" for each in ("kill", "stop", "poison", "forkserver")]
    report = kept(folder, *usual, *(f"--{each}-every=2" for each in faults))
    assert all(report["faults"][each] for each in faults)
    return report


@pytest.mark.alone
def test_echo_keeps_the_promise_while_its_processes_are_killed_stopped_and_poisoned(tmp_path: Path):
    report = kept(
        tmp_path, "--kills", "3", "--kill-every", "0.7",
        "--stop-every", "1.5", "--poison-every", "1.5", "--forkserver-every", "3",
    )  # fmt: skip
    assert report["faults"]["kill"] >= 3
    assert report["faults"]["stop"] >= 1
    assert report["faults"]["forkserver"] >= 1
    assert report["poisonings"]["right"] == report["poisonings"]["sent"] >= 1
    assert report["ledger"]["retried"] > 0
    assert report["ledger"]["failed"] == report["poisonings"]["sent"]


@pytest.mark.alone
def test_the_promise_is_kept_while_models_are_swapped_and_their_workers_are_struck(tmp_path: Path):
    report = kept(
        tmp_path, "--front-ends", "2", "--swap-every", "1.5", "--kills", "3", "--kill-every", "0.7",
        "--stop-every", "3", "--poison-every", "3", "--forkserver-every", "3",
    )  # fmt: skip
    assert report["swaps"]["done"] >= 1


@pytest.mark.alone
def test_the_promise_is_kept_while_hosts_are_killed_stopped_and_ended(tmp_path: Path):
    report = kept(
        tmp_path, "--hosts", "2", "--host-every", "1", "--kills", "2", "--kill-every", "2",
        "--stop-every", "0", "--poison-every", "6", replicas=1,
    )  # fmt: skip
    assert report["faults"]["host"] >= 3
    times = report["recovery_ms"]
    assert {"host kill", "host stop", "host end"} <= times.keys()
    assert all(each["recovered"] for each in times.values())


@pytest.mark.alone
def test_the_promise_is_kept_beside_scribbling_code_greed_bursts_and_unread_answers(tmp_path: Path):
    report = kept_under(tmp_path, "scribble", "greed", "burst", "unread")
    assert report["poisonings"]["right"] == report["poisonings"]["sent"] >= 1
    assert report["greedy"]["right"] == report["greedy"]["sent"] > 0


@pytest.mark.alone
@pytest.mark.parametrize("protocol", ["v2", "v1", "grpc"])
def test_the_promise_is_kept_by_other_protocols(tmp_path: Path, protocol: str):
    report = kept(
        tmp_path, "--protocol", protocol, "--kills", "2", "--kill-every", "0.7",
        "--stop-every", "0", "--poison-every", "1.5", "--forkserver-every", "0",
    )  # fmt: skip
    assert report["poisonings"]["right"] == report["poisonings"]["sent"] >= 1


@pytest.mark.alone
@pytest.mark.parametrize("protocol", ["embeddings", "tei"])
def test_the_promise_is_kept_by_the_protocols_of_texts(tmp_path: Path, protocol: str):
    config = tmp_path / "inferpool.toml"
    config.write_text(
        'default_timeout_s = 200\n[models.texts]\nsource = "tests.text_model:TextFaultModel"\n'
        "replicas = 2\n"
    )
    done = chaos(
        "--config", str(config), "--protocol", protocol, "--json", "--requests", "300",
        "--kills", "1", "--kill-every", "0.7", "--stop-every", "0", "--poison-every", "1.5",
        "--forkserver-every", "0",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["chaos"]["right"] == report["chaos"]["sent"] >= 300
    assert report["poisonings"]["right"] == report["poisonings"]["sent"] >= 1


@pytest.mark.alone
def test_model_that_exits_costs_its_own_instance_alone(tmp_path: Path):
    report = kept_under(tmp_path, "exit")
    assert report["ledger"]["restarts"] == 0


@pytest.mark.alone
def test_slow_uploads_of_one_key_keep_no_other_from_making_a_job(tmp_path: Path):
    kept_under(tmp_path, "upload")


@pytest.mark.alone
def test_jobs_are_made_again_after_the_folder_of_their_store_was_deleted(tmp_path: Path):
    kept_under(tmp_path, "store")


def test_service_that_does_not_start_is_exit_3_with_the_reason():
    done = chaos("tests.nowhere:Nothing")
    assert done.returncode == 3
    assert "inferpool chaos: " in done.stderr
    assert '"level"' not in done.stderr
    assert "there is no module 'tests.nowhere'" in done.stderr


def test_wrong_command_line_is_exit_2():
    done = chaos("nothing")
    assert done.returncode == 2
    assert "neither a model of the settings" in done.stderr
