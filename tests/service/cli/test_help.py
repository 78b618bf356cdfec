"""The help of every command, held to a text that a change of it has to change too.

Write the text anew by `python -m tests.service.cli.test_help`, and read what has changed.
"""

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from inferpool.service.cli.main import INFERPOOL, run

GOLDEN = Path(__file__).with_name("helps.txt")
_TITLE = "=" * 20


def help_of(words: list[str]) -> str:
    """Return what `--help` prints after some words, on 100 columns."""
    out = io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1"}),
        contextlib.redirect_stdout(out),
        contextlib.suppress(SystemExit),
    ):
        run([*words, "--help"])
    return out.getvalue()


def helps() -> Iterator[tuple[str, str]]:
    """Yield all commands and their help; of those with settings, what `serve` does not say.

    The usage is left out, which versions of Python wrap differently.
    """
    serve = set(help_of(["serve"]).splitlines())
    for words in commands():
        lines = help_of(words).partition("\n\n")[2].splitlines()
        if words[0] in ("config", "doctor", "tune", "chaos"):
            lines = [line for line in lines if line not in serve or not line]
        yield " ".join(words), "\n".join(lines).strip()


def commands() -> Iterator[list[str]]:
    """Yield the words of all commands."""
    for verb in INFERPOOL.verbs:
        yield [verb]
        _, parsers = INFERPOOL.make_parser(verb)
        for action in parsers[verb]._actions:
            if action.dest == "what" and isinstance(action.choices, dict):
                yield from ([verb, what] for what in action.choices)


def golden() -> dict[str, str]:
    _, *parts = GOLDEN.read_text().split(f"{_TITLE} ")
    found = (part.split("\n", 1) for part in parts)
    return {title: text.strip() for title, text in found}


def test_the_help_of_each_command_says_what_it_said():
    assert dict(helps()) == golden()


if __name__ == "__main__":
    GOLDEN.write_text("".join(f"{_TITLE} {title}\n{text}\n\n" for title, text in helps()))
