import os
import tempfile
import time

import pytest
import torch
from msgspec.structs import replace as replace_report

from inferpool.models.speed import trial as trying
from inferpool.models.speed.choose import choose
from inferpool.models.speed.decoding import DecodeTrial
from inferpool.models.speed.names import SpeedReport
from inferpool.models.speed.search import SearchError, search
from inferpool.models.speed.trial import Trial
from inferpool.models.speed.verdicts import VerdictStore
from inferpool.workers.inside.compiling import CompileError
from tests.models.items import loaded, run
from tests.models.speed.test_choose import options, quietly, small
from tests.models.speed.test_decoding import Encoded
from tests.small_classifier import SmallClassifier


@pytest.fixture(autouse=True)
def host(monkeypatch, tmp_path_factory):
    """Pretend that nobody else searches on this host."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("host")))


def twice_as_fast(trial, way, items, decode=DecodeTrial._decode):
    return *decode(trial, way, items)[:2], 2.0


@pytest.fixture
def compiler(monkeypatch):
    """Fake compiler: its packages compute as the exact network does, and faster than all."""
    made: list[str] = []

    def compile_package(network, preset, path):
        made.append(preset)
        path.write_bytes(b"")

    def gain(self, network):
        return 5.0 if isinstance(network, Loaded) else 1.5

    class Loaded(torch.nn.Module):
        def __init__(self, path, exact):
            super().__init__()
            self.network = small().network

        def forward(self, x):
            return self.network(x)

    monkeypatch.setattr(trying, "Compiled", Loaded)
    monkeypatch.setattr(Trial, "gain", gain)
    compile_package.made = made  # type: ignore[attr-defined]
    return compile_package


def searched(folder, compile_package, present, on_progress=quietly, model=None):
    """Search beside workers that serve with what they have found."""
    made = options(
        cache_dir=folder, compile_package=compile_package, chosen=present, is_beside=True
    )
    return search(loaded(model) if model else small(), made, present.key, on_progress)


def started(folder, model=None):
    """Choose as a worker does whose service searches."""
    return choose(model or small(), options(cache_dir=folder, measures=False), quietly)


def test_a_first_start_measures_nothing_and_a_search_makes_the_verdict(
    tmp_path, compiler, monkeypatch
):
    model = small()
    with monkeypatch.context() as patch:
        patch.setattr(Trial, "compare", lambda *_: pytest.fail("it compares"))
        first = started(tmp_path, model)
        assert (first.preset, first.is_provisional, first.is_final) == ("exact", True, False)
        assert first.text() == "exact (speed presets are measured while it serves)"
    exact = model.network
    assert not list(tmp_path.iterdir())
    found = searched(tmp_path, compiler, first)
    assert (found.preset, found.is_provisional, found.is_final) == ("folded", False, False)
    assert (found.gain, found.key) == (1.5, first.key)
    assert 0 < found.deviation < 0.05
    assert not compiler.made
    assert started(tmp_path, model) == found
    assert model.network is not exact


@pytest.mark.parametrize("is_left", [True, False], ids=["killed", "running"])
def test_a_first_start_measures_if_the_last_search_was_killed(tmp_path, compiler, is_left):
    first = started(tmp_path)
    with VerdictStore(tmp_path).attempt(first.key):
        if is_left:  # the lock on a mark ends with its process
            (mark,) = tmp_path.glob("*.begun")
            mark.unlink()
            mark.touch()
        assert started(tmp_path).is_provisional is not is_left


def test_decoding_is_judged_by_the_search_too(tmp_path, compiler, monkeypatch):
    monkeypatch.setattr(DecodeTrial, "_decode", twice_as_fast)

    def choosing(**others):
        return options(cache_dir=tmp_path, decode="auto", **others)

    model = loaded(Encoded())
    first = choose(model, choosing(measures=False), quietly)
    assert (first.is_provisional, first.decode) == (True, "exact")
    beside = choosing(chosen=first, is_beside=True, compile_package=compiler)
    found = search(loaded(Encoded()), beside, first.key, quietly)
    assert (found.decode, found.decode_gain, found.is_provisional) == ("fast", 2.0, False)
    again = choose(model, choosing(measures=False), quietly)
    assert replace_report(again, measured_s=0.0) == found
    assert model.decode == "fast"
    for path in tmp_path.glob("*-decode-*"):
        path.unlink()
    again = choose(loaded(Encoded()), choosing(measures=False), quietly)
    assert (again.preset, again.decode, again.is_provisional) == ("folded", "exact", True)
    beside = choosing(chosen=again, is_beside=True, compile_package=compiler)
    assert search(loaded(Encoded()), beside, again.key, quietly) == found


def test_a_search_by_which_workers_serve_the_same_is_no_reason_to_measure_again(
    tmp_path, compiler, monkeypatch
):
    first = started(tmp_path)
    found = searched(tmp_path, compiler, first)
    monkeypatch.setattr(Trial, "gain", lambda *_: pytest.fail("it measures"))
    assert searched(tmp_path, compiler, first) == found  # for a worker that has missed it


def test_workers_start_with_the_preset_that_a_search_has_found(tmp_path, compiler):
    first = choose(small(), options(cache_dir=tmp_path), quietly)
    assert not first.is_final
    stages: list[str] = []
    found = searched(tmp_path, compiler, first, stages.append)
    name = "compiled_bf16" if torch.cpu._is_avx512_bf16_supported() else "compiled"
    assert (found.preset, found.is_final) == (name, True)
    assert f"compiling the preset {name}" in stages
    assert compiler.made == [name]
    model = small()
    want = run(model, model.samples())["probabilities"]
    assert choose(model, options(cache_dir=tmp_path), quietly) == found
    assert type(model.network).__name__ == "Loaded"
    torch.testing.assert_close(run(model, model.samples())["probabilities"], want)
    again = searched(tmp_path, compiler, first)
    assert (again, len(compiler.made)) == (found, 1)


def test_a_network_that_cannot_be_compiled_is_reported_and_not_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(Trial, "gain", lambda self, network: 1.5)

    def fail(network, preset, path):
        raise CompileError("an operator is unknown")

    first = choose(small(), options(cache_dir=tmp_path), quietly)
    found = searched(tmp_path, fail, first)
    assert (found.preset, found.is_final) == (first.preset, True)
    assert "compiled cannot be used: CompileError: an operator is unknown" in found.note
    assert choose(small(), options(cache_dir=tmp_path), quietly).is_final


def test_a_refused_preset_is_not_compiled_either(tmp_path, compiler):
    class Strict(SmallClassifier):
        class tolerance:  # noqa: N801  # in place of the attribute
            @staticmethod
            def judge(exact, other):
                from inferpool.models.agreement import ValueTolerance

                return ValueTolerance(relative=1e-6).judge(exact, other)

    first = choose(loaded(Strict()), options(cache_dir=tmp_path), quietly)
    searched(tmp_path, compiler, first, model=Strict())
    assert compiler.made == ["compiled"]


def test_a_search_that_was_killed_is_not_made_again_for_a_day(tmp_path, compiler):
    first = choose(small(), options(cache_dir=tmp_path), quietly)
    mark = tmp_path / f"{first.key}.begun"
    mark.touch()
    with pytest.raises(SearchError, match="killed, perhaps for want of memory"):
        searched(tmp_path, compiler, first)
    before = time.time() - 25 * 3600
    os.utime(mark, (before, before))
    assert searched(tmp_path, compiler, first).is_final
    assert not mark.exists()


def test_a_model_whose_weights_differ_each_time_is_not_searched_for(tmp_path, compiler):
    with pytest.raises(SearchError, match="the weights differ"):
        searched(tmp_path, compiler, SpeedReport(key="another key", is_final=False))


def test_an_attempt_that_leaves_in_order_leaves_no_mark(tmp_path):
    def leave():
        with VerdictStore(tmp_path).attempt("key") as is_first:
            assert is_first
            assert (tmp_path / "key.begun").exists()
            raise SystemExit

    with pytest.raises(SystemExit):
        leave()
    assert not list(tmp_path.iterdir())
