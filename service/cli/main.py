"""The command `inferpool`, from its arguments to its exit status."""

import errno
import io
import os
import sys
from collections.abc import Sequence

from inferpool.service.cli.parser import USAGE_ERROR, make_parser, nearest, unrecognised
from inferpool.service.cli.verbs import VERBS
from inferpool.service.settings.names import FlagError, SettingsError, StateFileError

NOT_INSTALLED = 1
"""Exit status if only the client is installed, and the verb needs more."""
UNUSABLE_STATE = 1
"""Exit status if the file of changes made at run time cannot be used."""
OUTPUT_LOST = 1
"""Exit status if stdout could not be written."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells (128 + SIGINT)."""
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of an output whose disk is full or gone."""


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command line, by default that of this process; return the exit status."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process
            nowhere = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(nowhere, "w", encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # names and labels may be in any alphabet
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        _discard_output()
        return OUTPUT_LOST
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not _has_folder():
            sys.stderr.write("inferpool: the current folder was deleted; change to another one\n")
            return USAGE_ERROR
        if error.errno not in _UNWRITABLE:
            raise
        _discard_output()
        sys.stderr.write(f"inferpool: the output cannot be written: {error.strerror}\n")
        return OUTPUT_LOST
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(argv: Sequence[str]) -> int:
    if argv and argv[0] == "--version":
        argv = ["version", *argv[1:]]
    parser, verbs = make_parser(argv[0] if argv else "")
    if not argv:
        parser.print_help(sys.stderr)
        return USAGE_ERROR
    if not argv[0].startswith("-") and argv[0] not in verbs:
        parser.error(f"there is no verb {argv[0]!r}; {nearest(argv[0], list(verbs))}")
    args, rest = parser.parse_known_args(argv)
    if rest:
        if argv[0] not in verbs:
            parser.error(f"{argv[0]}: flags come after the verb, as in `inferpool serve --port 80`")
        chosen = getattr(args, "parser", verbs[argv[0]])  # a verb may have parsers of its own
        chosen.error(unrecognised(rest[0], chosen))
    try:
        return VERBS[args.verb].run(args)
    except FlagError as error:
        sys.stderr.write(f"inferpool {args.verb}: {error}\n")
        return USAGE_ERROR
    except SettingsError as error:
        sys.stderr.writelines(f"inferpool: {problem}\n" for problem in error.problems)
        return USAGE_ERROR
    except StateFileError as error:
        sys.stderr.write(f"inferpool: {error}\n")
        return UNUSABLE_STATE
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "inferpool"):
            raise
        sys.stderr.write(
            f"inferpool {args.verb}: {package} is not installed. Without it, only version, "
            "predict and jobs work; `pip install .` in the clone installs the rest\n"
        )
        return NOT_INSTALLED


def _has_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _discard_output() -> None:
    """Send the buffered output nowhere, so that the interpreter can exit without an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
