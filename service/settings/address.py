"""Command line flags for the address of a running service, the key to send, and TLS.

Every start of the command imports this, so it imports little.
"""

from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path

from inferpool.models.files.reading import read_file
from inferpool.service.settings.keys import first_key
from inferpool.service.settings.names import FlagError
from inferpool.service.settings.urls import DEFAULT_URL, problem_of_address, without_password

_PIPE_WAIT_S = 10.0


def add_url_flag(parser: ArgumentParser) -> None:
    """Add `--url`."""
    parser.add_argument(
        "--url", default=DEFAULT_URL, help=f"address of the service (default: {DEFAULT_URL})"
    )


def add_access_flags(parser: ArgumentParser, kind: str, key_variable: str) -> None:
    """Add `--key-file`, `--ca-file` and `--insecure`.

    Args:
        parser: The verb's parser.
        kind: What the keys are for.
        key_variable: The variable to take a key from if no file is named.
    """
    access = parser.add_argument_group("access")
    access.add_argument(
        "--key-file",
        type=Path,
        metavar="PATH",
        help=f"send the first key in it, where the service has keys for {kind} (default: the first "
        f"of {key_variable})",
    )
    access.add_argument(
        "--ca-file", type=Path, metavar="PATH", help="trust the certificates in this PEM file"
    )
    access.add_argument("--insecure", action="store_true", help="trust any certificate")


def address_of(text: str) -> tuple[str, int]:
    """Return the host and the port of `HOST:PORT`, with brackets around an IPv6 address.

    Raises:
        ValueError: The text has another form.
    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"{text[:80]!r} is not HOST:PORT")
    return host, int(port)


def url_of(text: str) -> str:
    """Return the address of a service without a trailing slash; `host:port` is enough.

    Raises:
        FlagError: The text is not an address.
    """
    url = text if "://" in text else f"http://{text}"
    if problem := problem_of_address(url):
        shown = without_password(url)
        raise FlagError(
            f"{shown!r} is not the address of a service, such as {DEFAULT_URL}: {problem}"
        )
    return url.rstrip("/")


def key_of(path: Path | None, environ: Mapping[str, str], key_variable: str) -> str:
    """Return the key to send, from a file or else from a variable; empty for none.

    Raises:
        FlagError: The file cannot be read, or holds something that is not a key.
    """
    if path is None:
        where, text = key_variable, environ.get(key_variable, "")
    else:
        where = str(path)
        try:
            text = read_file(path, wait_s=_PIPE_WAIT_S).decode()
        except OSError as error:
            raise FlagError(f"--key-file: {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise FlagError(f"--key-file: {path}: {error}") from error
    try:
        return first_key(text)
    except ValueError as error:
        raise FlagError(f"{where}: {error}") from error
