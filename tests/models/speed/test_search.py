import os
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from msgspec.structs import replace as replace_report

from inferpool.models.speed.attempts import attempt
from inferpool.models.speed.choose import choose
from inferpool.models.speed.search import SearchError, search
from inferpool.models.speed_names import SpeedReport
from inferpool.models.tolerance import ValueTolerance
from inferpool.workers.speed.worker_side import CompileError
from tests.models.items import loaded, run
from tests.models.speed.pace import Encoded, FewSamples, LoadedPackage, quietly


@pytest.fixture(autouse=True)
def host(monkeypatch, tmp_path_factory):
    """Pretend that nobody else searches on this host."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("host")))


class Searches:
    """Choices as workers make them, and searches beside them, by one clock and one folder.

    Compiled packages compute as the exact network does, and faster than all presets.
    """

    def __init__(self, pace, folder):
        pace.gains = {"folded": 1.5, "bf16": 1.5, "compiled": 5.0}
        self.pace, self.folder = pace, folder
        self.made: list[str] = []

    def compile_package(self, network, preset, path):
        self.made.append(preset)
        path.write_bytes(b"")

    def options(self, **others):
        return self.pace.options(
            cache_dir=self.folder,
            **{"compile_package": self.compile_package, "load_package": LoadedPackage, **others},
        )

    def chosen(self, model=None, **others):
        """Choose as a worker does that measures."""
        return choose(model or self.pace.small(), self.options(**others), quietly)

    def started(self, model=None, **others):
        """Choose as a worker does whose service searches."""
        return self.chosen(model, measures=False, **others)

    def searched(self, present, on_progress=quietly, model=None, **others):
        """Search beside workers that serve with what they have found."""
        model = self.pace.of(loaded(model)) if model else self.pace.small()
        wanted = self.options(chosen=present, **others)
        return search(model, wanted, present.key, on_progress)


@pytest.fixture
def here(pace, tmp_path):
    return Searches(pace, tmp_path)


def test_a_first_start_measures_nothing_and_a_search_makes_the_verdict(here, pace, tmp_path):
    model = pace.small()
    first = here.started(model)
    assert (first.preset, first.is_provisional, first.is_final) == ("exact", True, False)
    assert first.text() == "exact (speed presets are measured while it serves)"
    assert not pace.seen
    exact = model.network
    assert not list(tmp_path.iterdir())
    found = here.searched(first)
    assert (found.preset, found.is_provisional, found.is_final) == ("folded", False, False)
    assert (found.gain, found.key) == (pytest.approx(1.5), first.key)
    assert 0 < found.deviation < 0.05
    assert not here.made
    assert here.started(model) == found
    assert model.network is not exact


@pytest.mark.parametrize("is_left", [True, False], ids=["killed", "running"])
def test_a_first_start_measures_if_the_last_search_was_killed(here, tmp_path, is_left):
    first = here.started()
    with attempt(tmp_path, first.key):
        if is_left:  # the lock on a mark ends with its process
            (mark,) = tmp_path.glob("*.begun")
            mark.unlink()
            mark.touch()
        assert here.started().is_provisional is not is_left


def test_decoding_is_judged_by_the_search_too(here, pace, tmp_path):
    pace.decode_gains = {"fast": 2.0}
    model = pace.of(loaded(Encoded()))
    first = here.started(model, decode="auto")
    assert (first.is_provisional, first.decode) == (True, "exact")
    found = here.searched(first, model=Encoded(), decode="auto")
    assert (found.decode, found.is_provisional) == ("fast", False)
    assert found.decode_gain == pytest.approx(2.0)
    again = here.started(model, decode="auto")
    assert replace_report(again, measured_s=0.0) == found
    assert model.decode == "fast"
    for path in tmp_path.glob("*-decode-*"):
        path.unlink()
    again = here.started(pace.of(loaded(Encoded())), decode="auto")
    assert (again.preset, again.decode, again.is_provisional) == ("folded", "exact", True)
    again = here.searched(again, model=Encoded(), decode="auto")
    assert replace_report(again, decode_gain=found.decode_gain) == found


def test_a_search_by_which_workers_serve_the_same_is_no_reason_to_measure_again(here, pace):
    first = here.started()
    found = here.searched(first)
    pace.gains = {}
    assert here.searched(first) == found  # for a worker that has missed it


def test_workers_start_with_the_preset_that_a_search_has_found(here, pace):
    first = here.chosen()
    assert not first.is_final
    stages: list[str] = []
    found = here.searched(first, stages.append)
    name = "compiled_bf16" if torch.cpu._is_avx512_bf16_supported() else "compiled"
    assert (found.preset, found.is_final) == (name, True)
    assert f"compiling the preset {name}" in stages
    assert here.made == [name]
    model = pace.small()
    want = run(model, model.samples())["probabilities"]
    assert here.chosen(model) == found
    assert isinstance(model.network, LoadedPackage)
    torch.testing.assert_close(run(model, model.samples())["probabilities"], want)
    again = here.searched(first)
    assert (again, len(here.made)) == (found, 1)


def test_what_workers_serve_with_stays_unless_it_is_clearly_beaten(here, pace):
    first = here.chosen()
    pace.gains["compiled"] = 1.09 * pace.gains[first.preset]
    assert here.searched(first).preset == first.preset


def test_a_network_that_cannot_be_compiled_is_reported_and_not_tried_again(here):
    def fail(network, preset, path):
        raise CompileError("an operator is unknown")

    first = here.chosen()
    found = here.searched(first, compile_package=fail)
    assert (found.preset, found.is_final) == (first.preset, True)
    assert "compiled cannot be used: CompileError: an operator is unknown" in found.note
    assert here.chosen().is_final


def test_a_refused_preset_is_not_compiled_either(here, pace):
    class Strict(FewSamples):
        tolerance = ValueTolerance(relative=1e-6)

    first = here.chosen(pace.of(loaded(Strict())))
    here.searched(first, model=Strict())
    assert here.made == ["compiled"]


def test_a_search_that_was_killed_is_not_made_again_for_a_day(here, tmp_path):
    first = here.chosen()
    mark = tmp_path / f"{first.key}.begun"
    mark.touch()
    before = time.time() - 23.9 * 3600
    os.utime(mark, (before, before))
    with pytest.raises(SearchError, match="killed, perhaps for want of memory"):
        here.searched(first)
    before = time.time() - 24.1 * 3600
    os.utime(mark, (before, before))
    assert here.searched(first).is_final
    assert not mark.exists()


def test_a_search_waits_for_one_of_another_service_and_takes_its_verdict(here):
    first = here.started()
    is_searching, is_waited_for = threading.Event(), threading.Event()

    def hold(stage):
        is_searching.set()
        is_waited_for.wait()

    def go_on(stage):
        assert stage == "waiting for another search"
        is_waited_for.set()

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(here.searched, first, hold)
        is_searching.wait()
        try:
            assert here.searched(first, go_on) == other.result()
        finally:
            is_waited_for.set()


def test_a_model_whose_weights_differ_each_time_is_not_searched_for(here):
    with pytest.raises(SearchError, match="the weights differ"):
        here.searched(SpeedReport(key="another key", is_final=False))


def test_an_attempt_that_leaves_in_order_leaves_no_mark(tmp_path):
    def leave():
        with attempt(tmp_path, "key") as is_first:
            assert is_first
            assert (tmp_path / "key.begun").exists()
            raise SystemExit

    with pytest.raises(SystemExit):
        leave()
    assert not list(tmp_path.iterdir())
