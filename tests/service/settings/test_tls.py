import shutil
import ssl
import subprocess
from datetime import UTC, datetime, timedelta

import pytest

from inferpool.service.settings.tls import TlsError, days_left, expiry_warning, server_context
from tests.certificates import make_certificate

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("tls"))


def test_a_certificate_and_its_key_make_a_context_without_old_protocols(pair, tmp_path):
    certificate, key = map(str, pair)
    assert server_context(certificate, key).minimum_version == ssl.TLSVersion.TLSv1_2
    both = tmp_path / "both.pem"
    both.write_text("".join(path.read_text() for path in pair))
    server_context(str(both), None)  # the key may be in the file of the certificate


def test_errors_name_the_unusable_file(pair, tmp_path):
    certificate, key = map(str, pair)
    _, other = make_certificate(tmp_path, "other")
    junk = tmp_path / "junk"
    junk.write_text("nothing")
    encrypted = tmp_path / "encrypted"
    subprocess.run(
        ["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:1234", "-out", encrypted],
        check=True,
        timeout=120,
    )
    for given, message in {
        ("/none.pem", key): "tls_certificate: /none.pem: No such file",
        (certificate, "/none.key"): "tls_key: /none.key: No such file",
        (str(tmp_path), key): "it is a folder",
        (certificate, str(other)): "is not the key of the certificate",
        (str(junk), key): "holds no certificate in PEM form",
        (certificate, str(junk)): "holds no private key in PEM form",
        (certificate, None): "holds no private key; name the file of its key by tls_key",
        (certificate, str(encrypted)): "is encrypted",
    }.items():
        with pytest.raises(TlsError, match=message):
            server_context(*given)


@pytest.mark.parametrize("days", [1, 30, 20_000])  # the last one ends after 2049
def test_days_left_are_read_from_the_certificate(tmp_path, days):
    certificate, _ = make_certificate(tmp_path, days=days)
    assert days - 0.01 < days_left(str(certificate)) <= days


def test_days_left_are_read_from_openssls_own_label_too(pair, tmp_path):
    trusted = tmp_path / "trusted.pem"
    command = ["openssl", "x509", "-in", pair[0], "-trustout", "-out", trusted]
    subprocess.run(command, check=True, timeout=120)
    server_context(str(trusted), str(pair[1]))
    assert 29 < days_left(str(trusted)) <= 30


def test_a_certificate_that_has_expired_or_soon_will_is_warned_of(pair):
    certificate = str(pair[0])
    now = datetime.now(UTC)
    assert expiry_warning(certificate, now) == ""
    assert "expires in 3" in expiry_warning(certificate, now + timedelta(days=26.5))
    assert "has expired" in expiry_warning(certificate, now + timedelta(days=31))
