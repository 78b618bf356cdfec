"""Helpers that users' handlers import from `ts.utils.util`."""

import json
from pathlib import Path

import pytest

from inferpool.models.errors import ModelError
from inferpool.models.torchserve.handlers import util
from inferpool.models.torchserve.handlers.util import (
    CLEANUP_REGEX,
    PredictionException,
    check_valid_pt2_backend,
    get_yaml_config,
    list_classes_from_module,
    load_label_mapping,
    map_class_to_label,
)


def test_names_of_classes_have_several_forms(tmp_path: Path):
    path = tmp_path / "index_to_name.json"
    assert load_label_mapping(path) is None
    for written, names in (
        ({"0": "cat", "1": ["n02", "dog"]}, {"0": "cat", "1": "dog"}),
        ({"object_type_names": ["cat", "dog"]}, {"0": "cat", "1": "dog"}),
    ):
        path.write_text(json.dumps(written))
        assert load_label_mapping(str(path)) == names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "must hold an object"),
        ('{"0": 1}', "class '0' has no text as its name, but 1"),
        ('{"0": []}', r"class '0' has no text as its name, but \[\]"),
    ],
)
def test_names_that_are_none_are_refused(text: str, message: str, tmp_path: Path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        load_label_mapping(tmp_path / "a.json")


def test_values_get_the_names_of_their_classes():
    rows = [[0.9, 0.1], [0.6, 0.4]]
    assert map_class_to_label(rows) == [{"0": 0.9, "1": 0.1}, {"0": 0.6, "1": 0.4}]
    named = map_class_to_label(rows, {"0": "cat", "1": "dog"}, [[1, 0], [0, 1]])
    assert named == [{"dog": 0.9, "cat": 0.1}, {"cat": 0.6, "dog": 0.4}]
    with pytest.raises(TypeError, match="must be a list, not tuple"):
        map_class_to_label((0.9, 0.1))  # type: ignore[arg-type]  # as a user's code may


def test_only_classes_of_the_module_itself_are_listed():
    assert list_classes_from_module(util) == [PredictionException]
    assert list_classes_from_module(util, ValueError) == []


def test_an_error_of_a_handler_has_a_status():
    error = PredictionException("try later", 429)
    assert (str(error), error.message, error.error_code) == ("try later : 429", "try later", 429)
    assert PredictionException("failed").error_code == 500


def test_yaml_makes_no_objects(tmp_path: Path):
    path = tmp_path / "a.yaml"
    path.write_text("batchSize: 4\n")
    assert get_yaml_config(str(path)) == {"batchSize": 4}
    path.write_text("a: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(Exception, match="could not determine a constructor"):
        get_yaml_config(path)


def test_backends_of_torch_compile_are_known_by_name(caplog: pytest.LogCaptureFixture):
    assert check_valid_pt2_backend("inductor")
    assert check_valid_pt2_backend("eager")
    assert not caplog.records
    assert not check_valid_pt2_backend("lost")
    assert "no backend 'lost'" in caplog.text


def test_tags_and_entities_of_html_are_found():
    assert CLEANUP_REGEX.sub("", "<b>a</b> &lt; <\n>") == "a  <\n>"
