"""The checks of every start, on made-up machines and files."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from inferpool.service.checks import devices, limits, memory, system, weights
from inferpool.service.checks.facts import Build, Folder, gather
from inferpool.service.checks.findings import grouped, note, ok
from inferpool.service.checks.quick import Check, check_quickly
from inferpool.service.settings.loader import load
from inferpool.workers.host.gpus import Gpu
from inferpool.workers.shared.cgroups import CgroupLimits
from tests.service.checks.machines import (
    GIB,
    GPU,
    ONE_GPU,
    TWO_CORES,
    lines,
    settings_of,
    sound_facts,
)


def limited(num_bytes: int) -> dict[str, object]:
    return {"cgroup": CgroupLimits(memory_bytes=num_bytes, memory_left_bytes=num_bytes)}


def pids(num: int) -> dict[str, object]:
    return {"cgroup": CgroupLimits(num_pids=num, num_pids_left=num)}


def folder(path: str, free_bytes: int = GIB) -> Folder:
    return Folder(path=Path(path), is_writable=True, total_bytes=GIB, free_bytes=free_bytes)


def test_facts_are_read_from_proc_and_sys(tmp_path: Path):
    facts = sound_facts(tmp_path)
    assert (facts.memory_bytes, facts.available_bytes) == (16 * GIB, 8 * GIB)
    assert facts.free_bytes == 3 * GIB  # of the control group
    assert (facts.cpu_model, facts.huge_pages, facts.clock) == ("Great CPU", "madvise", "tsc")
    assert "avx512_bf16" in facts.cpu_flags
    assert facts.num_workers == 2
    assert facts.torch is not None
    assert facts.torch.version


def test_sound_machine_has_no_errors(tmp_path: Path):
    assert "error" not in lines(check_quickly(settings_of(tmp_path), TWO_CORES))


@pytest.mark.parametrize(
    ("check", "changes", "said"),
    [
        (memory.check_shared_memory, {"shm": folder("/dev/shm", 0)}, "note /dev/shm: 0 KiB free"),
        # 256 MiB of arena, 70 + 540 + 2 * 180 MiB of processes: 1.2 GiB
        (memory.check_replicas, limited(3 * GIB), "ok memory"),
        (memory.check_replicas, limited(5 << 28), "warning memory"),
        (memory.check_replicas, limited(GIB), "error memory"),
        (memory.check_swap, {"swap_used_bytes": GIB}, "warning swap"),
        (memory.check_huge_pages, {"huge_pages": "never"}, "note huge pages"),
        (limits.check_descriptors, {"num_files": 80}, "error descriptors"),
        (limits.check_descriptors, {"num_files": 300}, "warning descriptors"),
        (limits.check_descriptors, {"num_files": 65536}, "ok descriptors"),
        (limits.check_processes, pids(20), "error processes"),
        (limits.check_processes, pids(500), "ok processes"),
        (limits.check_ulimits, {"rlimits": {"AS": GIB, "CORE": 0}}, "error address space"),
        (limits.check_ulimits, {"rlimits": {"FSIZE": 1 << 20, "CORE": 0}}, "error file size"),
        (limits.check_ulimits, {"rlimits": {"CORE": None}}, "note core dumps"),
        (limits.check_container, {"pid": 1}, "docker run --init"),
        (limits.check_cores, {"cgroup": CgroupLimits(num_cores=0.5)}, "a quota of 0.5 cores"),
        (system.check_temporary, {"tmp": folder("/tmp")}, "ok temporary folder"),
        (system.check_temporary, {"tmp": folder("/tmp", 5)}, "warning temporary folder"),
        (system.check_temporary, {"tmp": folder("/" + 80 * "x")}, "warning temporary folder: /xx"),
        (system.check_temporary, {"tmp": None}, "warning temporary folder: none is"),
        (system.check_processor, {}, "ok processor"),
        (system.check_processor, {"cpu_flags": frozenset({"sse2"})}, "without AVX2"),
        (system.check_kernel, {"clock": "hpet"}, "warning clock: hpet"),
    ],
)
def test_check_finds_what_is_wrong(
    tmp_path: Path, check: Check, changes: Mapping[str, object], said: str
):
    facts = replace(sound_facts(tmp_path), **changes)  # type: ignore[arg-type]  # fields of Facts
    found = list(check(facts, settings_of(tmp_path)))
    assert said in lines(found)


@pytest.mark.parametrize(
    ("torch", "vision", "needs", "said"),
    [
        ("2.15.0+cu132 for 13.2", "0.29.2+cu132", ">=2.14.0", "ok torchvision"),
        ("2.15.0+cpu", "0.29.2+cu132", "==2.15.0", "error torchvision"),
        ("2.13.1", "0.29.2", ">=2.14.0", "error torchvision: 0.29.2 needs torch >=2.14"),
        ("2.15.1", "0.29.2", "==2.15.0", "error torchvision: 0.29.2 needs torch ==2.15"),
    ],
)
def test_builds_must_fit_each_other(tmp_path: Path, torch: str, vision: str, needs: str, said: str):
    version, _, cuda = torch.partition(" for ")
    facts = replace(
        sound_facts(tmp_path),
        torch=Build(version=version, cuda=cuda),
        torchvision=Build(version=vision, requires=[needs]),
    )
    assert said in lines(system.check_torch(facts, settings_of(tmp_path)))


def test_missing_torch_or_room_for_no_process_stops_the_start(tmp_path: Path):
    facts, settings = sound_facts(tmp_path), settings_of(tmp_path)
    (found,) = system.check_torch(replace(facts, torch=None), settings)
    assert found.is_fatal
    few = replace(facts, cgroup=CgroupLimits(num_pids=3, num_pids_left=3))
    assert [each.is_fatal for each in limits.check_processes(few, settings)] == [True]


def test_weights_count_once_for_each_replica(tmp_path: Path):
    path = tmp_path / "big.safetensors"
    with path.open("wb") as file:
        file.truncate(2 * GIB)
    settings = settings_of(tmp_path, model="torchvision:resnet50", weights=str(path))
    facts = gather(settings, TWO_CORES)
    facts = replace(facts, available_bytes=5 * GIB, cgroup=CgroupLimits())
    (found,) = memory.check_replicas(facts, settings)
    assert found.level == "error"
    assert "need about 5.2 GiB" in found.message


def test_weights_on_a_gpu_count_for_the_host_if_they_share_memory(tmp_path: Path):
    path = tmp_path / "big.safetensors"
    with path.open("wb") as file:
        file.truncate(2 * GIB)
    settings = settings_of(tmp_path, model="torchvision:resnet50", weights=str(path))

    def said(gpu: Gpu) -> str:
        facts = gather(settings, replace(ONE_GPU, gpus=(gpu,)))
        facts = replace(facts, available_bytes=3 * GIB, cgroup=CgroupLimits())
        return lines(memory.check_replicas(facts, settings))

    assert "need about 3.5 GiB" in said(GPU)
    assert "need about 5.5 GiB" in said(replace(GPU, is_unified=True))


def test_decoders_need_memory_descriptors_and_processes(tmp_path: Path):
    def said(check: Check, decoders: str) -> str:
        environ = {"INFERPOOL_MODELS__ECHO__DECODERS": decoders}
        settings = load({"model": "echo"}, environ, tmp_path).settings
        facts = replace(gather(settings, ONE_GPU), num_files=1200, rlimits={"NPROC": 200})
        facts = replace(facts, available_bytes=6 * GIB, cgroup=CgroupLimits(num_pids_left=200))
        return lines(check(facts, settings))

    assert "1 worker and the front end need about 2.7 GiB" in said(memory.check_replicas, "0")
    assert "1 worker, 60 decoders and the front end need about 7.4 GiB" in said(
        memory.check_replicas, "60"
    )
    assert "lower decoders, lower replicas" in said(memory.check_replicas, "60")
    assert said(limits.check_descriptors, "0").startswith("ok descriptors")
    assert "too few for the workers" not in said(limits.check_descriptors, "0")
    assert said(limits.check_descriptors, "60").startswith("warning descriptors: 1200 open files")
    assert said(limits.check_processes, "0").startswith("ok")
    assert "200 more processes and threads are allowed" in said(limits.check_processes, "60")
    assert gather(settings_of(tmp_path), ONE_GPU).num_decoders == 10
    assert gather(settings_of(tmp_path), TWO_CORES).num_decoders == 0


def test_more_threads_than_cores_take_turns(tmp_path: Path):
    settings = settings_of(tmp_path, replicas="8")
    said = lines(limits.check_cores(gather(settings, TWO_CORES), settings))
    assert said.startswith("warning cores: 8 computing threads on 2 cores")


def test_only_models_that_leave_auto_are_told_to_return_to_it(tmp_path: Path):
    file = tmp_path / "inferpool.toml"
    file.write_text("".join(f'[models.m{n}]\nsource = "echo"\n' for n in range(6)))
    settings = load({}, {}, tmp_path).settings
    (found,) = limits.check_cores(gather(settings, TWO_CORES), settings)
    assert (found.level, found.check) == ("note", "cores")
    assert "6 computing threads on 2 cores" in found.message
    assert "auto" not in found.advice
    with file.open("a") as more:
        more.write("replicas = 3\n")  # for the last model
    settings = load({}, {}, tmp_path).settings
    (found,) = limits.check_cores(gather(settings, TWO_CORES), settings)
    variable = "INFERPOOL_MODELS__NAME__THREADS_PER_REPLICA"  # no flag gives it
    named = f"threads_per_replica ({variable})"
    assert found.advice == f"lower replicas or {named} of m5, or leave both at auto"


def test_same_findings_of_several_models_become_one():
    rest = [ok("GPU", "none"), note("devices of b", "another thing"), ok("model ab", "is there")]
    found = grouped(
        [ok("devices of a", "1 on cpu"), *rest, ok("devices of ab", "1 on cpu"), ok("model a", "")],
        ["a", "b", "ab"],
    )
    assert [str(each) for each in found] == [
        "devices of 2 models: a, ab: 1 on cpu",
        "GPU: none",
        "devices of b: another thing",
        "model ab: is there",
        "model a: ",
    ]


@pytest.mark.parametrize(("timeout", "is_late"), [('"auto"', False), ("29.9", False), ("30", True)])
def test_hang_that_is_found_too_late_is_a_warning(tmp_path: Path, timeout: str, is_late: bool):
    (tmp_path / "inferpool.toml").write_text(f"[models.echo]\nbatch_timeout_s = {timeout}\n")
    settings = load({}, {}, tmp_path).settings
    found = limits.check_timeouts(sound_facts(tmp_path), settings)
    expected = [("warning", "batch_timeout_s of echo")] if is_late else []
    assert [(each.level, each.check) for each in found] == expected


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data, ""),
        (
            lambda data: data[:-1],
            "damaged or cut short (Error while deserializing",
        ),
        (lambda data: data[:20], "invalid header length"),
        (lambda data: b"", "the file is empty"),
        (lambda data: b"\xff" * 100, "header too large"),
        (lambda data: data[:8] + b"[" * (len(data) - 8), "invalid JSON in header"),
    ],
)
def test_damaged_safetensors_are_found(tmp_path: Path, damage: Callable[[bytes], bytes], said: str):
    path = tmp_path / "some.safetensors"
    save_file({"w": np.zeros((4, 4), np.float32)}, path)
    path.write_bytes(damage(path.read_bytes()))
    problem = weights.problem_of(path)
    assert said in problem
    assert bool(problem) == bool(said)


def test_model_file_that_is_no_archive_or_missing_is_found(tmp_path: Path):
    (tmp_path / "net.pt2").write_text("text")
    assert "not an archive" in weights.problem_of(tmp_path / "net.pt2")
    assert "no such file" in weights.problem_of(tmp_path / "other.pt2")
    assert "not a file" in weights.problem_of(tmp_path)


def test_models_of_other_libraries_need_their_extra(tmp_path: Path, monkeypatch):
    (tmp_path / "net.onnx").write_bytes(b"\x08\x09\x3a\x10")
    (tmp_path / "vit").mkdir()
    (tmp_path / "vit" / "config.json").write_text(
        '{"architectures": ["ViTForImageClassification"]}'
    )
    (tmp_path / "vit" / "model.safetensors").write_bytes(b"cut short")
    for family in ("bert", "mpnet"):
        (tmp_path / family).mkdir()
        name = {"bert": "Bert", "mpnet": "MPNet"}[family] + "ForSequenceClassification"
        config = {"model_type": family, "architectures": [name], "id2label": {"0": "x"}}
        (tmp_path / family / "config.json").write_text(json.dumps(config))
        (tmp_path / family / "model.safetensors").write_bytes(b"cut short")
    for source, package, extra, said in (
        ("net.onnx", "onnxruntime", "onnx", "net.onnx: 0 KiB, whole and readable"),
        ("vit", "transformers", "transformers", "damaged or cut short"),
        ("bert", "tokenizers", "text", "damaged or cut short"),
        ("reranker:bert", "tokenizers", "text", "damaged or cut short"),
        ("encoder:mpnet", "transformers", "transformers", "damaged or cut short"),
        ("mpnet", "transformers", "transformers", "damaged or cut short"),
    ):
        prefix, colon, name = source.rpartition(":")
        settings = settings_of(tmp_path, model=f"{prefix}{colon}{tmp_path / name}")
        facts = gather(settings, TWO_CORES)
        assert said in lines(weights.check_weights(facts, settings))
        with monkeypatch.context() as patch:
            patch.setattr(weights, "find_spec", lambda name: None)
            (found,) = weights.check_weights(facts, settings)
        assert (found.message, found.advice) == (
            f"{package}: not installed",
            f"pip install 'inferpool[{extra}]'",
        )


def test_processes_that_share_a_gpu_are_found(tmp_path: Path):
    settings = settings_of(tmp_path, replicas="2")
    facts = gather(settings, ONE_GPU)

    def said(**changes: object) -> str:
        changed = replace(facts, **changes)  # type: ignore[arg-type]  # fields of Facts
        return lines(devices.check_sharing(changed, settings))

    assert said().startswith("note GPU sharing: 2 processes share cuda:0 (H100, 80 GiB) by turns")
    assert "nvidia-cuda-mps-control -d" in said()
    assert said(is_mps_running=True).endswith("80 GiB) through CUDA MPS")
    twice = {"a": facts.placements["echo"], "b": facts.placements["echo"]}
    assert "may allocate 196 % of its memory together" in said(placements=twice)


@pytest.mark.parametrize(
    ("source", "flags", "said"),
    [
        ("torchvision:resnet50", {"replicas": "4"}, "warning replicas of resnet50: 4 replicas"),
        ("tests.fault_model:FaultModel", {"replicas": "2"}, "note replicas of faultmodel: 2 rep"),
        ("torchvision:resnet50", {"devices": "cuda:0,0"}, "2 replicas share cuda:0 (H100, 80 GiB)"),
        ("torchvision:resnet50", {}, ""),
        ("torchvision:resnet50", {"devices": "cpu", "replicas": "4"}, ""),
        ("torchvision:resnet50", {"devices": "cuda:0,0", "placement": "pipeline"}, ""),
    ],
)
def test_several_replicas_of_a_model_on_one_gpu_are_advised_against(
    tmp_path: Path, source: str, flags: dict[str, str], said: str
):
    settings = settings_of(tmp_path, model=source, **flags)
    found = lines(devices.check_replicas_on_gpus(gather(settings, ONE_GPU), settings))
    assert bool(found) == bool(said)
    assert said in found
    assert ("inferpool tune" in found) == ("faultmodel" in found)


def test_start_warns_of_several_replicas_on_one_gpu(tmp_path: Path):
    settings = settings_of(tmp_path, model="torchvision:resnet50", replicas="2")
    assert "warning replicas of resnet50: 2 replicas share" in lines(
        check_quickly(settings, ONE_GPU)
    )


@pytest.mark.parametrize(
    ("visible", "host", "said"),
    [
        ("", {"gpus": ()}, "note CUDA_VISIBLE_DEVICES: hides every GPU"),
        ("0", {"is_told_gpus": True}, "ok CUDA_VISIBLE_DEVICES: 0"),
        ("0", {"is_told_gpus": True, "gpus": ()}, "'0' names GPUs, and this host has none"),
        ("0,7", {"is_told_gpus": True, "problem": "'7' is none"}, "warning GPUs: '7' is none"),
        (None, {"gpus": (), "problem": "NVML says no"}, "error GPUs: NVML says no"),
        ("all", {"problem": "NVML says no"}, "warning GPUs: NVML says no"),
        ("all", {}, None),
        (None, {}, None),
    ],
)
def test_visible_devices_are_checked(
    tmp_path: Path, visible: str | None, host: dict[str, Any], said: str | None
):
    settings = settings_of(tmp_path).model_copy(update={"cuda_visible_devices": visible})
    facts = replace(sound_facts(tmp_path), host=replace(ONE_GPU, **host))
    found = lines(devices.check_visible(facts, settings))
    assert found == "" if said is None else said in found


def test_key_for_two_kinds_of_requests_is_a_warning_of_every_start(tmp_path: Path):
    one, two = "k" * 20, "o" * 20
    environ = {"INFERPOOL_PREDICT_KEYS": f"{one},{two}", "INFERPOOL_ADMIN_KEYS": two}
    settings = load({"model": "echo"}, environ, tmp_path).settings
    said = lines(check_quickly(settings, TWO_CORES))
    assert said.count("share a key") == 1
    digest = hashlib.sha256(two.encode()).hexdigest()
    assert f"predict_keys and admin_keys share a key (SHA-256 {digest[:8]}" in said
    apart = load({"model": "echo"}, environ | {"INFERPOOL_ADMIN_KEYS": "a" * 20}, tmp_path)
    assert "share" not in lines(check_quickly(apart.settings, TWO_CORES))
