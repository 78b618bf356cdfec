import socket
import ssl
from pathlib import Path

import pytest

from inferpool.service.errors import StartError
from inferpool.service.parts.cluster.door import open_door
from inferpool.service.settings.draft import read_keys
from inferpool.service.settings.settings import Settings
from inferpool.service.settings.tls import TlsError
from tests.certificates import make_authority, make_signed

KEYS = read_keys("k" * 20)


def settings_with(**changes: object) -> Settings:
    given = {"cluster_keys": KEYS, "cluster_port": 0, **changes}
    return Settings.model_validate({"models": {}, "default_model": "", **given})


def test_without_a_port_there_is_no_cluster():
    assert open_door(settings_with(cluster_port=None)) is None


def test_a_port_in_use_is_named_by_its_flag():
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(StartError, match="Choose another with --cluster-port"),
    ):
        open_door(settings_with(cluster_port=other.getsockname()[1]))


def test_an_address_that_is_not_private_needs_tls_or_a_word(caplog: pytest.LogCaptureFixture):
    with pytest.raises(StartError, match="without TLS, and that address is not private"):
        open_door(settings_with(cluster_host="0.0.0.0"))
    door = open_door(settings_with(cluster_host="0.0.0.0", cluster_insecure=True))
    assert door is not None
    assert door.address.startswith("0.0.0.0:")
    assert "reads along" in caplog.text
    door.listener.close()


def test_both_sides_show_certificates(tmp_path: Path):
    authority = make_authority(tmp_path)
    certificate, key = make_signed(tmp_path, "front", authority)
    files = {
        "cluster_certificate": str(certificate),
        "cluster_key": str(key),
        "cluster_authority": str(authority[0]),
    }
    door = open_door(settings_with(cluster_host="0.0.0.0", **files))
    assert door is not None
    assert door.tls is not None
    assert door.dialing_tls is not None
    assert door.tls.verify_mode == door.dialing_tls.verify_mode == ssl.CERT_REQUIRED
    assert door.dialing_tls.check_hostname
    door.listener.close()
    with pytest.raises(TlsError, match=r"cluster_authority: .* holds no certificate"):
        open_door(settings_with(**files | {"cluster_authority": str(key)}))
    _, other = make_signed(tmp_path, "other", authority)
    with pytest.raises(TlsError, match=r"cluster_key: .* is not the key of"):
        open_door(settings_with(**files | {"cluster_key": str(other)}))
