import hashlib
import io
import json
import shutil
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from inferpool.service.checks import devices, limits, memory, system, weights
from inferpool.service.checks.facts import Build, Facts, Folder, gather
from inferpool.service.checks.findings import Finding, error, grouped, note, ok, warning
from inferpool.service.checks.quick import check_quickly
from inferpool.service.settings.loader import load
from inferpool.service.settings.settings import Settings
from inferpool.service.tools.doctor import gpus, network, placement, probes, report, starting
from inferpool.service.tools.doctor.diagnosis import FOUND_BY_STARTING
from inferpool.workers.cgroups import CgroupLimits
from inferpool.workers.host.devices import Gpu, Host
from inferpool.workers.host.nvml import NvmlState, read_nvml
from tests.certificates import make_certificate

GIB = 1 << 30
TWO_CORES = Host(cpus=(0, 1), num_cores=2)
GPU = Gpu(index=0, uuid="GPU-0", name="H100", memory_bytes=80 * GIB, cpus=())
ONE_GPU = Host(cpus=tuple(range(16)), num_cores=16, gpus=(GPU,))


def settings_of(tmp_path: Path, **flags: str) -> Settings:
    return load({"model": "echo", **flags}, {}, tmp_path).settings


def levels(findings: Iterator[Finding]) -> list[tuple[str, str]]:
    return [(finding.level, finding.check) for finding in findings]


def words(findings: Iterator[Finding]) -> str:
    return "\n".join(f"{finding.level} {finding}" for finding in findings)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_of(tmp_path)


@pytest.fixture
def facts(tmp_path: Path, settings: Settings) -> Facts:
    """A sound machine of two cores, whose /proc and /sys are made up."""
    files = {
        "proc/meminfo": f"MemTotal: {16 << 20} kB\nMemAvailable: {8 << 20} kB\n"
        "SwapTotal: 100 kB\nSwapFree: 100 kB\n",
        "proc/cpuinfo": "model name\t: Great CPU\nflags\t\t: fpu avx2 avx512f avx512_bf16\n",
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": str(4 * GIB),
        "sys/fs/cgroup/memory.current": str(GIB),
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
    }
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return gather(settings, TWO_CORES, tmp_path / "root")


def test_machine_is_read_from_proc_and_sys(facts: Facts):
    assert (facts.memory_bytes, facts.available_bytes) == (16 * GIB, 8 * GIB)
    assert facts.free_bytes == 3 * GIB  # of the control group
    assert (facts.cpu_model, facts.huge_pages, facts.clock) == ("Great CPU", "madvise", "tsc")
    assert "avx512_bf16" in facts.cpu_flags
    assert facts.num_workers == 2
    assert facts.torch is not None
    assert facts.torch.version


def test_sound_machine_has_no_errors(facts: Facts, settings: Settings):
    assert [f for f in check_quickly(settings, TWO_CORES) if f.level == "error"] == []
    assert levels(starting.check_arena(facts, settings)) == [("ok", "arena")]
    assert levels(memory.check_replicas(facts, settings)) == [("ok", "memory")]
    assert levels(system.check_processor(facts, settings)) == [("ok", "processor")]


def test_arena_that_does_not_fit_the_control_group(facts: Facts, settings: Settings):
    small = replace(facts, cgroup=CgroupLimits(memory_bytes=GIB, memory_left_bytes=100 << 20))
    (found,) = starting.check_arena(small, settings)
    assert found.level == "error"
    assert "of 100 MiB that can be had" in found.message
    assert "lower arena_bytes" in found.advice


def test_each_front_end_needs_its_part_of_the_arena_and_memory_of_its_own(
    facts: Facts, settings: Settings
):
    settings = settings.model_copy(update={"front_ends": 3, "arena_bytes": 3 * 2**25})
    assert levels(starting.check_fronts(facts, settings)) == [("ok", "front ends")]
    (alone,) = memory.check_replicas(facts, settings.model_copy(update={"front_ends": 1}))
    (more,) = memory.check_replicas(facts, settings)
    assert alone.message != more.message
    (found,) = starting.check_fronts(facts, settings.model_copy(update={"arena_bytes": 2**26}))
    assert found.level == "error"
    assert "set arena_bytes to" in found.message


def test_small_shared_memory_is_a_note_since_the_arena_does_not_use_it(
    facts: Facts, settings: Settings
):
    shm = Folder(path=Path("/dev/shm"), is_writable=True, total_bytes=1 << 20, free_bytes=0)
    (found,) = memory.check_shared_memory(replace(facts, shm=shm), settings)
    assert found.level == "note"
    assert "the arena does not use it" in found.message


@pytest.mark.parametrize(("left", "level"), [(3 * GIB, "ok"), (GIB, "error"), (5 << 28, "warning")])
def test_replicas_are_held_against_memory(facts: Facts, settings: Settings, left: int, level: str):
    facts = replace(facts, cgroup=CgroupLimits(memory_bytes=left, memory_left_bytes=left))
    # 256 MiB of arena, 70 + 540 + 2 * 180 MiB of processes: 1.2 GiB
    assert [f.level for f in memory.check_replicas(facts, settings)] == [level]


def test_weights_count_once_for_each_replica(tmp_path: Path, facts: Facts):
    with (tmp_path / "big.safetensors").open("wb") as file:
        file.truncate(2 * GIB)
    settings = settings_of(
        tmp_path, model="torchvision:resnet50", weights=str(tmp_path / "big.safetensors")
    )
    facts = gather(settings, TWO_CORES)
    facts = replace(facts, available_bytes=5 * GIB, cgroup=CgroupLimits())
    assert "need about 5.2 GiB" in words(memory.check_replicas(facts, settings))
    assert "error" in words(memory.check_replicas(facts, settings))


def test_swap_and_huge_pages(facts: Facts, settings: Settings):
    facts = replace(facts, swap_used_bytes=GIB, huge_pages="never")
    assert levels(memory.check_swap(facts, settings)) == [("warning", "swap")]
    assert levels(memory.check_huge_pages(facts, settings)) == [("note", "huge pages")]


@pytest.mark.parametrize(("num_files", "level"), [(80, "error"), (300, "warning"), (65536, "ok")])
def test_descriptors(facts: Facts, settings: Settings, num_files: int, level: str):
    facts = replace(facts, num_files=num_files)
    assert levels(limits.check_descriptors(facts, settings)) == [(level, "descriptors")]


def test_processes_of_the_control_group(facts: Facts, settings: Settings):
    def left(num: int) -> Facts:
        return replace(facts, cgroup=CgroupLimits(num_pids=num, num_pids_left=num))

    assert [f.level for f in limits.check_processes(left(20), settings)] == ["error"]
    assert [f.is_fatal for f in limits.check_processes(left(3), settings)] == [True]
    assert [f.level for f in limits.check_processes(left(500), settings)] == ["ok"]


def test_ulimits_that_bound_the_arena_or_torch(facts: Facts, settings: Settings):
    facts = replace(facts, rlimits={"AS": GIB, "FSIZE": 1 << 20, "CORE": None})
    assert levels(limits.check_ulimits(facts, settings)) == [
        ("error", "address space"),
        ("error", "file size"),
        ("note", "core dumps"),
    ]


def test_more_threads_than_cores_take_turns(tmp_path: Path, facts: Facts):
    settings = settings_of(tmp_path, replicas="8")
    facts = gather(settings, TWO_CORES)
    assert levels(limits.check_cores(facts, settings)) == [("warning", "cores")]
    half = replace(facts, cgroup=CgroupLimits(num_cores=0.5))
    assert "a quota of 0.5 cores" in words(limits.check_cores(half, settings))


def test_models_that_leave_all_to_auto_are_not_told_to_leave_it_to_auto(tmp_path: Path):
    file = tmp_path / "inferpool.toml"
    file.write_text("".join(f'[models.m{n}]\nsource = "echo"\n' for n in range(6)))
    settings = load({}, {}, tmp_path).settings
    (found,) = limits.check_cores(gather(settings, TWO_CORES), settings)
    assert (found.level, found.check) == ("note", "cores")
    assert "6 computing threads on 2 cores" in found.message
    assert "auto" not in found.advice
    with file.open("a") as more:
        more.write("replicas = 3\n")  # of the last one
    settings = load({}, {}, tmp_path).settings
    (found,) = limits.check_cores(gather(settings, TWO_CORES), settings)
    assert found.advice == "lower replicas or threads_per_replica of m5, or leave both at auto"


def test_what_is_alike_of_several_models_is_said_once():
    rest = [ok("GPU", "none"), note("devices of b", "another thing"), ok("model ab", "is there")]
    found = grouped(
        [ok("devices of a", "1 on cpu"), *rest, ok("devices of ab", "1 on cpu"), ok("model a", "")],
        ["a", "b", "ab"],
    )
    assert [str(each) for each in found] == [
        "devices of 2 models: a, ab: 1 on cpu", "GPU: none", "devices of b: another thing",
        "model ab: is there", "model a: ",
    ]  # fmt: skip


def test_surveys_end_in_time_and_say_what_they_left_out(
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
    assert [each.message.partition(":")[0] for each in found] == ["no network"] + 2 * [
        "not looked at"
    ]


def test_hang_that_would_be_found_too_late_is_warned_of(tmp_path: Path, facts: Facts):
    def found(timeout: str) -> list[tuple[str, str]]:
        file = tmp_path / "inferpool.toml"
        file.write_text(f"[models.echo]\nbatch_timeout_s = {timeout}\n")
        return levels(limits.check_timeouts(facts, load({}, {}, tmp_path).settings))

    assert found('"auto"') == []
    assert found("29.9") == []
    assert found("30") == [("warning", "batch_timeout_s of echo")]


def test_process_1_needs_an_init(facts: Facts, settings: Settings):
    assert "docker run --init" in words(limits.check_container(replace(facts, pid=1), settings))


def test_cache_folder(tmp_path: Path, facts: Facts):
    def check(cache_dir: Path, speed: str) -> str:
        env = {"INFERPOOL_CACHE_DIR": str(cache_dir)}
        found = load({"model": "echo", "speed": speed}, env, tmp_path).settings
        return words(starting.check_cache(facts, found))

    (tmp_path / "file").touch()
    assert check(tmp_path / "not" / "yet", "auto").startswith("ok cache folder")
    assert f"warning cache folder: {tmp_path}/file " in check(tmp_path / "file" / "x", "auto")
    assert check(tmp_path / "file" / "x", "exact") == ""


def test_compiler(tmp_path: Path, facts: Facts, monkeypatch: pytest.MonkeyPatch):
    def check(speed: str, search: str = "true", at: Facts = facts) -> str:
        env = {"INFERPOOL_SPEED_SEARCH": search}
        return words(starting.check_compiler(at, load({"speed": speed}, env, tmp_path).settings))

    monkeypatch.setenv("CXX", "sh")
    assert check("auto").startswith("ok C++ compiler: /")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "note C++ compiler: there is none (no-such-compiler)" in check("auto")
    assert "warning C++ compiler" in check("compiled_bf16", "false")
    assert check("auto", "false") == check("folded") == ""


def test_temporary_folder(facts: Facts, settings: Settings):
    def at(path: str, free_bytes: int = GIB) -> Facts:
        tmp = Folder(path=Path(path), is_writable=True, total_bytes=GIB, free_bytes=free_bytes)
        return replace(facts, tmp=tmp)

    for found, level in (
        (at("/tmp"), "ok"),
        (at("/tmp", 5), "warning"),
        (at("/" + 80 * "x"), "warning"),
        (replace(facts, tmp=None), "warning"),
    ):
        assert [f.level for f in system.check_temporary(found, settings)] == [level]


@pytest.mark.parametrize(
    ("torch", "vision", "said"),
    [
        (("2.15.0+cu132", "13.2"), ("0.29.2+cu132", [">=2.14.0"]), "ok torchvision"),
        (("2.15.0+cpu", ""), ("0.29.2+cu132", ["==2.15.0"]), "error torchvision"),
        (("2.13.1", ""), ("0.29.2", [">=2.14.0"]), "error torchvision: 0.29.2 needs torch >=2.14"),
        (("2.15.1", ""), ("0.29.2", ["==2.15.0"]), "error torchvision: 0.29.2 needs torch ==2.15"),
    ],
)
def test_torch_and_torchvision_go_together(
    facts: Facts,
    settings: Settings,
    torch: tuple[str, str],
    vision: tuple[str, list[str]],
    said: str,
):
    facts = replace(
        facts,
        torch=Build(version=torch[0], cuda=torch[1]),
        torchvision=Build(version=vision[0], requires=vision[1]),
    )
    assert said in words(system.check_torch(facts, settings))


def test_torch_that_is_missing_stops_the_start(facts: Facts, settings: Settings):
    (found,) = system.check_torch(replace(facts, torch=None), settings)
    assert found.is_fatal


def test_old_processor_and_slow_clock(facts: Facts, settings: Settings):
    facts = replace(facts, cpu_flags=frozenset({"sse2"}), clock="hpet")
    assert "without AVX2" in words(system.check_processor(facts, settings))
    assert "warning clock: hpet" in words(system.check_kernel(facts, settings))


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = tmp_path / "whole.safetensors"
    save_file({"w": np.zeros((4, 4), np.float32)}, path)
    return path


def test_whole_safetensors_file_is_well(whole: Path):
    assert weights.problem_of(whole) == ""


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[:-1], "it is cut short or damaged"),
        (lambda data: data[:20], "cut short"),
        (lambda data: b"", "the file is empty"),
        (lambda data: b"\xff" * 100, "no safetensors header"),
        (lambda data: data[:8] + b"[" * (len(data) - 8), "no safetensors header"),
    ],
)
def test_damaged_safetensors_file_is_named(
    whole: Path, damage: Callable[[bytes], bytes], said: str
):
    whole.write_bytes(damage(whole.read_bytes()))
    assert said in weights.problem_of(whole)


def test_model_files_that_are_no_archives_or_not_there(tmp_path: Path):
    (tmp_path / "net.pt2").write_text("text")
    assert "no archive" in weights.problem_of(tmp_path / "net.pt2")
    assert "no such file" in weights.problem_of(tmp_path / "other.pt2")
    assert "no file" in weights.problem_of(tmp_path)


class FakeNvml:
    """The part of pynvml that is asked, for one GPU."""

    NVML_DEVICE_MIG_ENABLE = 1
    NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 3
    NVML_COMPUTEMODE_PROHIBITED = 2
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0

    class NVMLError(Exception):
        pass

    def __init__(self, **answers: object) -> None:
        self._answers: Mapping[str, object] = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlSystemGetDriverVersion": "580.65.06",
            "nvmlSystemGetCudaDriverVersion_v2": 13020,
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": 0,
            "nvmlDeviceGetUUID": b"GPU-0",
            "nvmlDeviceGetName": "H100",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 * GIB, used=GIB),
            "nvmlDeviceGetMigMode": (0, 0),
            "nvmlDeviceGetComputeMode": 0,
            "nvmlDeviceGetComputeRunningProcesses": [],
            "nvmlDeviceGetPersistenceMode": 1,
            "nvmlDeviceGetCudaComputeCapability": (9, 0),
            **answers,
        }

    def __getattr__(self, name: str) -> Callable[..., object]:
        def answer(*_: object) -> object:
            if name not in self._answers:
                raise self.NVMLError("not supported")
            value = self._answers[name]
            if isinstance(value, Exception):
                raise value
            return value

        return answer


def gpu_words(settings: Settings, nvml: NvmlState) -> str:
    facts = gather(settings, ONE_GPU)
    facts = replace(facts, torch=Build(version="2.15.0+cu132", cuda="13.2"))
    return words(iter([*gpus.check_driver(facts, nvml), *gpus.check_gpus(facts, nvml)]))


def test_sound_gpu(settings: Settings):
    said = gpu_words(settings, read_nvml(FakeNvml()))
    assert said == (
        "ok GPU driver: 580.65.06, for CUDA up to 13.2\nok cuda:0: H100, 79.0 GiB free, no errors"
    )


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"nvmlSystemGetCudaDriverVersion_v2": 12080}, "error GPU driver: 580.65.06, for CUDA up"),
        (
            {"nvmlDeviceGetMigMode": (1, 1), "nvmlDeviceGetMaxMigDeviceCount": 7}
            | {"nvmlDeviceGetMigDeviceHandleByIndex": 1},
            "ok cuda:0: H100, cut into 7 MIG slices, 79.0 GiB free",
        ),
        ({"nvmlDeviceGetMigMode": (1, 1)}, "warning cuda:0: is in MIG mode, and not cut"),
        ({"nvmlDeviceGetComputeMode": 2}, "error cuda:0: its compute mode allows no process"),
        (
            {"nvmlDeviceGetComputeMode": 3, "nvmlDeviceGetComputeRunningProcesses": [1]},
            "error cuda:0: its compute mode allows one process",
        ),
        ({"nvmlDeviceGetTotalEccErrors": 2}, "warning cuda:0: 2 uncorrected memory errors"),
        (
            {"nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 * GIB, used=60 * GIB)},
            "warning cuda:0: 60.0 GiB of 80.0 GiB are in use",
        ),
        ({"nvmlDeviceGetPersistenceMode": 0}, "note cuda:0: the driver unloads"),
    ],
)
def test_gpu_that_is_not_well(settings: Settings, answers: dict[str, object], said: str):
    assert said in gpu_words(settings, read_nvml(FakeNvml(**answers)))


def test_processes_that_share_a_gpu(tmp_path: Path):
    settings = settings_of(tmp_path, replicas="2")
    facts = gather(settings, ONE_GPU)

    def said(**changes: object) -> str:
        return words(devices.check_sharing(replace(facts, **changes), settings))  # type: ignore[arg-type]

    assert said().startswith("note GPU sharing: 2 processes share cuda:0 (H100, 80 GiB) by turns")
    assert "nvidia-cuda-mps-control -d" in said()
    assert said(is_mps_running=True).endswith("80 GiB) through CUDA MPS")
    twice = {"a": facts.placements["echo"], "b": facts.placements["echo"]}
    assert "may allocate 196 % of its memory together" in said(placements=twice)
    exclusive = read_nvml(FakeNvml(nvmlDeviceGetComputeMode=3))
    assert "error cuda:0: its compute mode" in words(gpus.check_gpus(facts, exclusive))
    shared = replace(facts, is_mps_running=True)
    assert levels(gpus.check_gpus(shared, exclusive)) == [("ok", "cuda:0")]


def test_split_replicas_are_counted_by_their_processes(tmp_path: Path):
    split = {"model": "minilm_l6", "placement": "pipeline", "devices": "cpu", "replicas": "2"}
    settings = settings_of(tmp_path, **split)
    facts = gather(settings, ONE_GPU)
    (found,) = starting.check_placement(facts, settings)
    assert str(found) == ("devices of minilm_l6: 2 replicas, each split into 2 stages, on cpu+cpu")
    assert "16 computing threads on 16 cores" in words(limits.check_cores(facts, settings))
    assert "2 workers of 4 processes and the front" in words(memory.check_replicas(facts, settings))


def test_no_gpu_at_all_is_fine(facts: Facts):
    nvml = read_nvml(FakeNvml(nvmlInit=FakeNvml.NVMLError("library not found")))
    assert levels(gpus.check_driver(facts, nvml)) == [("ok", "GPU")]
    assert levels(gpus.check_gpus(facts, nvml)) == []


def test_devices_that_are_not_there(tmp_path: Path):
    settings = settings_of(tmp_path, devices="cuda:3")
    facts = gather(settings, TWO_CORES)
    assert "error devices of echo" in words(starting.check_placement(facts, settings))


@pytest.mark.parametrize(("visible", "level"), [("", "note"), ("0,7", "warning"), ("0", "ok")])
def test_visible_devices(facts: Facts, settings: Settings, visible: str, level: str):
    settings = settings.model_copy(update={"cuda_visible_devices": visible})
    host = replace(ONE_GPU, gpus=(GPU,) if visible else ())
    facts = replace(facts, host=host)
    assert [f.level for f in devices.check_visible(facts, settings)] == [level]


def test_settings_that_everyone_may_write_to(tmp_path: Path):
    path = tmp_path / "inferpool.toml"
    path.touch()
    assert levels(network.check_settings_file({"port": f"file {path}"})) == [("ok", "settings")]
    path.chmod(path.stat().st_mode | stat.S_IWOTH)
    (found,) = network.check_settings_file({"port": f"file {path}"})
    assert (found.level, found.advice) == ("warning", f"chmod o-w {path}")


def test_public_address_without_keys(tmp_path: Path):
    settings = settings_of(tmp_path, host="0.0.0.0", port="0")
    found = words(network.check_address(settings, tmp_path / "none"))
    assert "warning API keys: whoever reaches 0.0.0.0 may use this service" in found


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"status":"live"}', "note address: 127.0.0.1:{port} is taken by an inferpool that is"),
        (b"<html>", "error address: cannot listen on 127.0.0.1:{port}: Address already in use"),
    ],
    ids=["ours", "another's"],
)
def test_address_that_a_running_service_of_ours_has_is_no_error(
    tmp_path: Path, body: bytes, said: str
):
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
        found = words(network.check_address(settings, tmp_path / "none"))
    assert found.startswith(said.format(port=port))


def test_key_for_two_kinds_of_calls_is_warned_of_at_start_and_by_doctor(tmp_path: Path):
    one, two = "k" * 20, "o" * 20
    environ = {"INFERPOOL_PREDICT_KEYS": f"{one},{two}", "INFERPOOL_ADMIN_KEYS": two}
    settings = load({"model": "echo"}, environ, tmp_path).settings
    said = words(iter(check_quickly(settings, TWO_CORES)))
    assert said.count("share a key") == 1
    assert f"predict_keys and admin_keys share a key (SHA-256 {digest_of(two)[:8]}" in said
    apart = load({"model": "echo"}, environ | {"INFERPOOL_ADMIN_KEYS": "a" * 20}, tmp_path)
    assert "share" not in words(iter(check_quickly(apart.settings, TWO_CORES)))


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_certificate_is_looked_at(tmp_path: Path, facts: Facts):
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
    assert network.check_tls in FOUND_BY_STARTING
    assert not list(network.check_tls(facts, settings_of(tmp_path)))


def test_model_file_that_is_missing_is_named_once(tmp_path: Path):
    settings = settings_of(tmp_path, model=str(tmp_path / "net.pt2"))
    facts = gather(settings, TWO_CORES)
    said = words(weights.check_weights(facts, settings))
    said += words(probes.check_imports(facts, settings))
    assert said.count("net.pt2") == 1


def test_class_of_the_users_that_hangs_on_import_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "sleepy.py").write_text("import time; time.sleep(60)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(probes, "PROBE_TIMEOUT_S", 1.0)
    settings = settings_of(tmp_path, model="sleepy:Model")
    found = list(probes.check_imports(gather(settings, TWO_CORES), settings))
    assert (found[-1].level, found[-1].message) == ("error", "not done after 1 s")


FINDINGS = [
    ok("a", "well"),
    error("b", "broken " * 30, "mend it"),
    note("c", "n"),
    warning("d", "w", "x"),
]


def test_table_has_the_worst_first_and_no_colours_where_nobody_sees_them():
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
    rows = (
        ("placement", "needs", "what each has"),
        ("tensor x2", "186 MiB of 10.1 GiB", "w " * 40),
    )
    stream = io.StringIO()
    found = replace(ok("placement of a model with a long name", "fits"), rows=rows)
    report.write_table([found, note("z", "n")], stream)
    text = stream.getvalue()
    assert "tensor x2  186 MiB of 10.1 GiB  w w" in text
    assert text.count("w") == 40 + 2, "of the heading, and of the name"
    assert max(map(len, text.splitlines())) <= 100


def test_json_has_every_finding():
    stream = io.StringIO()
    report.write_json(FINDINGS, stream)
    read = json.loads(stream.getvalue())
    assert read["counts"] == {"error": 1, "warning": 1, "note": 1, "ok": 1}
    assert [f["check"] for f in read["findings"]] == ["a", "b", "c", "d"]
