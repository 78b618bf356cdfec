"""Self-signed certificates, made with the `openssl` command."""

import subprocess
from pathlib import Path


def make_certificate(folder: Path, name: str = "server", *, days: int = 30) -> tuple[Path, Path]:
    """Make a certificate for localhost and 127.0.0.1; return its file and its key's."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-subj", "/CN=localhost", "-days", str(days)),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
        timeout=30,
    )
    return certificate, key
