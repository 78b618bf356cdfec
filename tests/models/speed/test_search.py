import os
import tempfile
import time

import pytest
import torch

from inferpool.models.speed import trial as trying
from inferpool.models.speed.choose import choose
from inferpool.models.speed.search import SearchError, search
from inferpool.models.speed.trial import Trial
from inferpool.models.speed.verdicts import VerdictStore
from inferpool.workers.inside.compiling import CompileError
from tests.models.items import loaded, run
from tests.models.speed.test_choose import options, quietly, small
from tests.small_classifier import SmallClassifier


@pytest.fixture(autouse=True)
def host(monkeypatch, tmp_path_factory):
    """Pretend that nobody else searches on this host."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("host")))


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


def searched(folder, compile_package, key, on_progress=quietly, model=None):
    made = options(cache_dir=folder, compile_package=compile_package)
    return search(loaded(model) if model else small(), made, key, on_progress)


def test_workers_start_with_the_preset_that_a_search_has_found(tmp_path, compiler):
    first = choose(small(), options(cache_dir=tmp_path), quietly)
    assert not first.is_final
    stages: list[str] = []
    found = searched(tmp_path, compiler, first.key, stages.append)
    name = "compiled_bf16" if torch.cpu._is_avx512_bf16_supported() else "compiled"
    assert (found.preset, found.is_final) == (name, True)
    assert f"compiling the preset {name}" in stages
    assert compiler.made == [name]
    model = small()
    want = run(model, model.samples())["probabilities"]
    assert choose(model, options(cache_dir=tmp_path), quietly) == found
    assert type(model.network).__name__ == "Loaded"
    torch.testing.assert_close(run(model, model.samples())["probabilities"], want)
    again = searched(tmp_path, compiler, first.key)
    assert (again, len(compiler.made)) == (found, 1)


def test_a_network_that_cannot_be_compiled_is_reported_and_not_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(Trial, "gain", lambda self, network: 1.5)

    def fail(network, preset, path):
        raise CompileError("an operator is unknown")

    first = choose(small(), options(cache_dir=tmp_path), quietly)
    found = searched(tmp_path, fail, first.key)
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
    searched(tmp_path, compiler, first.key, model=Strict())
    assert compiler.made == ["compiled"]


def test_a_search_that_was_killed_is_not_made_again_for_a_day(tmp_path, compiler):
    first = choose(small(), options(cache_dir=tmp_path), quietly)
    mark = tmp_path / f"{first.key}.begun"
    mark.touch()
    with pytest.raises(SearchError, match="killed, perhaps for want of memory"):
        searched(tmp_path, compiler, first.key)
    before = time.time() - 25 * 3600
    os.utime(mark, (before, before))
    assert searched(tmp_path, compiler, first.key).is_final
    assert not mark.exists()


def test_a_model_whose_weights_differ_each_time_is_not_searched_for(tmp_path, compiler):
    with pytest.raises(SearchError, match="the weights differ"):
        searched(tmp_path, compiler, "another key")


def test_an_attempt_that_leaves_in_order_leaves_no_mark(tmp_path):
    def leave():
        with VerdictStore(tmp_path).attempt("key") as is_first:
            assert is_first
            assert (tmp_path / "key.begun").exists()
            raise SystemExit

    with pytest.raises(SystemExit):
        leave()
    assert not list(tmp_path.iterdir())
