"""Changes of models at run time, and what the next start makes of them."""

import asyncio
import fcntl
import json
import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path

import pytest

from inferpool.service.settings.loader import LoadedSettings, load, load_arguments
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.names import StateFileError
from inferpool.service.settings.state import StateFile

FILE = '[models.a]\nsource = "echo"\nweights = "one"\n[models.b]\nsource = "echo"\n'
OTHER = ModelSettings(source="echo", weights="two", options={"way": float("nan")})
STATE = "inferpool.state.json"


@pytest.fixture
def started(tmp_path: Path):
    """Return a function that loads the settings as a start does, with another file if given."""
    (tmp_path / "inferpool.toml").write_text(FILE)

    def load_again(toml: str = "", **flags: str) -> LoadedSettings:
        if toml:
            (tmp_path / "inferpool.toml").write_text(toml)
        return load(flags, {}, tmp_path)

    return load_again


def change(loaded: LoadedSettings, name: str, model: ModelSettings | None, **numbers: int) -> None:
    numbers = {"version": 2, "newest": 2, **numbers}
    asyncio.run(loaded.state.save(name, model, **numbers))


def test_models_that_were_added_changed_or_removed_are_so_at_the_next_start(started, tmp_path):
    first = started()
    assert not (tmp_path / STATE).exists()
    change(first, "a", OTHER, version=3, newest=5)
    change(first, "c", ModelSettings(source="echo", replicas=2), version=1, newest=1)
    change(first, "b", None)
    loaded = started()
    models = loaded.settings.models
    assert set(models) == {"a", "c"}
    assert (models["a"].weights, models["c"].replicas) == ("two", 2)
    assert models["a"].options["way"] != models["a"].options["way"], "it is NaN"
    assert (loaded.state.number_of("a"), loaded.state.newest_of("a")) == (3, 5)
    assert (loaded.state.number_of("d"), loaded.state.newest_of("d")) == (1, 0)
    assert loaded.warnings == []
    origins = {key: origin for key, _, origin in map(dotted_row, loaded.rows())}
    assert origins["models.a.weights"] == f"state {tmp_path / STATE}"
    assert origins["models.a.options.way"] == f"state {tmp_path / STATE}"
    assert origins["models.a.source"].startswith("file ")
    assert origins["models.a.credit"] == "default"
    assert os.stat(tmp_path / STATE).st_mode & 0o777 == 0o600


def dotted_row(row):
    return ".".join(row[0]), row[1], row[2]


def test_a_setting_that_is_gone_counts_only_if_it_was_used(started, tmp_path):
    change(started(), "a", OTHER)
    table = json.loads((tmp_path / STATE).read_text())
    table["models"]["a"]["settings"]["spread"] = False
    (tmp_path / STATE).write_text(json.dumps(table))
    assert started().settings.models["a"].weights == "two"
    table["models"]["a"]["settings"]["spread"] = True
    (tmp_path / STATE).write_text(json.dumps(table))
    with pytest.raises(StateFileError, match=r"models\.a\.settings: spread is gone: leave it out"):
        started()


def test_a_model_that_was_added_and_removed_leaves_nothing_in_the_file(started, tmp_path):
    loaded = started()
    change(loaded, "c", OTHER)
    change(loaded, "c", None)
    assert json.loads((tmp_path / STATE).read_text())["models"] == {}


def test_numbers_alone_change_nothing_and_warn_of_nothing(started, tmp_path):
    loaded = started()
    asyncio.run(loaded.state.save_number("a", 5))
    again = started()
    assert again.settings.models == loaded.settings.models
    assert (again.state.number_of("a"), again.state.newest_of("a")) == (1, 5)
    assert again.origins == loaded.origins
    assert started('[models.b]\nsource = "echo"\n').warnings == []
    change(again, "a", OTHER, version=6, newest=6)
    asyncio.run(again.state.save_number("a", 7))
    third = started(FILE)
    assert third.settings.models["a"].weights == "two"
    assert (third.state.number_of("a"), third.state.newest_of("a")) == (6, 7)
    asyncio.run(third.state.save_number("unknown", 3))
    assert "unknown" not in json.loads((tmp_path / STATE).read_text())["models"]


def test_what_the_settings_say_anew_of_a_model_counts_beside_what_was_changed(started):
    change(started(), "a", OTHER)
    loaded = started(FILE.replace('"one"', '"one"\nreplicas = 3'))
    assert (loaded.settings.models["a"].weights, loaded.settings.models["a"].replicas) == ("two", 3)
    assert loaded.warnings == []
    assert started(speed="exact").settings.models["a"].weights == "two"


@pytest.mark.parametrize(
    ("model", "toml", "left", "why"),
    [
        (OTHER, FILE.replace("one", "three"), "three", "another weights since"),
        (OTHER, '[models.b]\nsource = "echo"\n', None, "no longer name it now"),
        (None, FILE.replace("one", "three"), "three", "another weights since"),
    ],
)
def test_settings_that_have_changed_in_the_same_place_count(started, model, toml, left, why):
    change(started(), "a", model, version=2, newest=4)
    loaded = started(toml)
    found = loaded.settings.models.get("a")
    assert (found.weights if found else None) == left
    (warning,) = loaded.warnings
    assert why in warning
    assert "a was " in warning
    assert loaded.state.number_of("a") == loaded.state.newest_of("a") == 5, "it is another version"


def test_a_model_that_the_settings_name_now_is_theirs(started):
    change(started(), "c", OTHER)
    loaded = started(FILE + '[models.c]\nsource = "echo"\n')
    assert loaded.settings.models["c"].weights == "DEFAULT"
    assert "the settings name it now" in loaded.warnings[0]


def test_fields_that_an_earlier_program_did_not_have_are_no_change(started, tmp_path):
    change(started(), "a", OTHER)
    state = json.loads((tmp_path / STATE).read_text())
    del state["models"]["a"]["before"]["credit"]
    del state["models"]["a"]["settings"]["credit"]
    (tmp_path / STATE).write_text(json.dumps(state))
    loaded = started(FILE.replace('"one"', '"one"\ncredit = 5'))
    assert (loaded.settings.models["a"].weights, loaded.settings.models["a"].credit) == ("two", 5)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'{"format": 1, "models": {"a"', "Expecting"),
        (b"", "Expecting value"),
        (b"\xff\x00", "codec can't decode"),
        (b"[]", "valid dictionary"),
        (b'{"format": 9}', "format: Input should be 1"),
        (b'{"models": {"a": {"version": 0}}}', "models.a.version: "),
        (b'{"models": {"a/b": {}}}', 'models."a/b"'),
        (b'{"models": {"a": {"version": 1%s}}}' % (b"0" * 30), "models.a.version: "),
        (b"[" * 100_000, "recursion"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_nothing_starts(started, tmp_path, content, why):
    (tmp_path / STATE).write_bytes(content)
    with pytest.raises(StateFileError, match="move it away to start") as caught:
        started()
    assert str(tmp_path / STATE) in str(caught.value)
    assert why in str(caught.value)


def test_a_folder_in_its_place_is_named(started, tmp_path):
    (tmp_path / STATE).mkdir()
    with pytest.raises(StateFileError, match="it is a folder"):
        started()


def test_the_file_is_beside_the_settings_or_where_these_say_or_nowhere(started, tmp_path):
    assert started().state.path == tmp_path / STATE
    assert started(model="a").state.path is None
    assert started('state_file = "none"\n' + FILE).state.path is None
    assert started('state_file = "own.json"\n' + FILE).state.path == tmp_path / "own.json"
    (tmp_path / "inferpool.toml").unlink()
    assert load({"model": "echo"}, {}, tmp_path).state.path is None
    named = load({"model": "echo"}, {"INFERPOOL_STATE_FILE": "x.json"}, tmp_path)
    assert named.state.path == tmp_path / "x.json"

    def named(**settings: object) -> str:
        return load_arguments(settings, {}, tmp_path, file="x.toml").settings.state_file

    assert load_arguments({}, {}, tmp_path, model="echo").settings.state_file == "none"
    (tmp_path / "x.toml").write_text(FILE)
    assert named() == str(tmp_path / "x.state.json")
    assert named(models={"a": {"source": "echo"}}) == "none"
    assert named(state_file="own.json") == str(tmp_path / "own.json")


def test_without_a_file_a_change_is_not_kept():
    state = StateFile(None, {})
    asyncio.run(state.save("a", OTHER, version=1, newest=1))
    assert state.models == {}


def test_a_link_to_the_file_stays_one(started, tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / STATE).symlink_to(tmp_path / "far/state.json")
    change(started(), "a", OTHER)
    assert (tmp_path / STATE).is_symlink()
    assert started().settings.models["a"].weights == "two"


def test_a_file_that_another_service_has_written_is_not_overwritten(started, tmp_path):
    one, other = started(), started()
    change(one, "a", OTHER)
    with pytest.raises(OSError, match="another service"):
        change(other, "b", None)
    assert "b" in started().settings.models
    with open(tmp_path / f"{STATE}.draft", "w") as draft:
        fcntl.flock(draft, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            change(one, "b", None)
    change(one, "b", None)


def test_a_full_disk_leaves_the_file_as_it_was(started, tmp_path, monkeypatch):
    loaded = started()
    change(loaded, "a", OTHER)
    before = (tmp_path / STATE).read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(signal, "SIGXFSZ", signal.SIGXFSZ)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            change(loaded, "b", None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert (tmp_path / STATE).read_bytes() == before
    assert set(loaded.state.models) == {"a", "b"}
    change(loaded, "b", None)
    assert set(started().settings.models) == {"a"}


def test_changes_at_once_are_all_kept(started):
    loaded = started()

    async def change_all():
        saves = [loaded.state.save(f"m{i}", OTHER, version=i, newest=i) for i in range(1, 21)]
        await asyncio.gather(*saves)

    asyncio.run(change_all())
    assert {f"m{i}" for i in range(1, 21)} <= set(started().settings.models)


def save_for_ever(folder: Path) -> None:
    loaded = load({}, {}, folder)

    async def change_all():
        for number in range(loaded.state.newest_of("a") + 1, 1_000_000):
            model = ModelSettings(source="echo", weights="x" * (number * 997 % 4096 + 1))
            await loaded.state.save("a", model, version=number, newest=number)

    asyncio.run(change_all())


def test_a_service_that_is_killed_at_any_moment_leaves_a_whole_file(started, tmp_path):
    context = multiprocessing.get_context("spawn")
    newest = 0
    for pause_s in (0.003, 0.011):
        process = context.Process(target=save_for_ever, args=(tmp_path,))
        process.start()
        until = time.monotonic() + 60
        while started().state.newest_of("a") <= newest and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(pause_s)
        process.kill()
        process.join()
        loaded = started()
        assert loaded.state.number_of("a") == loaded.state.newest_of("a") > newest
        newest = loaded.state.newest_of("a")
        assert len(loaded.settings.models["a"].weights) == newest * 997 % 4096 + 1
