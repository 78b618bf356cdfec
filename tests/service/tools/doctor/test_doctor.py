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
from inferpool.workers.cgroups import CgroupLimits
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


def test_gpu_of_another_job_is_no_problem(tmp_path: Path):
    foreign = h100(nvmlDeviceGetHandleByIndex_v2=NO_PERMISSION)
    said = said_of(tmp_path, FakeDriver(tmp_path, {"GPU-a": h100(), "GPU-b": foreign}))
    assert "ok cuda:0" in said
    assert "cuda:1" not in said


def test_gpu_that_is_cut_is_shown_with_its_slices(tmp_path: Path):
    slices = {f"MIG-{n}": mig_slice("GPU-a") for n in range(3)}
    driver = FakeDriver(tmp_path, {"GPU-a": h100(used=GIB), **slices})
    assert "ok cuda:0: NVIDIA H100 80GB HBM3, 3 MIG slices, 79.0 GiB free" in said_of(
        tmp_path, driver
    )


def test_gpu_for_one_process_is_enough_for_several_with_mps(tmp_path: Path):
    exclusive = FakeDriver(tmp_path, {"GPU-a": h100(compute_mode=3)})
    assert "error cuda:0: its compute mode" in said_of(tmp_path, exclusive, replicas="2")
    shared = said_of(tmp_path, exclusive, replicas="2", is_mps_running=True)
    assert "ok cuda:0" in shared
    assert "its compute mode" not in shared


def test_arena_must_fit_the_control_group(tmp_path: Path):
    facts, settings = sound_facts(tmp_path), settings_of(tmp_path)
    assert lines(diagnosis.check_arena(facts, settings)).startswith("ok arena")
    small = replace(facts, cgroup=CgroupLimits(memory_bytes=GIB, memory_left_bytes=100 << 20))
    (found,) = diagnosis.check_arena(small, settings)
    assert found.level == "error"
    assert "100 MiB are free" in found.message
    assert "lower arena_bytes" in found.advice


def test_front_ends_need_parts_of_the_arena_and_memory(tmp_path: Path):
    facts, settings = sound_facts(tmp_path), settings_of(tmp_path)
    settings = settings.model_copy(update={"front_ends": 3, "arena_bytes": 3 * 2**25})
    assert lines(diagnosis.check_fronts(facts, settings)).startswith("ok front ends")
    (alone,) = memory.check_replicas(facts, settings.model_copy(update={"front_ends": 1}))
    (more,) = memory.check_replicas(facts, settings)
    assert alone.message != more.message
    (found,) = diagnosis.check_fronts(facts, settings.model_copy(update={"arena_bytes": 2**26}))
    assert found.level == "error"
    assert "set arena_bytes to" in found.message


def test_devices_must_exist_and_split_replicas_count_by_their_processes(tmp_path: Path):
    split = {"model": "minilm_l6", "placement": "pipeline", "devices": "cpu", "replicas": "2"}
    settings = settings_of(tmp_path, **split)
    facts = gather(settings, ONE_GPU)
    (found,) = diagnosis.check_placement(facts, settings)
    assert str(found) == "devices of minilm_l6: 2 replicas, each split into 2 stages, on cpu+cpu"
    missing = settings_of(tmp_path, devices="cuda:3")
    found_missing = diagnosis.check_placement(gather(missing, TWO_CORES), missing)
    assert "error devices of echo" in lines(found_missing)
    assert "16 computing threads on 16 cores" in lines(limits.check_cores(facts, settings))
    assert "2 workers of 4 processes and the front" in lines(memory.check_replicas(facts, settings))


def test_cache_folder_must_be_writable_unless_every_model_is_exact(tmp_path: Path):
    def check(cache_dir: Path, speed: str) -> str:
        env = {"INFERPOOL_CACHE_DIR": str(cache_dir)}
        found = load({"model": "echo", "speed": speed}, env, tmp_path).settings
        return lines(diagnosis.check_cache(sound_facts(tmp_path), found))

    (tmp_path / "file").touch()
    assert check(tmp_path / "not" / "yet", "auto").startswith("ok cache folder")
    assert f"warning cache folder: {tmp_path}/file " in check(tmp_path / "file" / "x", "auto")
    assert check(tmp_path / "file" / "x", "exact") == ""


def test_compiler_is_needed_for_compiled_presets_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    facts = sound_facts(tmp_path)

    def check(speed: str, search: str = "true") -> str:
        env = {"INFERPOOL_SPEED_SEARCH": search}
        settings = load({"speed": speed}, env, tmp_path).settings
        return lines(diagnosis.check_compiler(facts, settings))

    monkeypatch.setenv("CXX", "sh")
    assert check("auto").startswith("ok C++ compiler: /")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "note C++ compiler: there is none (no-such-compiler)" in check("auto")
    assert "warning C++ compiler" in check("compiled_bf16", "false")
    assert check("auto", "false") == check("folded") == ""


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
        found = lines(network.check_address(settings, tmp_path / "none"))
    assert found.startswith(said.format(port=port))


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
    said = lines(weights.check_weights(facts, settings))
    said += lines(probes.check_imports(facts, settings))
    assert said.count("net.pt2") == 1


def test_model_that_hangs_on_import_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "sleepy.py").write_text("import time; time.sleep(60)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(probes, "PROBE_TIMEOUT_S", 1.0)
    settings = settings_of(tmp_path, model="sleepy:Model")
    found = list(probes.check_imports(gather(settings, TWO_CORES), settings))
    assert (found[-1].level, found[-1].message) == ("error", "not done after 1 s")


@pytest.mark.parametrize("do", ["survey", "measured"])
def test_process_that_tries_a_model_says_nothing_but_its_answer(tmp_path: Path, do: str):
    settings = settings_of(tmp_path, model="tests.fault_model:FaultModel")
    order = probes.order_for(gather(settings, TWO_CORES), settings, "faultmodel", do, rooms=[])
    answers = probes.probe([order], probes.PROBE_TIMEOUT_S)
    assert [answer["kind"] for answer in answers] == ["torch", do]


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
    stream = io.StringIO()
    report.write_table(FINDINGS, stream)
    text = stream.getvalue()
    starts = [line.split()[0] for line in text.splitlines() if line[:1].strip()]
    assert starts == ["error", "warning", "note", "ok", "1"]
    assert "-> mend it" in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 100
    assert text.endswith("1 error, 1 warning, 1 note, 1 ok\n")


def test_figures_of_a_finding_are_whole_below_a_long_name():
    rows = (("placement", "needs", "has"), ("tensor x2", "186 MiB of 10.1 GiB", "w " * 40))
    stream = io.StringIO()
    found = replace(ok("placement of a model with a long name", "fits"), rows=rows)
    report.write_table([found], stream)
    text = stream.getvalue()
    assert "tensor x2  186 MiB of 10.1 GiB  w w" in text
    assert text.count("w") == 40 + 1, "one in the name"
    assert max(map(len, text.splitlines())) <= 100


def test_json_has_every_finding():
    stream = io.StringIO()
    report.write_json(FINDINGS, stream)
    read = json.loads(stream.getvalue())
    assert read["counts"] == {"error": 1, "warning": 1, "note": 1, "ok": 1}
    assert [each["check"] for each in read["findings"]] == ["a", "b", "c", "d"]
