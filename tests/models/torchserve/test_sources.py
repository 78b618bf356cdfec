"""Archives as sources: their form, their name, their settings, and what is wrong with them."""

import json
import os
import re
from pathlib import Path

import pytest

from inferpool.models.files.hugging_face import form_of
from inferpool.models.files.kinds import archive_of, is_served, kind_of
from inferpool.models.torchserve.members import opened_archive
from inferpool.service.checks.weights import check_weights, weights_file
from inferpool.service.parts.swap.requests import read_swap
from inferpool.service.parts.watched.versions import read_version
from inferpool.service.settings import archives
from inferpool.service.settings.archives import settings_of_source
from inferpool.service.settings.loader import load
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.model_sources import is_source, packages_to_preload, slug
from inferpool.service.settings.unloadable import problem_of
from inferpool.service.tools.doctor.probes import may_split
from tests.models.torchserve.archives import make_folder, make_mar, make_tar

CONFIG = {"configFile": "c.yaml"}
YAML = "minWorkers: 2\nmaxWorkers: 3\nbatchSize: 4\nmaxBatchDelay: 50\nresponseTimeout: 7\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with an archive in each form."""
    monkeypatch.chdir(tmp_path)
    make_mar(tmp_path / "file.mar", {"c.yaml": f"{YAML}deviceType: cpu\n"}, name="My Toy", **CONFIG)
    make_folder(tmp_path / "folder", modelName="Toy2")
    (tmp_path / "folder/config.json").write_text('{"architectures": ["BertModel"]}')
    make_tar(tmp_path / "file.tar.gz")
    return tmp_path


def test_each_form_of_an_archive_is_a_source_with_the_name_in_it(here: Path) -> None:
    for source, name in (
        ("file.mar", "my-toy"),
        ("folder", "toy2"),
        ("./folder/", "toy2"),
        ("torchserve:folder", "toy2"),
        ("torchserve:file.tar.gz", "toy"),
        ("torchserve:lost/one", "one"),
        ("lost.mar", "lost"),
    ):
        assert is_source(source)
        assert slug(source) == name
        assert packages_to_preload([source], here) in ([], ["transformers"])
    assert is_served(Path("folder"))
    assert form_of(Path("folder")) == "torchserve"
    assert kind_of(Path("file.mar")) == "mar"
    assert archive_of("echo") is archive_of("nets:Net") is archive_of("file.tar.gz") is None
    assert not may_split(ModelSettings(source="folder"))


def test_a_model_has_the_settings_of_its_archive_unless_others_are_given() -> None:
    model = ModelSettings(source="file.mar")
    assert (model.max_batch_size, model.batch_wait_ms, model.replicas) == (4, 50, 2)
    assert (model.batch_timeout_s, model.load_timeout_s, model.devices) == (7, 600, "cpu")
    model = ModelSettings(source="file.mar", max_batch_size=9)
    assert (model.max_batch_size, model.replicas) == (9, 2)


def test_a_handler_of_its_own_gets_one_input_at_a_time_and_a_built_in_one_batches(
    here: Path,
) -> None:
    assert ModelSettings(source="folder").max_batch_size == 1
    make_mar(here / "built.mar", handler="image_classifier")
    assert ModelSettings(source="built.mar").max_batch_size == "auto"
    make_mar(here / "boxes.mar", handler="object_detector")
    assert ModelSettings(source="boxes.mar").max_batch_size == 1


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("minWorkers: 3\nmaxWorkers: 2", {}),
        ("minWorkers: 3", {}),
        ("batchSize: 0\nresponseTimeout: -1", {}),
        ("batchSize: 2 # two", {"max_batch_size": 2}),
        ('"batchSize": 2', {"max_batch_size": 2}),
        ("handler:\n  batchSize: 2", {}),
        ("deviceType: 'CPU'", {"devices": "cpu"}),
        ("deviceType: gpu", {}),
        ("startupTimeout: 9", {"load_timeout_s": 9.0}),
    ],
)
def test_settings_are_those_that_torchserve_would_use(
    here: Path, text: str, found: dict[str, object]
) -> None:
    make_mar(here / "x.mar", {"c.yaml": text}, **CONFIG)
    assert settings_of_source("x.mar") == {"max_batch_size": 1} | found


def test_a_large_tar_is_not_unpacked_for_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "_MAX_TAR_BYTES", 100)
    monkeypatch.setattr(archives, "read_facts", None)
    assert ModelSettings(source="torchserve:file.tar.gz").max_batch_size == 1


def test_an_archive_that_changes_is_read_again(here: Path) -> None:
    assert ModelSettings(source="file.mar").max_batch_size == 4
    make_mar(here / "file.mar", {"c.yaml": "batchSize: 44444"}, **CONFIG)
    assert ModelSettings(source="file.mar").max_batch_size == 44444


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("lost.mar", "there is no file lost.mar"),
        ("broken.mar", "is not an archive of TorchServe|neither a zip"),
        ("torchserve:lost", "there is no file lost"),
        ("parts.mar", "sets torchrun, which is not served"),
        ("async.mar", "sets continuousBatching, which is not served"),
        ("lsp.mar", "its runtime is 'LSP'; only handlers in Python"),
        ("gone.mar", "names 'lost.pt' as serializedFile"),
    ],
)
def test_an_archive_that_cannot_be_served_is_refused_at_once(
    here: Path, source: str, why: str
) -> None:
    (here / "broken.mar").write_text("broken")
    make_mar(here / "parts.mar", {"c.yaml": "torchrun:\n  nproc-per-node: 4\n"}, **CONFIG)
    make_mar(here / "async.mar", {"c.yaml": "continuousBatching: true\n"}, **CONFIG)
    manifest = {"runtime": "LSP", "model": {"modelName": "a", "handler": "b"}}
    make_mar(here / "lsp.mar", {"MAR-INF/other": b""}, serializedFile="lost.pt").rename("gone.mar")
    (here / "folder/MAR-INF/MANIFEST.json").write_text(json.dumps(manifest))
    source = "folder" if source == "lsp.mar" else source
    problem = problem_of(ModelSettings(source=source))
    assert problem is not None
    assert problem[0] == "source"
    assert re.search(why, problem[1]), problem


def test_what_can_be_served_is_not_refused_and_takes_no_weights() -> None:
    for source in ("file.mar", "folder", "torchserve:folder", "torchserve:file.tar.gz"):
        assert problem_of(ModelSettings(source=source)) is None
        problem = problem_of(ModelSettings(source=source, weights="a.pth"))
        assert problem == ("weights", f"{source} takes no weights, but was given 'a.pth'")


def test_a_placement_in_parts_is_refused() -> None:
    for source in ("file.mar", "folder", "torchserve:folder"):
        with pytest.raises(ValueError, match="exported whole"):
            ModelSettings(source=source, placement="pipeline")


def test_the_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelSettings(source="file.mar")
    assert weights_file(model) == Path("file.mar")
    settings = load({"model": "file.mar"}, {}, Path.cwd()).settings
    (found,) = check_weights(None, settings)  # type: ignore[arg-type]  # it uses no facts
    assert (found.level, "whole and readable" in found.message) == ("ok", True)
    monkeypatch.setattr("inferpool.service.checks.weights.find_spec", lambda _: None)
    (found,) = check_weights(None, settings)  # type: ignore[arg-type]  # as above
    assert "pyyaml: not installed" in found.message


def test_a_watched_folder_may_hold_archives(here: Path) -> None:
    version = here / "models/toy/1"
    version.mkdir(parents=True)
    os.rename("file.mar", version / "file.mar")
    assert read_version(version)["source"].endswith("models/toy/1/file.mar")
    other = make_folder(here / "models/toy/2")
    assert read_version(other)["source"] == f"torchserve:{other}"


def test_a_swap_to_an_archive_is_read(here: Path) -> None:
    current = ModelSettings(source="folder")
    settings, _ = read_swap({"source": "file.mar", "max_batch_size": 5}, current)
    assert (settings.source, settings.max_batch_size) == ("file.mar", 5)


def test_a_tar_is_unpacked_once_for_its_facts(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened_archive(here / "file.tar.gz") as archive:
        archive.files()
        monkeypatch.setattr(type(archive), "members", None)
        assert b"modelName" in archive.read("MAR-INF/MANIFEST.json", 1 << 20)
