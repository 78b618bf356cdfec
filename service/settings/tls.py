"""The TLS of the server: from two PEM files to a context, with errors for people."""

import base64
import re
import ssl
from datetime import UTC, datetime
from pathlib import Path

from inferpool.models.files.reading import read_file

_SEQUENCE, _EXPLICIT_0, _UTC_TIME = 0x30, 0xA0, 0x17
_SOON_DAYS = 7
_CERTIFICATE = re.compile(
    r"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----([^-]*)-----END", re.DOTALL
)
"""With the labels that OpenSSL reads too (openssl-pem(1ssl)): a trusted one has more after it."""


class TlsError(Exception):
    """The certificate or its key cannot be used; the message says which and why."""


def server_context(certificate: str, key: str | None) -> ssl.SSLContext:
    """A context that speaks TLS 1.2 and later.

    Args:
        certificate: A PEM file with the server's certificate first.
        key: A PEM file with its private key; None where that is in the same file.

    Raises:
        TlsError: A file is missing, unreadable, of another form, or they do not belong together.
    """
    for setting, path in (("tls_certificate", certificate), ("tls_key", key)):
        if path is not None:
            try:
                read_file(Path(path))  # no pipe: OpenSSL reads it once more
            except OSError as error:
                raise TlsError(f"{setting}: {path}: {error.strerror}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except ssl.SSLError as error:
        raise TlsError(_explained(error, certificate, key or certificate)) from error
    return context


def days_left(certificate: str, now: datetime | None = None) -> float:
    """How long the first certificate of a PEM file is still valid; negative where it is not."""
    found = _CERTIFICATE.search(Path(certificate).read_text(errors="replace"))
    assert found, "OpenSSL has found one"
    der = base64.b64decode(found[1])
    return (_not_after(der) - (now or datetime.now(UTC))).total_seconds() / 86_400


def expiry_warning(certificate: str, now: datetime | None = None) -> str:
    """What to say of a certificate that has expired or will within a week; else nothing."""
    left = days_left(certificate, now)
    if left < 0:
        return f"tls_certificate: {certificate} has expired: clients will refuse it"
    if left < _SOON_DAYS:
        return f"tls_certificate: {certificate} expires in {left:.1f} days"
    return ""


def _no_password() -> str:
    raise ssl.SSLError("PASSWORD")


def _explained(error: ssl.SSLError, certificate: str, key: str) -> str:
    text = str(error)
    if "KEY_VALUES_MISMATCH" in text:
        return f"tls_key: {key} is not the key of the certificate in {certificate}"
    if "PASSWORD" in text:
        return f"tls_key: {key} is encrypted; give a key without a password"
    if not _CERTIFICATE.search(Path(certificate).read_text(errors="replace")):
        return f"tls_certificate: {certificate} holds no certificate in PEM form"
    if key == certificate and "PRIVATE KEY-----" not in Path(key).read_text(errors="replace"):
        return (
            f"tls_certificate: {certificate} holds no private key; name the file of its key by "
            "tls_key (--tls-key)"
        )
    return (
        f"tls_key: {key} holds no private key in PEM form, or tls_certificate: {certificate} is "
        f"damaged ({error.reason or text})"
    )


def _not_after(der: bytes) -> datetime:
    """The end of a certificate's validity (RFC 5280, 4.1): certificate.tbs.validity.notAfter."""
    _, start, _ = _element(der, 0)
    _, position, _ = _element(der, start)  # into tbsCertificate
    tag, _, end = _element(der, position)
    if tag == _EXPLICIT_0:  # the version, which the first version leaves out
        _, _, end = _element(der, end)  # serialNumber
    _, _, end = _element(der, end)  # signature
    _, _, end = _element(der, end)  # issuer
    tag, start, _ = _element(der, end)
    assert tag == _SEQUENCE, "validity is a sequence"
    _, _, end = _element(der, start)  # notBefore
    tag, start, end = _element(der, end)
    text = der[start:end].decode("ascii").rstrip("Z")
    if tag == _UTC_TIME:  # two digits of the year: 1950 to 2049 (RFC 5280, 4.1.2.5.1)
        text = ("19" if int(text[:2]) >= 50 else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%S").replace(tzinfo=UTC)


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Tag, start and end of the content of the element that begins somewhere (X.690, 8.1)."""
    tag, length, start = der[at], der[at + 1], at + 2
    if length & 0x80:
        num = length & 0x7F
        length = int.from_bytes(der[start : start + num], "big")
        start += num
    return tag, start, start + length
