"""Reads the flags for the address of a service, the key to send, TLS and parameters."""

import errno
import json
import os
import select
import ssl
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..errors import InferpoolError
from ..keys import first_key
from ..urls import DEFAULT_URL, problem_of_address, without_password
from ..usage import COMMAND, FlagError
from .flags import PREDICT_KEY_VARIABLE

_MAX_KEY_FILE_BYTES = 1 << 20
_PIPE_WAIT_S = 10.0
"""The longest wait for a key that another process writes into a pipe."""


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


def _read_key_file(path: Path, wait_s: float) -> bytes:
    if path.is_symlink() and not path.exists():
        reason = f"it is a link to {os.readlink(path)}, which is not there"
        raise FileNotFoundError(errno.ENOENT, reason)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder, not a file")
    if path.exists() and not path.is_file():
        return _read_pipe(path, wait_s)
    with path.open("rb") as file:
        return file.read(_MAX_KEY_FILE_BYTES)


def _read_pipe(path: Path, wait_s: float) -> bytes:
    until = time.monotonic() + wait_s
    content = b""
    # Without O_NONBLOCK, to open a pipe waits until somebody writes into it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    with open(descriptor, "rb", buffering=0) as pipe:
        while len(content) < _MAX_KEY_FILE_BYTES:
            if not select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
                reason = f"it is a pipe, and nobody wrote all of it within {wait_s:g} s"
                raise TimeoutError(errno.ETIMEDOUT, reason)
            piece = pipe.read(1 << 16)
            if not piece:
                break
            content += piece
    return content


def key_of(
    path: Path | None,
    environ: Mapping[str, str],
    key_variable: str,
    wait_s: float = _PIPE_WAIT_S,
) -> str:
    """Return the key to send, from a file or else from a variable; empty for none.

    Raises:
        FlagError: The file cannot be read, or holds an invalid key.
    """
    if path is None:
        where, text = key_variable, environ.get(key_variable, "")
    else:
        where = str(path)
        try:
            text = _read_key_file(path, wait_s).decode()
        except OSError as error:
            raise FlagError(f"--key-file: {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise FlagError(f"--key-file: {path}: {error}") from error
    try:
        return first_key(text)
    except ValueError as error:
        raise FlagError(f"{where}: {error}") from error


def access_of(args: Namespace) -> tuple[str, bool | ssl.SSLContext]:
    """Return the `key` and `verify` of a client for `--key-file`, `--ca-file` and `--insecure`.

    Raises:
        FlagError: A file cannot be used.
    """
    verify: bool | ssl.SSLContext = not args.insecure
    if verify and args.ca_file is not None:
        try:
            verify = ssl.create_default_context(cafile=str(args.ca_file))
        except OSError as error:
            raise FlagError(f"--ca-file: {args.ca_file}: {error}") from error
    return key_of(args.key_file, os.environ, PREDICT_KEY_VARIABLE), verify


def context_of(args: Namespace) -> ssl.SSLContext:
    """Return the TLS context for `--ca-file` and `--insecure`.

    Raises:
        FlagError: The file cannot be used.
    """
    try:
        return tls_context(False if args.insecure else str(args.ca_file or "") or True)
    except OSError as error:
        raise FlagError(f"--ca-file: {args.ca_file}: {error}") from error


def tls_context(verify: bool | str) -> ssl.SSLContext:
    """Return the TLS context; `verify` is a PEM file, or False to trust any certificate."""
    context = ssl.create_default_context(cafile=verify if isinstance(verify, str) else None)
    if verify is False:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def parameters_of(texts: Sequence[str], flag: str = "--parameter") -> dict[str, object]:
    """Read each `NAME=VALUE`; the value is JSON or else a text.

    Raises:
        FlagError: A text has another form.
    """
    parameters: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise FlagError(f"{flag}: {text!r} is not NAME=VALUE")
        try:
            parameters[name] = json.loads(value)
        except ValueError:
            parameters[name] = value
    return parameters


def check_is_file(name: str) -> None:
    """Refuse a URL in the place of a file.

    Raises:
        FlagError: It is one.
    """
    if "://" in name:
        shown = without_password(name)
        is_service = shown.startswith(("http://", "https://"))
        hint = f"a service is named by --url {shown}" if is_service else "download it first"
        raise FlagError(f"{shown!r} is not a file; {hint}")


def retry_printer(verb: str, how_long: str) -> Callable[[InferpoolError, float], None]:
    """Return a function that prints why there is no answer yet, each kind of reason once."""
    told = set()

    def tell(error: InferpoolError, _: float) -> None:
        if error.code not in told:
            told.add(error.code)
            sys.stderr.write(f"{COMMAND} {verb}: {error.detail}; trying again{how_long}\n")

    return tell


def lost_text(verb: str, url: str) -> str:
    """Return the message for a service that does not answer."""
    return (
        f"{COMMAND} {verb}: is a service running at {without_password(url)}? "
        "`inferpool serve` starts one, --url names another\n"
    )
