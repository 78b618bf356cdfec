"""Every example of the docs does what its page says, and every link leads somewhere.

The fenced blocks of a page run in order, each as a test of its own, against real services. They run
in a scratch folder of the page: a copy of the project in `docs/examples`, or else a folder that has
nothing but a `photo.jpg`. The language says what happens:

`sh`, `bash`    runs in bash, in a shell of its own (`-euo pipefail`). `inferpool serve ...` returns
                once it is ready, and ends the one that served before, as its reader would with
                Ctrl-C; at the end it is stopped. It is given `--speed exact` and `--replicas 1`,
                and `inferpool batch` `--readers 0` and `--replicas 1`, to save time, unless the
                example has these flags. `pip install ...` and `uv sync` do nothing, `uv run X` runs
                X, and `uv run pytest` nothing, since it is what runs. curl fails with an answer of
                400 and more. Arguments of `inferpool` are checked in any case. Only on README.md
                do `inferpool` and `python` start interpreters; on other pages they are forked.
`python`        runs in one process, which keeps what earlier blocks of the page defined.
`toml`          must be settings that can be used.
`json`          is what the block before it printed: the same keys, types and strings. `...` or `…`
                stand for what is left out, in strings too; lists may go on, numbers differ.
`text`, none    output and drawings: only shown.

Ports 8000 and 8080 are one free port instead, 8081 and 8082 are others. Any other language, and
what a test cannot do, needs a mark: an HTML comment on a line of its own above the fence (several
marks may follow each other):

<!-- not run: WHY -->      needs a GPU, Docker, minutes, weights from the network, ...
<!-- file: nets.py -->     is written to this file; TOML files are checked as settings, too
<!-- serve: echo -->       `inferpool serve echo` serves it, and goes on if it does already
"""

import shutil
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Block, all_pages, blocks_of, broken_links_of, examples
from tests.docs.stage import DocsStage

_QUICK_PAGES = ("README.md", "docs/asking.md", "docs/operating.md", "docs/settings.md")
"""Pages that start few services; the examples of all others are slow tests."""


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    for tool in ("bash", "curl"):
        if shutil.which(tool) is None:
            pytest.skip(f"the examples use {tool}: install it")
    with DocsStage(tmp_path_factory.mktemp("docs")) as stage:
        yield stage


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(each, marks=() if each.page in _QUICK_PAGES else pytest.mark.slow)
        for each in examples()
    ],
    ids=str,
)
def test_example_does_what_it_says(stage: DocsStage, example: Block):
    stage.run(example)


@pytest.mark.parametrize("page", all_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    assert broken_links_of(page) == []


@pytest.mark.parametrize(
    ("file", "most"), [("own_detector.py", 20), ("own_segmenter.py", 20), ("shades.py", 20)]
)
def test_a_recipe_takes_few_lines(file, most):
    """Imports and blank lines do not count."""
    blocks = blocks_of(ROOT / "docs/models.md")
    (text,) = (each.text for each in blocks if each.marks.get("file") == file)
    code = [line for line in text.splitlines() if line.strip()]
    own = [line for line in code if not line.startswith(("import ", "from "))]
    assert len(own) <= most, own


def test_links_that_lead_nowhere_are_found(tmp_path):
    (tmp_path / "a.md").write_text("# The `one` & only: it\n# Two\n# Two\n[c](#three)\n[d](e.md)\n")
    page = tmp_path / "b.md"
    page.write_text(
        "[a](a.md#the-one--only-it) [b](a.md#two-1) [c](a.md#two-2) ![d](e.png) [f](https://f.example)"
        " `tests/test_docs.py` `tests/no.py`"
        "\n\n| |\n|-|\n| [g](#g) |\n\n```\n[h](h.md)\n```\n"
    )
    assert broken_links_of(page) == ["a.md#two-2", "e.png", "#g", "tests/no.py"]


@pytest.mark.parametrize(
    ("markdown", "problem"),
    [
        ("```sh\nfalse\n```", "exit status 1"),
        ("```sh\ninferpool serve echo --prot 1 &\n```", "there is no"),
        ("<!-- not run: slow -->\n```sh\ninferpool sreve echo\n```", "no command line"),
        ("```python\nx = 1\nx.y\n```", 'page.md", line 3'),
        ("```toml\nprot = 1\n```", "did you mean port"),
        ("```yaml\na: 1\n```", "mark it"),
        ("<!-- not run: -->\n```sh\nfalse\n```", "needs a reason"),
        ("<!-- serve: echo -->\nhere\n```sh\ntrue\n```", "no block that follows"),
        ('```sh\necho \'{"a": [1, {"b": 2}]}\'\n```\n```json\n{"a": [1, {"c": 2}]}\n```', "a[1]"),
        ('```sh\necho \'{"a": "x"}\'\n```\n```json\n{"a": "y"}\n```', "'x', and 'y'"),
    ],
)
def test_example_that_does_not_work_is_found(tmp_path, markdown: str, problem: str):
    with pytest.raises(AssertionError) as raised:
        _run(tmp_path, markdown)
    assert problem in str(raised.value)


def test_printed_answer_may_leave_out(tmp_path):
    _run(
        tmp_path,
        """```python
import json
print("HTTP/1.1 200 OK")
print(json.dumps({"a": [1, 2, 3], "b": {"id": "4bf92f", "n": None}, "c": True}))
```
```json
{"a": [7, ...], "b": {"id": "4b…", ...}, ...}
```
""",
    )


def _run(folder: Path, markdown: str) -> None:
    page = folder / "page.md"
    page.write_text(markdown)
    with DocsStage(folder / "stage") as stage:
        for block in blocks_of(page, folder):
            stage.run(block)
