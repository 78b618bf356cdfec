from pathlib import Path

import pytest

from inferpool.service.settings.loader import load
from inferpool.service.settings.names import SettingsError

KEY = "k" * 20


def test_a_cluster_needs_only_a_port_and_a_key(tmp_path: Path):
    (tmp_path / "keys").write_text(KEY)
    flags = {"cluster_port": "9000", "cluster_keys_file": "keys"}
    settings = load(flags, {}, tmp_path).settings
    assert (settings.cluster_host, settings.cluster_port) == ("127.0.0.1", 9000)
    assert str(settings.cluster_keys) == "1 hidden"
    assert load({}, {}, tmp_path).settings.cluster_port is None


@pytest.mark.parametrize(
    ("flags", "environ", "problem"),
    [
        ({"cluster_port": "9000"}, {}, "--cluster-port: 9000 needs a key that agents must know"),
        ({"cluster_port": "9000"}, {"INFERPOOL_CLUSTER_KEYS": "short"}, "fewer than 16"),
        ({"cluster_certificate": "a.pem"}, {}, "of no use alone; set cluster_authority too"),
        ({"cluster_key": "a.pem"}, {}, "of no use alone; set cluster_certificate too"),
        ({"standby_of": "10.0.0.1:9000"}, {}, "set cluster_port too"),
        ({"standby_of": "10.0.0.1"}, {}, "write HOST:PORT"),
    ],
)
def test_settings_of_a_cluster_that_cannot_work_are_refused(
    flags: dict[str, str], environ: dict[str, str], problem: str, tmp_path: Path
):
    with pytest.raises(SettingsError, match=problem):
        load(flags, environ, tmp_path)
