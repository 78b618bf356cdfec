"""A command with verbs, from its arguments to its exit status; and the command `inferpool-client`.

Every start of a command imports this, so it imports little.
"""

import difflib
import errno
import io
import os
import re
import sys
from argparse import ArgumentParser, HelpFormatter, RawDescriptionHelpFormatter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from ..usage import COMMAND, FAILED, INTERRUPTED, USAGE_ERROR, FlagError
from .verbs import VERBS, Verb

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of an output on a disk that is full or gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """A command with verbs."""

    description: str
    examples: str
    example: str
    """A command line with a flag."""
    verbs: Mapping[str, Verb]
    if_missing: str
    """Advice for users without a package that a verb needs."""
    explain: Callable[[str, Collection[str]], str] = lambda flag, known: ""
    """Returns more about a flag that is not among those of a verb; empty if there is no more."""

    def run(self, argv: Sequence[str]) -> int:
        """Run a command line; return the exit status."""
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # closed by the parent process
                nowhere = os.open(os.devnull, os.O_RDWR)
                setattr(sys, name, os.fdopen(nowhere, "w", encoding="utf-8"))
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            # Names and labels may be in any alphabet.
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            try:
                return self._run(argv)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:  # the reader has closed the pipe, as `head` does
            _discard_output()
            return FAILED
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not _has_folder():
                sys.stderr.write(
                    f"{COMMAND}: the current folder was deleted; change to another one\n"
                )
                return USAGE_ERROR
            if error.errno not in _UNWRITABLE:
                raise
            _discard_output()
            sys.stderr.write(f"{COMMAND}: the output cannot be written: {error.strerror}\n")
            return FAILED
        except KeyboardInterrupt:
            return INTERRUPTED

    def _run(self, argv: Sequence[str]) -> int:
        parser, verbs = self.make_parser(argv[0] if argv else "")
        if not argv:
            parser.print_help(sys.stderr)
            return USAGE_ERROR
        if not argv[0].startswith("-") and argv[0] not in verbs:
            parser.error(f"there is no verb {argv[0]!r}; {nearest(argv[0], list(verbs))}")
        args, rest = parser.parse_known_args(argv)
        if rest:
            if argv[0] not in verbs:
                parser.error(f"{argv[0]}: flags come after the verb, as in `{self.example}`")
            chosen = getattr(args, "parser", verbs[argv[0]])  # a verb may have parsers of its own
            chosen.error(self._unrecognised(rest[0], chosen))
        try:
            return self.verbs[args.verb].run(args)
        except FlagError as error:
            sys.stderr.write(f"{COMMAND} {args.verb}: {error}\n")
            return USAGE_ERROR
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package in ("", __name__.partition(".")[0]):
                raise
            sys.stderr.write(
                f"{COMMAND} {args.verb}: {package} is not installed. {self.if_missing}\n"
            )
            return FAILED

    def make_parser(self, chosen: str) -> tuple[ArgumentParser, Mapping[str, ArgumentParser]]:
        """Return the parser, and the parsers of the verbs.

        Only the chosen verb gets its flags, so that the modules of the others are not imported.
        """
        parser = _Parser(
            prog=COMMAND,
            description=self.description,
            epilog=self.examples,
            formatter_class=_Formatter,
            allow_abbrev=False,
        )
        adding = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb", required=True)
        parsers = {}
        for name, verb in self.verbs.items():
            parsers[name] = adding.add_parser(
                name,
                help=verb.summary,
                description=verb.description,
                epilog=verb.epilog,
                formatter_class=_Formatter,
                allow_abbrev=False,
            )
        if chosen in self.verbs:
            self.verbs[chosen].add_flags(parsers[chosen])
        return parser, parsers

    def _unrecognised(self, word: str, parser: ArgumentParser) -> str:
        if not word.startswith("-"):
            usage = parser.format_usage()
            if "[MODEL]" not in usage:
                hint = " A service is named by --url" if "--url" in usage else ""
                return f"what is {word!r}?{hint}"
            return f"one MODEL at most; what is {word!r}? Several models are served from a file"
        flag = word.partition("=")[0]
        known = set(re.findall(r"--[a-z0-9-]+", parser.format_help()))
        return (
            self.explain(flag, known) or f"there is no flag {flag}; {nearest(flag, sorted(known))}"
        )


def nearest(word: str, candidates: Sequence[str]) -> str:
    """Return a hint with the most similar candidate, or with all of them."""
    near = difflib.get_close_matches(word, candidates, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(candidates)}"


class _Parser(ArgumentParser):
    """Writes an error on two lines, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Print an error and exit."""
        self.exit(USAGE_ERROR, f"{self.prog}: {message}\nTry `{self.prog} --help`.\n")


class _Formatter(RawDescriptionHelpFormatter):
    """Wraps a text of one line; keeps the line breaks of others."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return super()._fill_text(text, width, indent)
        return HelpFormatter._fill_text(self, text, width, indent)


def _has_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _discard_output() -> None:
    """Discard the buffered output, so that the interpreter can exit without an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run() -> int:
    """Run the command `inferpool-client`; return the exit status."""
    command = CommandLine(
        description="Ask a running service of inferpool.",
        examples=_EXAMPLES,
        example="inferpool-client predict --text hello",
        verbs=VERBS,
        if_missing="`pip install './service/client[cli]'` in the clone installs it",
    )
    return command.run(sys.argv[1:])


_EXAMPLES = """\
examples:
  inferpool-client predict photo.jpg                     print what a model says of a file
  inferpool-client predict --text hello --url HOST:8000  ask a service on another host
  inferpool-client jobs submit inputs.jsonl --wait       hand many inputs to a service
  inferpool-client top                                   watch a service live
  inferpool-client models swap cats --weights new.pth    serve another version, if it is good enough
"""
