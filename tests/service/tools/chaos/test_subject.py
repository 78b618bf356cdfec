from pathlib import Path

from inferpool.service.settings.loader import load
from inferpool.service.tools.chaos.subject import rows_for

_FILE = """
port = 9
default_timeout_s = 7.0
tls_certificate = "cert.pem"

[models.mine]
source = "torchvision:resnet18"
weights = "none"
options = { n = 1 }
replicas = 3

[models.echo]
batch_timeout_s = 11.0
"""


def rows(tmp_path: Path, *, can_be_poisoned: bool) -> dict[tuple[str, ...], object]:
    (tmp_path / "inferpool.toml").write_text(_FILE)
    found = load({}, {"INFERPOOL_PREDICT_KEYS": "k" * 20}, tmp_path)
    return {key: value for key, value, _ in rows_for(found, can_be_poisoned=can_be_poisoned)}


def test_settings_of_the_user_are_kept_except_address_keys_and_the_default_batch_timeout(
    tmp_path: Path,
):
    found = rows(tmp_path, can_be_poisoned=False)
    assert found["default_timeout_s",] == 7.0
    assert found["speed_search",] is False
    assert found["models", "mine", "source"] == "torchvision:resnet18"
    assert found["models", "mine", "replicas"] == 3
    assert found["models", "mine", "batch_timeout_s"] == 5.0
    assert found["models", "echo", "batch_timeout_s"] == 11.0
    assert not [key for key in found if key == ("port",) or "keys" in key[0] or "tls" in key[0]]


def test_each_model_is_wrapped_in_poisonable(tmp_path: Path):
    found = rows(tmp_path, can_be_poisoned=True)
    place = ("models", "mine")
    assert found[*place, "source"] == "inferpool.models.sources.poisonable:Poisonable"
    assert found[*place, "weights"] == "DEFAULT"
    assert found[*place, "options", "source"] == "torchvision:resnet18"
    assert found[*place, "options", "weights"] == "none"
    assert found[*place, "options", "options"] == {"n": 1}
