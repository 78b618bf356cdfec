"""The model in a folder that a platform has filled."""

import json

import pytest

from inferpool.service.settings.loader import load
from inferpool.service.settings.model_folder import source_in, table_of_folder
from inferpool.service.settings.names import SettingsError


def problem(folder) -> str:
    with pytest.raises(SettingsError) as caught:
        source_in(folder, "PLACE")
    return str(caught.value)


def test_the_only_file_of_a_model_is_its_source(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "Net.pt2").write_bytes(b"")
    assert table_of_folder(tmp_path, "PLACE") == {
        "models": {"net": {"source": f"{tmp_path}/Net.pt2"}}
    }


def test_a_folder_of_transformers_or_an_archive_is_a_model_itself_or_below(tmp_path):
    (tmp_path / "a" / "MAR-INF").mkdir(parents=True)
    (tmp_path / "a" / "MAR-INF" / "MANIFEST.json").write_text("{}")
    assert source_in(tmp_path, "") == f"torchserve:{tmp_path}/a"
    assert source_in(tmp_path / "a", "") == f"torchserve:{tmp_path}/a"
    run = tmp_path / "run"
    run.mkdir()
    (run / "card.json").write_text(json.dumps({}))
    assert source_in(run, "") == str(run)


def test_several_models_and_none_are_errors_that_list_what_was_found(tmp_path):
    assert problem(tmp_path).startswith(f"PLACE: {tmp_path} is empty; put there one of .pt2,")
    (tmp_path / "code").mkdir()
    (tmp_path / "model.joblib").write_bytes(b"")
    text = problem(tmp_path)
    assert "code, model.joblib (inference.py is for SageMaker's toolkits" in text
    for name in ("a.mar", "b.onnx"):
        (tmp_path / name).write_bytes(b"")
    assert f"PLACE: {tmp_path} has several models: a.mar, b.onnx; leave one" in problem(tmp_path)


def test_a_file_of_settings_there_counts_with_paths_from_its_folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "net.onnx").write_bytes(b"")
    (folder / "inferpool.toml").write_text(
        'max_queue_length = 7\n[models.a]\nsource = "net.onnx"\n[models.b]\nsource = "echo"\n'
    )
    settings = load({}, {"AIP_STORAGE_URI": str(folder)}, tmp_path).settings
    assert settings.max_queue_length == 7
    sources = {name: model.source for name, model in settings.models.items()}
    assert sources == {"a": f"{folder}/net.onnx", "b": "echo"}
