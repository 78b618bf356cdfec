"""Tests of the page about a run on GPUs."""

import json
from pathlib import Path

import pytest

from tests.gpu.results import RunResults


def report(name: str, outcome: str, said: object = None, **noted: object) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=f"tests/gpu/test_x.py::{name}",
        location=("", 0, ""),
        keywords={},
        outcome=outcome,  # type: ignore[arg-type]  # one of pytest's words
        longrepr=said,  # type: ignore[arg-type]  # a text will do
        when="call",
        duration=1.5,
        user_properties=[*noted.items()],
    )


def test_page_has_each_test_with_its_figures_and_the_end_of_its_failure(tmp_path: Path):
    results = RunResults(
        [
            report("test_speed[sim-JPEG]", "passed", images_per_s=4000),
            report("test_memory[sim]", "failed", "a\nlong\nstory\n" * 20 + "E  it broke"),
            report("test_of_something_else[simple]", "passed"),
        ]
    )
    assert results.kinds == {"sim"}
    text = results.write(tmp_path).read_text()
    assert "1 passed, 1 failed in 3 s" in text
    assert "images_per_s: 4000" in text
    assert "E  it broke" in text
    assert text.count("story") < 20
    assert "something_else" not in text
    content = json.loads((tmp_path / "results.json").read_text())
    assert [test["outcome"] for test in content["tests"]] == ["passed", "failed"]
    assert content["environment"]["torch"]


def test_kind_is_found_among_other_parameters():
    names = ["a[cuda]", "b[two devices-sim]", "c[exact-cuda-tensor]"]
    assert [RunResults([report(name, "passed")]).kinds for name in names] == [
        {"cuda"},
        {"sim"},
        {"cuda"},
    ]
