"""Code that verbs share which ask a service with the client."""

import os
import ssl
import sys
from argparse import Namespace
from collections.abc import Callable

from inferpool.service.cli.flags import PREDICT_KEY_VARIABLE
from inferpool.service.client import InferpoolError
from inferpool.service.settings.address import key_of
from inferpool.service.settings.names import FlagError
from inferpool.service.settings.urls import without_password


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
            sys.stderr.write(f"inferpool {verb}: {error.detail}; trying again{how_long}\n")

    return tell


def lost_text(verb: str, url: str) -> str:
    """Return a question for a user whose service does not answer."""
    return (
        f"inferpool {verb}: is a service running at {without_password(url)}? "
        "`inferpool serve` starts one, --url names another\n"
    )
