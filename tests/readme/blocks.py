"""Fenced blocks of a Markdown file, with the marks that stand above them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

LANGUAGES = ("sh", "bash", "python", "toml", "json")
"""Those that can be run or checked. `text`, or none, is for output and drawings."""
SHOWN = ("", "text", "console", "mermaid")
MARKS = ("not run", "file", "serve")

_FENCE = re.compile(r"^(?P<indent> {0,3})(?P<fence>`{3,}|~{3,})\s*(?P<info>[^`]*)$")
_MARK = re.compile(rf"^\s*<!--\s*({'|'.join(MARKS)}):\s*(.*?)\s*-->\s*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block."""

    language: str
    text: str
    line: int
    """Of its first line of text, from 1."""
    heading: str
    """What it stands under."""
    marks: dict[str, str]

    @property
    def name(self) -> str:
        """For reports."""
        heading = re.sub(r"[^a-z0-9]+", "-", self.heading.lower()).strip("-")
        return f"line-{self.line}-{self.language or 'text'}-{heading}"


def blocks_of(markdown: Path) -> list[Block]:
    """All fenced blocks of a file, in order."""
    return list(_blocks(markdown.read_text(encoding="utf-8").splitlines()))


def _blocks(lines: Sequence[str]) -> Iterator[Block]:
    heading = ""
    marks: dict[str, str] = {}
    numbered = iter(enumerate(lines, 1))
    for number, line in numbered:
        if fence := _FENCE.match(line):
            text: list[str] = []
            closing = re.compile(rf"^ {{0,3}}{fence['fence'][0]}{{{len(fence['fence'])},}}\s*$")
            for _, inner in numbered:
                if closing.match(inner):
                    break
                text.append(inner.removeprefix(fence["indent"]))
            else:
                raise AssertionError(f"line {number}: this block is never closed")
            yield Block(
                language=fence["info"].strip().partition(" ")[0],
                text="\n".join(text) + "\n",
                line=number + 1,
                heading=heading,
                marks=marks,
            )
            marks = {}
        elif mark := _MARK.match(line):
            marks[mark[1]] = mark[2]
        elif line.strip():
            assert not marks, f"line {number}: {list(marks)} mark no block that follows at once"
            heading = line.strip("# ") if line.startswith("#") else heading
