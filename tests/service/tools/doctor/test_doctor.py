"""The checks that only `inferpool doctor` makes, and its reports."""

import io
import json
import shutil
import socket
import stat
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from inferpool.service.checks import limits, memory, weights
from inferpool.service.checks.facts import Build, gather
from inferpool.service.checks.findings import error, note, ok, warning
from inferpool.service.settings.loader import load
from inferpool.service.tools.doctor import diagnosis, gpus, network, placement, probes, report
from inferpool.workers.shared.cgroups import CgroupLimits
from tests.certificates import make_certificate
from tests.fake_driver.driver import (
    IS_LOST,
    MISMATCH,
    NO_PERMISSION,
    NOT_LOADED,
    NOT_SUPPORTED,
    FakeDriver,
    h100,
    mig_slice,
)
from tests.service.checks.machines import (
    GIB,
    GPU,
    ONE_GPU,
    TWO_CORES,
    lines,
    settings_of,
    sound_facts,
)

FINDINGS = [
    ok("a", "well"),
    error("b", "broken " * 30, "mend it"),
    note("c", "n"),
    warning("d", "w", "x"),
]


MACHINE = replace(ONE_GPU, gpus=(replace(GPU, uuid="GPU-a"),))


def said_of(folder: Path, driver: FakeDriver, *, is_mps_running: bool = False, **flags: str) -> str:
    """Return what doctor says of a driver, and of GPUs of which the service uses GPU-a."""
    state = driver.state()
    facts = gather(settings_of(folder, **flags), MACHINE)
    built = Build(version="2.15.0+cu132", cuda="13.2")
    facts = replace(facts, torch=built, is_mps_running=is_mps_running)
    return lines([*gpus.check_driver(facts, state), *gpus.check_gpus(facts, state)])


@pytest.mark.parametrize(
    ("gpu", "driver", "said"),
    [
        (
            {},
            {},
            "ok GPU driver: 580.82.07, for CUDA up to 13.2\n"
            "ok cuda:0: NVIDIA H100 80GB HBM3, 80.0 GiB free, no errors",
        ),
        ({}, {"nvmlInitWithFlags": NOT_LOADED}, "ok GPU: none"),
        ({}, {"nvmlInitWithFlags": MISMATCH}, "error GPU driver: no GPU can be used: NVML says RM"),
        ({}, {"cuda": 12080}, "error GPU driver: 580.82.07, for CUDA up to 12.8; torch was built"),
        ({"mig": 1}, {}, "warning cuda:0: is in MIG mode without slices"),
        (
            {"nvmlDeviceGetMemoryInfo": NOT_SUPPORTED},
            {},
            "ok cuda:0: NVIDIA H100 80GB HBM3, no errors",
        ),
        ({"compute_mode": 2}, {}, "error cuda:0: its compute mode allows no process"),
        ({"compute_mode": 3, "process": 1}, {}, "error cuda:0: its compute mode allows one"),
        ({"compute_mode": 3}, {}, "note cuda:0: its compute mode allows one process: a worker"),
        ({"fabric": 3}, {}, "ok cuda:0"),
        ({"fabric": 2}, {}, "warning cuda:0: its NVSwitches are not set up"),
        ({"nvmlDeviceGetHandleByIndex_v2": IS_LOST}, {}, "error cuda:0: cannot be used: NVML says"),
        ({"ecc_errors": 2}, {}, "warning cuda:0: 2 uncorrected memory errors"),
        ({"used": 60 * GIB}, {}, "warning cuda:0: 60.0 GiB of 80.0 GiB are in use"),
        ({"persistence": 0}, {}, "note cuda:0: the driver unloads"),
    ],
)
def test_driver_and_gpus_are_checked(
    tmp_path: Path, gpu: dict[str, object], driver: dict[str, object], said: str
):
    assert said in said_of(tmp_path, FakeDriver(tmp_path, {"GPU-a": h100(**gpu)}, **driver))


def test_gpus_of_others_and_slices_are_told_apart(tmp_path: Path):
    foreign = h100(nvmlDeviceGetHandleByIndex_v2=NO_PERMISSION)
    said = said_of(tmp_path, FakeDriver(tmp_path, {"GPU-a": h100(), "GPU-b": foreign}))
    assert "ok cuda:0" in said
    assert "cuda:1" not in said
    slices = {f"MIG-{n}": mig_slice("GPU-a") for n in range(3)}
    said = said_of(tmp_path, FakeDriver(tmp_path, {"GPU-a": h100(used=GIB), **slices}))
    assert "ok cuda:0: NVIDIA H100 80GB HBM3, 3 MIG slices, 79.0 GiB free" in said


def test_gpu_for_one_process_is_enough_for_several_with_mps(tmp_path: Path):
    exclusive = FakeDriver(tmp_path, {"GPU-a": h100(compute_mode=3)})
    assert "error cuda:0: its compute mode" in said_of(tmp_path, exclusive, replicas="2")
    shared = said_of(tmp_path, exclusive, replicas="2", is_mps_running=True)
    assert "ok cuda:0" in shared
    assert "its compute mode" not in shared


SMALL = {"cgroup": CgroupLimits(memory_bytes=GIB, memory_left_bytes=100 << 20)}
NO_SEARCH = {"SPEED_SEARCH": "false"}


@pytest.mark.parametrize(
    ("check", "flags", "environ", "facts", "said"),
    [
        (diagnosis.check_arena, {}, {}, {}, "ok arena"),
        (diagnosis.check_arena, {}, {}, SMALL, "error arena: 2"),
        (diagnosis.check_fronts, {}, {"FRONT_ENDS": "3"}, {}, "ok front ends"),
        (diagnosis.check_fronts, {}, {"FRONT_ENDS": "3", "ARENA_BYTES": "67108864"}, {}, "error f"),
        (diagnosis.check_cache, {}, {"CACHE_DIR": "{path}/not/yet"}, {}, "ok cache folder"),
        (diagnosis.check_cache, {}, {"CACHE_DIR": "/dev/null/x"}, {}, "warning cache folder: /dev"),
        (diagnosis.check_cache, {"speed": "exact"}, {"CACHE_DIR": "/dev/null/x"}, {}, ""),
        (diagnosis.check_compiler, {}, {}, {}, "note C++ compiler: there is none (no-such-compi"),
        (diagnosis.check_compiler, {"speed": "compiled_bf16"}, NO_SEARCH, {}, "warning C++ compil"),
        (diagnosis.check_compiler, {}, NO_SEARCH, {}, ""),
        (diagnosis.check_compiler, {"speed": "folded"}, {}, {}, ""),
    ],
)
def test_what_a_start_needs_is_checked(
    tmp_path: Path, monkeypatch, check, flags, environ, facts, said: str
):
    monkeypatch.setenv("CXX", "no-such-compiler")
    own = {f"INFERPOOL_{name}": text.format(path=tmp_path) for name, text in environ.items()}
    settings = load({"model": "echo", **flags}, own, tmp_path).settings
    found = lines(check(replace(sound_facts(tmp_path), **facts), settings))
    assert found.startswith(said)
    assert bool(found) == bool(said)


def test_a_compiler_is_found_and_a_missing_device_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CXX", "sh")
    facts, settings = sound_facts(tmp_path), settings_of(tmp_path)
    assert lines(diagnosis.check_compiler(facts, settings)).startswith("ok C++ compiler: /")
    missing = settings_of(tmp_path, devices="cuda:3")
    found = lines(diagnosis.check_placement(gather(missing, TWO_CORES), missing))
    assert "error devices of echo" in found


def test_split_replicas_and_front_ends_count_by_their_processes(tmp_path: Path):
    split = {"model": "minilm_l6", "placement": "pipeline", "devices": "cpu", "replicas": "2"}
    settings = settings_of(tmp_path, **split)
    facts = gather(settings, ONE_GPU)
    (found,) = diagnosis.check_placement(facts, settings)
    assert str(found) == "devices of minilm_l6: 2 replicas, each split into 2 stages, on cpu+cpu"
    assert "16 computing threads on 16 cores" in lines(limits.check_cores(facts, settings))
    fronts = [settings.model_copy(update={"front_ends": num}) for num in (1, 3)]
    alone, more = (lines(memory.check_replicas(facts, each)) for each in fronts)
    assert "2 workers of 4 processes and the front" in alone
    assert alone != more


def test_settings_file_that_everyone_may_write_to_is_a_warning(tmp_path: Path):
    path = tmp_path / "inferpool.toml"
    path.touch()
    assert lines(network.check_settings_file({"port": f"file {path}"})).startswith("ok settings")
    path.chmod(path.stat().st_mode | stat.S_IWOTH)
    (found,) = network.check_settings_file({"port": f"file {path}"})
    assert (found.level, found.advice) == ("warning", f"chmod o-w {path}")


def test_public_address_without_keys_is_a_warning(tmp_path: Path):
    settings = settings_of(tmp_path, host="0.0.0.0", port="0")
    found = lines(network.check_address(settings, tmp_path / "none"))
    assert "warning API keys: anyone who reaches 0.0.0.0 may use this service" in found


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"status":"live"}', "note address: a running inferpool uses 127.0.0.1:{port}"),
        (b"<html>", "error address: cannot listen on 127.0.0.1:{port}: Address already in use"),
    ],
    ids=["ours", "another's"],
)
def test_address_of_a_running_inferpool_is_no_error(tmp_path: Path, body: bytes, said: str):
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        threading.Thread(target=serve, args=[listener], daemon=True).start()
        settings = settings_of(tmp_path, port=str(port))
        found = lines(network.check_address(settings, tmp_path / "none", answer_s=120.0))
    assert found.startswith(said.format(port=port))


def test_further_addresses_of_torchserve_are_checked(tmp_path: Path):
    path = tmp_path / "config.properties"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        path.write_text(
            "inference_address=http://127.0.0.1:0\nmanagement_address=http://127.0.0.1:0\n"
            f"metrics_address=http://127.0.0.1:{port}\n"
        )
        settings = settings_of(tmp_path, torchserve=str(path))
        found = lines(network.check_address(settings, tmp_path / "none"))
    assert "ok management_address: 127.0.0.1:0 is free" in found
    assert f"error metrics_address: cannot listen on 127.0.0.1:{port}" in found
    path.write_text(
        f"inference_address=http://127.0.0.1:1\nmetrics_address=http://127.0.0.1:{port}"
    )
    settings = settings_of(tmp_path, torchserve=str(path), port=port)  # as --port may have it
    found = lines(network.check_address(settings, tmp_path / "none"))
    assert f"error metrics_address: cannot listen on 127.0.0.1:{port}" in found
    path.write_text("management_address=http://0.0.0.0:0\nenable_metrics_api=false\n")
    found = lines(network.check_address(settings, tmp_path / "none"))
    assert "error management_address: other hosts could reach 0.0.0.0, and no key" in found
    assert "metrics_address" not in found


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_certificate_is_checked(tmp_path: Path):
    facts = sound_facts(tmp_path)
    certificate, key = map(str, make_certificate(tmp_path))
    old, old_key = map(str, make_certificate(tmp_path, "old", days=3))
    for pair, level, message in (
        ((certificate, key), "ok", "belong together"),
        ((certificate, old_key), "error", f"tls_key: {old_key} is not the key of"),
        ((certificate, "none.key"), "error", "tls_key: none.key: No such file"),
        ((old, old_key), "warning", "expires in 3.0 days"),
    ):
        settings = settings_of(tmp_path, tls_certificate=pair[0], tls_key=pair[1])
        (found,) = network.check_tls(facts, settings)
        assert (found.level, found.check) == (level, "TLS")
        assert message in found.message
    assert network.check_tls in diagnosis.FOUND_BY_STARTING
    assert not list(network.check_tls(facts, settings_of(tmp_path)))


def test_missing_model_file_is_named_once(tmp_path: Path):
    settings = settings_of(tmp_path, model=str(tmp_path / "net.pt2"))
    facts = gather(settings, TWO_CORES)
    assert lines(weights.check_weights(facts, settings)).count("net.pt2") == 1
    assert probes.known_models(facts, settings) == []


def test_model_that_hangs_on_import_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "sleepy.py").write_text("import time; time.sleep(3600)")
    monkeypatch.chdir(tmp_path)
    settings = settings_of(tmp_path, model="sleepy:Model")
    found = list(probes.check_imports(gather(settings, TWO_CORES), settings, timeout_s=0.5))
    assert (found[-1].level, found[-1].message) == ("error", "not done after 0.5 s")


@pytest.mark.slow
def test_process_that_tries_a_model_says_nothing_but_its_answers(tmp_path: Path):
    settings = settings_of(tmp_path, model="tests.fault_model:FaultModel")
    facts, kinds = gather(settings, TWO_CORES), ["survey", "measured"]
    orders = [probes.order_for(facts, settings, "faultmodel", do, rooms=[]) for do in kinds]
    answers = probes.probe(orders, 600.0)
    assert [answer["kind"] for answer in answers] == ["torch", *kinds]


def test_surveys_end_in_time_and_name_the_models_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    clock = iter(range(0, 10_000, 40))
    timeouts: list[float] = []

    def probed(orders: object, timeout_s: float) -> list[dict[str, str]]:
        timeouts.append(timeout_s)
        return [{"kind": "survey", "problem": "no network"}]

    monkeypatch.setattr(placement, "probe", probed)
    monkeypatch.setattr(placement, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    file = tmp_path / "inferpool.toml"
    file.write_text("".join(f'[models.m{n}]\nsource = "x:Y"\n' for n in range(3)))
    settings = load({}, {}, tmp_path).settings
    facts = gather(settings, TWO_CORES)
    found = list(placement.check_ways(facts, settings, ["m0", "m1", "m2"], None))
    assert timeouts == [20]
    said = [each.message.partition(":")[0] for each in found]
    assert said == ["no network", "not checked", "not checked"]


def test_table_has_the_worst_first_and_no_colours_off_a_terminal():
    rows = (("placement", "needs", "has"), ("tensor x2", "186 MiB of 10.1 GiB", "q " * 40))
    long = replace(ok("placement of a model with a long name", "fits"), rows=rows)
    stream = io.StringIO()
    report.write_table([*FINDINGS, long], stream)
    text = stream.getvalue()
    starts = [line.split()[0] for line in text.splitlines() if line[:1].strip()]
    assert starts == ["error", "warning", "note", "ok", "ok", "1"]
    assert "-> mend it" in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 100
    assert "tensor x2  186 MiB of 10.1 GiB  q q" in text
    assert text.count("q") == 40, "the last column is whole"
    assert text.endswith("1 error, 1 warning, 1 note, 2 ok\n")


def test_json_has_every_finding():
    stream = io.StringIO()
    report.write_json(FINDINGS, stream)
    read = json.loads(stream.getvalue())
    assert read["counts"] == {"error": 1, "warning": 1, "note": 1, "ok": 1}
    assert [each["check"] for each in read["findings"]] == ["a", "b", "c", "d"]
