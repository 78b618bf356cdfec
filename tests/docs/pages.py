"""The pages of the docs: their examples, their links and the anchors that links can name."""

import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = ("sh", "bash", "python", "toml", "json")
"""Languages that can be run or checked."""
SHOWN = ("", "text", "console", "mermaid")
"""Languages of output and drawings, which are only shown."""

_TARGETS = ("href", "src")
_PATH = re.compile(r"(docker|docs|tests)/[\w./-]+")
_MARK = re.compile(r"<!--\s*(not run|file|serve):\s*(.*?)\s*-->")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block of a page."""

    page: str
    language: str
    text: str
    line: int
    """Line of the page, from 1, where the text begins."""
    marks: dict[str, str]

    @property
    def is_example(self) -> bool:
        """Return whether there is something to run or to check."""
        return self.language not in SHOWN or bool(self.marks)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}-{self.language or 'text'}"


def all_pages(root: Path = ROOT) -> list[Path]:
    """Return the pages that a reader of the repository meets."""
    at_root = [root / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")]
    return [page for page in at_root if page.exists()] + sorted(root.glob("docs/**/*.md"))


def blocks_of(page: Path, root: Path = ROOT) -> Iterator[Block]:
    """Yield all fenced blocks of a page, in order.

    Raises:
        AssertionError: A mark is not followed by a fenced block.
    """
    name = page.relative_to(root).as_posix()
    marks: dict[str, str] = {}
    for token in _tokens(page):
        if token.type == "html_block":
            marks.update(_MARK.findall(token.content))
        elif token.type == "fence":
            assert token.map is not None
            language = token.info.strip().partition(" ")[0]
            line = token.map[0] + 2
            yield Block(page=name, language=language, text=token.content, line=line, marks=marks)
            marks = {}
        else:
            assert not marks, f"{name}: {marks} mark no block that follows at once"
    assert not marks, f"{name}: {marks} mark no block"


def examples() -> list[Block]:
    """Return all blocks that are run or checked; pages that use the same service stand together."""
    pages = [[block for block in blocks_of(page) if block.is_example] for page in all_pages()]
    pages.sort(
        key=lambda blocks: [block.marks["serve"] for block in blocks if "serve" in block.marks]
    )
    return [block for blocks in pages for block in blocks]


def broken_links_of(page: Path) -> list[str]:
    """Return the relative links, pictures and names of our files that lead nowhere."""
    spans = [child for token in _tokens(page) for child in token.children or ()]
    targets = [
        str(span.attrs[key]) for span in spans for key in ("href", "src") if key in span.attrs
    ]
    paths = [span.content for span in spans if span.type == "code_inline"]
    return [
        *(each for each in targets if "://" not in each and not _is_there(each, page)),
        *(each for each in paths if _PATH.fullmatch(each) and not (ROOT / each).exists()),
    ]


def _is_there(link: str, page: Path) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not anchor or anchor in _anchors_of(target))


def _anchors_of(page: Path) -> list[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    slugs, seen = [], Counter[str]()
    for heading, title in itertools.pairwise(_tokens(page)):
        if heading.type == "heading_open":
            text = "".join(span.content for span in title.children or ())
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            slugs.append(f"{slug}-{seen[slug]}" if seen[slug] else slug)
            seen[slug] += 1
    return slugs


@functools.cache
def _tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))
