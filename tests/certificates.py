"""Certificates for tests, self-signed or of an authority, made with the `openssl` command."""

import subprocess
from pathlib import Path

_NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1"


def make_certificate(folder: Path, name: str = "server", *, days: int = 30) -> tuple[Path, Path]:
    """Make a certificate for localhost and 127.0.0.1; return its file and its key's."""
    return _make(folder, name, "localhost", days, "-addext", _NAMES)


def make_authority(folder: Path, name: str = "authority") -> tuple[Path, Path]:
    """Make an authority that signs certificates; return its certificate and its key."""
    return _make(folder, name, "tests", 30, "-addext", "keyUsage=critical,keyCertSign")


def make_signed(folder: Path, name: str, authority: tuple[Path, Path]) -> tuple[Path, Path]:
    """Make a certificate for localhost and 127.0.0.1 that an authority has signed.

    It is good for both sides of a connection. Returns its file and its key's.
    """
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    request, extensions = folder / f"{name}.csr", folder / f"{name}.ext"
    extensions.write_text(
        f"{_NAMES}\nauthorityKeyIdentifier=keyid\nbasicConstraints=CA:FALSE\n"
        "extendedKeyUsage=serverAuth,clientAuth\n"
    )
    _openssl("req", "-new", *_key(key), "-subj", f"/CN={name}", "-out", str(request))
    _openssl(
        *("x509", "-req", "-in", str(request), "-days", "30", "-out", str(certificate)),
        *("-CA", str(authority[0]), "-CAkey", str(authority[1]), "-extfile", str(extensions)),
    )
    return certificate, key


def _make(folder: Path, name: str, subject: str, days: int, *arguments: str) -> tuple[Path, Path]:
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    about = ("-subj", f"/CN={subject}", "-days", str(days), *arguments)
    _openssl("req", "-x509", *_key(key), *about, "-out", str(certificate))
    return certificate, key


def _key(path: Path) -> tuple[str, ...]:
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    return (*kind, "-keyout", str(path))


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)
