"""Turns: who waits says for whom, and does not wait for ever."""

import os
import re
from pathlib import Path

import pytest

from tests.turns import turn


def test_a_long_wait_names_the_holder_and_ends(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "1.turn").write_text("test_that_was_killed")
    said = f"another process of tests: process {os.getpid()} in test_in_pdb"

    with (
        turn(tmp_path, "test_in_pdb", alone=False),
        pytest.raises(TimeoutError, match=re.escape(said)),
        turn(tmp_path, "test_of_times", alone=True, told_after_s=0.05, given_up_after_s=0.15),
    ):
        pytest.fail("both have their turn")

    assert capfd.readouterr().err.strip() == f"waiting for {said}"
    with turn(tmp_path, "test_of_times", alone=True, told_after_s=0, given_up_after_s=0):
        pass
