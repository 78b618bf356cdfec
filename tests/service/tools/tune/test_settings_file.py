from pathlib import Path

from inferpool.service.settings.loader import LoadedSettings, load
from inferpool.service.tools.tune.settings_file import settings_text

_FILE = """
port = 9001
default_model = "other"
[models.net]
source = "torchvision:resnet18"
credit = 3
[models.other]
source = "echo"
options = { delay_s = 0.5 }
"""
_CHANGES = {"replicas": 1, "max_batch_size": 16}


def written(
    tmp_path: Path, flags: dict[str, str], changes: dict[str, object], environ: dict[str, str]
) -> LoadedSettings:
    """Write the file, and load it again."""
    own = {name: text for name, text in flags.items() if name == "config"}
    before, whole = load(flags, environ, tmp_path), load(own, environ, tmp_path)
    text = settings_text(before, whole, changes, ["machine", "figures"])
    assert text.startswith("# machine\n# figures\n\n")
    (tmp_path / "tuned.toml").write_text(text)
    return load({"config": "tuned.toml"}, {}, tmp_path)


def test_file_has_what_was_found_and_the_users_other_settings(tmp_path: Path):
    (tmp_path / "inferpool.toml").write_text(_FILE)
    after = written(tmp_path, {"model": "net"}, {**_CHANGES}, {})
    settings = after.settings
    assert (settings.port, settings.default_model) == (9001, "other")
    net = settings.models["net"]
    assert (net.replicas, net.max_batch_size, net.credit) == (1, 16, 3)
    assert settings.models["other"].options == {"delay_s": 0.5}
    said = {key for key, origin in after.origins.items() if origin.startswith("file")}
    assert said == {
        "port",
        "default_model",
        *(f"models.net.{name}" for name in ("source", "credit", "replicas", "max_batch_size")),
        "models.other.source",
        "models.other.options.delay_s",
    }


def test_model_that_no_file_names_gets_a_file_of_its_own(tmp_path: Path):
    after = written(tmp_path, {"model": "torchvision:resnet18", "speed": "exact"}, {**_CHANGES}, {})
    (model,) = after.settings.models.values()
    assert (model.source, model.speed, model.replicas) == ("torchvision:resnet18", "exact", 1)


def test_environment_is_left_where_it_is_and_keys_are_not_written(tmp_path: Path):
    (tmp_path / "inferpool.toml").write_text(_FILE)
    environ = {"INFERPOOL_PORT": "7000", "INFERPOOL_PREDICT_KEYS": "k" * 20}
    written(tmp_path, {"model": "net"}, {}, environ)
    text = (tmp_path / "tuned.toml").read_text()
    assert "7000" not in text
    assert "kkk" not in text
