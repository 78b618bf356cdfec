from pathlib import Path

from inferpool.service.settings.loader import load
from inferpool.service.tools.tune.run import settings_text

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


def text_for(folder: Path, flags: dict[str, str]) -> str:
    """Return the file for what was found under some flags."""
    environ = {"INFERPOOL_PORT": "7000", "INFERPOOL_PREDICT_KEYS": "k" * 20}
    before, whole = load(flags, environ, folder), load({}, environ, folder)
    return settings_text(before, whole, _CHANGES, ["machine", "figures"])


def test_file_has_what_was_found_and_the_users_file_but_not_the_environment(tmp_path: Path):
    (tmp_path / "inferpool.toml").write_text(_FILE)
    text = text_for(tmp_path, {"model": "net"})
    assert text.startswith("# machine\n# figures\n\n")
    assert "7000" not in text
    assert "kkk" not in text
    (tmp_path / "tuned.toml").write_text(text)
    after = load({"config": "tuned.toml"}, {}, tmp_path)
    net = after.settings.models["net"]
    assert (net.replicas, net.max_batch_size, net.credit) == (1, 16, 3)
    assert after.settings.models["other"].options == {"delay_s": 0.5}
    said = {key for key, origin in after.origins.items() if origin.startswith("file")}
    own = {f"models.net.{name}" for name in ("source", "credit", "replicas", "max_batch_size")}
    others = {"default_model", "models.other.source", "models.other.options.delay_s"}
    assert said - {"port"} == own | others


def test_model_that_no_file_names_gets_a_file_of_its_own(tmp_path: Path):
    text = text_for(tmp_path, {"model": "torchvision:resnet18", "speed": "exact"})
    (tmp_path / "tuned.toml").write_text(text)
    (model,) = load({"config": "tuned.toml"}, {}, tmp_path).settings.models.values()
    assert (model.source, model.speed, model.replicas) == ("torchvision:resnet18", "exact", 1)
