"""Fixtures for hosts and agents: TLS with certificates on both sides."""

import ssl
from pathlib import Path

import pytest

from tests.certificates import make_authority, make_signed

Contexts = tuple[ssl.SSLContext, ssl.SSLContext]


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Return a certificate for both sides, its key, and the authority that has signed it."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = make_authority(folder)
    certificate, key = make_signed(folder, "host", authority)
    return certificate, key, authority[0]


@pytest.fixture(scope="session")
def tls(certificates: tuple[Path, Path, Path]) -> Contexts:
    """Return the contexts of a front end and of an agent."""
    certificate, key, authority = certificates
    contexts = (
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority),
        ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=authority),
    )
    for context in contexts:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(certificate, key)
    return contexts
