"""Builds TLS contexts from PEM files, with errors for people."""

import base64
import re
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from inferpool.models.files.reading import read_file

_SOON_DAYS = 7
_CERTIFICATE = re.compile(
    r"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----([^-]*)-----END", re.DOTALL
)
"""A certificate with the labels that OpenSSL reads (openssl-pem(1ssl))."""
_VALIDITY = re.compile(
    rb"\x30.(?:\x17\x0d\d{12}|\x18\x0f\d{14})Z"
    rb"(?:\x17\x0d(?P<utc>\d{12})|\x18\x0f(?P<generalized>\d{14}))Z"
)
"""A sequence of two times in DER, each a UTCTime or a GeneralizedTime (X.690, 11.7 and 11.8)."""


class TlsError(Exception):
    """The certificate or its key cannot be used; the message says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsNames:
    """Names of the settings or flags that name the files, for errors."""

    certificate: str = "tls_certificate"
    key: str = "tls_key"
    authority: str = ""

    @property
    def key_flag(self) -> str:
        """How to name the file of the key."""
        return f"{self.key} (--{self.key.replace('_', '-')})" if self.key[0] != "-" else self.key


HTTPS = TlsNames()
CLUSTER = TlsNames(
    certificate="cluster_certificate", key="cluster_key", authority="cluster_authority"
)


def server_context(certificate: str, key: str | None) -> ssl.SSLContext:
    """Return a context for TLS 1.2 and later.

    Args:
        certificate: A PEM file with the server's certificate first.
        key: A PEM file with its private key; None if that is in the same file.

    Raises:
        TlsError: A file is missing, unreadable or of another form, or they do not belong together.
    """
    return _context(ssl.PROTOCOL_TLS_SERVER, certificate, key, HTTPS)


def mutual_context(
    certificate: str, key: str | None, authority: str, names: TlsNames, *, is_server: bool
) -> ssl.SSLContext:
    """Return a context for TLS 1.2 and later with certificates on both sides.

    Args:
        certificate: A PEM file with the certificate of this side first.
        key: A PEM file with its private key; None if that is in the same file.
        authority: A PEM file with the authorities that may have signed the other side's.
        names: What the files are called where the user names them.
        is_server: This side is dialed; if not, the other side's certificate must be for the name
            that was dialed.

    Raises:
        TlsError: A file is missing, unreadable or of another form, or they do not belong together.
    """
    kind = ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT
    context = _context(kind, certificate, key, names)
    context.verify_mode = ssl.CERT_REQUIRED
    _check_readable(names.authority, authority)
    try:
        context.load_verify_locations(authority)
    except ssl.SSLError as error:
        text = f"{names.authority}: {authority} holds no certificate in PEM form"
        raise TlsError(text) from error
    return context


def _context(
    kind: "ssl._SSLMethod", certificate: str, key: str | None, names: TlsNames
) -> ssl.SSLContext:
    for name, path in ((names.certificate, certificate), (names.key, key)):
        if path is not None:
            _check_readable(name, path)
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except ssl.SSLError as error:
        raise TlsError(_explained(error, certificate, key or certificate, names)) from error
    return context


def _check_readable(name: str, path: str) -> None:
    try:
        read_file(Path(path))  # a pipe is refused, since OpenSSL reads the file again
    except OSError as error:
        raise TlsError(f"{name}: {path}: {error.strerror}") from error


def days_left(certificate: str, now: datetime | None = None) -> float:
    """Return how many days the first certificate of a PEM file is still valid; may be negative."""
    found = _CERTIFICATE.search(Path(certificate).read_text(errors="replace"))
    assert found, "OpenSSL has found one"
    der = base64.b64decode(found[1])
    return (_not_after(der) - (now or datetime.now(UTC))).total_seconds() / 86_400


def expiry_warning(certificate: str, now: datetime | None = None) -> str:
    """Return a warning about a certificate that has expired or will within a week; else nothing."""
    left = days_left(certificate, now)
    if left < 0:
        return f"tls_certificate: {certificate} has expired: clients will refuse it"
    if left < _SOON_DAYS:
        return f"tls_certificate: {certificate} expires in {left:.1f} days"
    return ""


def is_trusted(certificate: str, key: str | None, host: str, *, names_it: bool = False) -> bool:
    """Return whether clients of this host trust a server with a certificate.

    Both sides speak in memory.

    Args:
        certificate: A PEM file with the server's certificate first.
        key: A PEM file with its private key; None if that is in the same file.
        host: The host that a client names.
        names_it: Clients are told to trust the certificate, as by curl's `--cacert`.

    Raises:
        TlsError: A file cannot be used.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context(cafile=certificate if names_it else None)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as curl does
    client = context.wrap_bio(to_client, to_server, server_hostname=host)
    server = server_context(certificate, key).wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError:
            return False
    return True


def _no_password() -> str:
    raise ssl.SSLError("PASSWORD")


def _explained(error: ssl.SSLError, certificate: str, key: str, names: TlsNames) -> str:
    text = str(error)
    if "KEY_VALUES_MISMATCH" in text:
        return f"{names.key}: {key} is not the key of the certificate in {certificate}"
    if "PASSWORD" in text:
        return f"{names.key}: {key} is encrypted; give a key without a password"
    if not _CERTIFICATE.search(Path(certificate).read_text(errors="replace")):
        return f"{names.certificate}: {certificate} holds no certificate in PEM form"
    if key == certificate and "PRIVATE KEY-----" not in Path(key).read_text(errors="replace"):
        return (
            f"{names.certificate}: {certificate} holds no private key; name the file of its key by "
            f"{names.key_flag}"
        )
    return (
        f"{names.key}: {key} holds no private key in PEM form, or {names.certificate}: "
        f"{certificate} is damaged ({error.reason or text})"
    )


def _not_after(der: bytes) -> datetime:
    """Return the end of a certificate's validity, which is a pair of times (RFC 5280, 4.1.2.5)."""
    found = _VALIDITY.search(der)
    assert found, "a certificate has a validity"
    short, long = found["utc"], found["generalized"]
    # A short time has two digits of the year: 1950 to 2049.
    text = long or (b"19" if short >= b"50" else b"20") + short
    return datetime.strptime(text.decode(), "%Y%m%d%H%M%S").replace(tzinfo=UTC)
