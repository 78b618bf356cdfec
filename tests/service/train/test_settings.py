import io
import os
import sys
import tomllib
from argparse import ArgumentParser
from pathlib import Path

import pytest

from inferpool.service.settings.names import SettingsError
from inferpool.service.train.flags import add_flags
from inferpool.service.train.settings import TrainSettings, load_settings, write_settings


def loaded(*arguments: str | Path) -> TrainSettings:
    parser = ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    return load_settings(parser.parse_args([*map(str, arguments)]))


def problems(*arguments: str | Path) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        loaded(*arguments)
    assert not any("\n" in each for each in caught.value.problems)
    return caught.value.problems


def test_a_folder_is_enough():
    settings = loaded("photos")
    assert settings == TrainSettings(data="photos")
    assert (settings.model, settings.weights, settings.val) == (
        *("torchvision:resnet18", "DEFAULT", "0.2"),
    )


def test_a_run_is_not_resumed_and_overwritten(capsys):
    with pytest.raises(SystemExit):
        loaded("photos", "--resume", "--overwrite")
    assert "not allowed with" in capsys.readouterr().err


def test_flags_override_a_file(tmp_path):
    file = tmp_path / "train.toml"
    file.write_text(
        'data = "a"\nval = 0.3\nepochs = 5\nflip = false\nnodes = 1\n'
        "[options]\ndropout = 0.5\nwidth = 2\n"
    )
    settings = loaded("b", "--config", file, "--flip", "--options", "width=3", "--epochs", "auto")
    assert (settings.data, settings.val, settings.epochs, settings.flip, settings.nodes) == (
        *("b", "0.3", "auto", True, "1"),
    )
    assert settings.options == {"dropout": 0.5, "width": 3}


def test_a_yaml_file_is_read_with_numbers_as_yaml_1_1_has_them(tmp_path):
    file = tmp_path / "train.yaml"
    file.write_text(
        "data: a\nlearning_rate: 1e-3\nweights: none\nepochs: 3\noptions:\n  width: 2\n"
    )
    settings = loaded("--config", file)
    assert (settings.learning_rate, settings.weights, settings.epochs) == (0.001, "none", 3)
    assert settings.options == {"width": 2}


def test_without_pyyaml_a_yaml_file_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "train.yml").write_text("data: a\n")
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert problems("--config", tmp_path / "train.yml")[0].endswith(
        "YAML needs pyyaml: pip install 'inferpool[train]'"
    )


def test_a_run_is_resumed_with_its_own_settings(tmp_path):
    (tmp_path / "train.toml").write_text('data = "a"\nepochs = 7\n')
    settings = loaded("--resume", "--output", tmp_path)
    assert (settings.data, settings.epochs, settings.output) == ("a", 7, str(tmp_path))
    text = problems("--resume", "--output", tmp_path / "none")[0]
    assert text.startswith("--resume: there is no file ")


def test_settings_are_read_as_they_were_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    settings = loaded(
        *("photos", "--epochs", "3", "--learning-rate", "0.01", "--no-flip", "--val", "photos"),
        *("--options", "dropout=0.1", "--options", "name=x", "--precision", "bf16"),
    )
    stream = io.StringIO()
    write_settings(settings, stream)
    (tmp_path / "again.toml").write_text(stream.getvalue())
    assert {*tomllib.loads(stream.getvalue())} == {*TrainSettings.model_fields} - {
        "dataset_options"
    }
    again = loaded("--config", "again.toml")
    photos = os.path.abspath("photos")
    assert again == settings.model_copy(update={"data": photos, "val": photos})


def test_a_file_of_weights_is_the_same_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine.pth", "none"):
        (tmp_path / name).touch()
    assert loaded("a", "--weights", "mine.pth").weights == str(tmp_path / "mine.pth")
    assert loaded("a", "--weights", "none").weights == "none"
    assert loaded("a", "--weights", "IMAGENET1K_V1").weights == "IMAGENET1K_V1"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "there is nothing to train on"),
        (
            ["a", "--epochs", "0"],
            "--epochs: '0' is not \"auto\" or a whole number from 1 to 1000000",
        ),
        (
            ["a", "--epochs", "x"],
            "--epochs: 'x' is not \"auto\" or a whole number from 1 to 1000000",
        ),
        (
            ["a", "--learning-rate", "-1"],
            "--learning-rate: '-1' is not \"auto\" or a number above 0",
        ),
        (["a", "--augment", "much"], '--augment: \'much\' is not "auto" or "none" or "shift"'),
        (["a", "--val", "1.5"], "--val: '1.5' is no share of the images"),
        (["a", "--val", "0"], "--val: '0' is no share of the images"),
        (["a", "--dataset", "m:C"], "--dataset: the images come from a"),
        (["--dataset", "m.C"], "--dataset: 'm.C' is not a class such as"),
        (["a", "--dataset-options", "x=1"], "--dataset-options: there is no --dataset"),
        (["a", "--options", "x"], "--options: 'x' is not KEY=VALUE"),
        (["a", "--devices", "gpu"], '--devices: \'gpu\' is not "auto", "cpu", "cuda"'),
        (["a", "--devices", "cpu,cuda"], "mixes devices of several kinds"),
        (["a", "--devices", "cuda:0,0"], "names a device twice"),
        (["a", "--devices", "GPU-12"], "names a GPU by its UUID"),
        (["a", "--nodes", "3:2"], "--nodes: '3:2' is neither a number of hosts nor MIN:MAX"),
        (["a", "--nodes", "2"], "--nodes: 2 hosts need --rdzv HOST:PORT"),
        (["a", "--rdzv", "here"], "--rdzv: 'here' is not HOST:PORT"),
        (["a", "--weights", "none", "--head-only-epochs", "1"], "--head-only-epochs: 1 epochs of"),
        (["a", "--epochs", "2", "--head-only-epochs", "3"], "--head-only-epochs: 3 are more than"),
        (["a", "--config", "nowhere.toml"], "--config: there is no file nowhere.toml"),
        (["a", "--config", "nowhere.yaml"], "--config: nowhere.yaml cannot be read"),
    ],
)
def test_what_cannot_be_used_is_said_with_its_flag(arguments: list[str], problem: str):
    found = problems(*arguments)
    assert len(found) == 1
    assert problem in found[0]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("t.toml", "epoch = 3\n", ": epoch: there is no such setting; did you mean epochs?"),
        ("t.toml", 'epochs = "3"\n', ": epochs: '3' is not \"auto\" or a whole number"),
        ("t.toml", "epochs = \n", "t.toml, line 1, column "),
        ("t.toml", "options = 3\n", ": options: 3 is not a table"),
        ("t.yaml", "epoch: 3\n", ": epoch: there is no such setting; did you mean epochs?"),
        ("t.yaml", "a: [\n", "t.yaml: while parsing"),
        ("t.yaml", "[1, 2]\n", "it has no settings"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_its_place(tmp_path, name, text, problem):
    (tmp_path / name).write_text(text)
    found = problems("a", "--config", tmp_path / name)
    assert len(found) == 1
    assert str(tmp_path) in found[0]
    assert problem in found[0]


@pytest.mark.parametrize(
    ("arguments", "has_weights"),
    [
        ([], True),
        (["--weights", "none"], False),
        (["--weights", "None"], False),
        (["--model", "efficientnet_lite0"], True),
        (["--model", "nets:Mine"], False),
        (["--model", "nets:Mine", "--weights", "mine.pth"], True),
    ],
)
def test_a_class_of_the_users_has_no_weights_of_its_own(arguments, has_weights):
    assert loaded("a", *arguments).has_weights is has_weights


def test_hosts_are_a_number_or_two():
    assert loaded("a").num_nodes == (1, 1)
    assert loaded("a", "--nodes", "2:4", "--rdzv", "trainer-0:29400").num_nodes == (2, 4)
