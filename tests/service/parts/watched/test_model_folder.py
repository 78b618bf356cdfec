"""A folder of models that come and go, over a target that notes what it is asked."""

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from inferpool.service.errors import ConflictError, InvalidInputError, UnknownModelError
from inferpool.service.parts.swap.requests import read_swap
from inferpool.service.parts.watched.model_folder import ModelFolder
from inferpool.service.parts.watched.versions import read_version
from inferpool.service.settings.loader import load
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.names import SettingsError
from tests.e2e.running import running
from tests.run_folders import TINY, write_colours, write_run


class FakeTarget:
    """Does at once what it is asked."""

    def __init__(self) -> None:
        self.served = frozenset({"fixed"})
        self.asked: list[tuple[str, str, Mapping[str, object]]] = []
        self.error: Exception | None = None
        self.newest = 0

    def begin_add(self, settings: Mapping[str, object]) -> str:
        name = str(settings["name"])
        self._note("add", name, settings)
        self.served |= {name}
        return name

    def begin_remove(self, name: str, *, ephemeral: bool = False) -> None:
        assert ephemeral
        self._note("remove", name, {})
        self.served -= {name}

    def begin_swap(self, name: str, request: Mapping[str, object]) -> None:
        read_swap(request, ModelSettings(source="echo"))
        self._note("swap", name, request)

    def number_next(self, name: str, number: int) -> int:
        self.newest = max(self.newest + 1, number)
        return self.newest

    def take_all(self) -> list[tuple[str, str, Mapping[str, object]]]:
        asked, self.asked = self.asked, []
        return asked

    def _note(self, kind: str, name: str, settings: Mapping[str, object]) -> None:
        if self.error is not None:
            raise self.error
        self.asked.append((kind, name, settings))


@pytest.fixture
def target() -> FakeTarget:
    return FakeTarget()


@pytest.fixture
def folder(tmp_path: Path, target: FakeTarget) -> ModelFolder:
    return ModelFolder(tmp_path, target, "verified")


def put(folder: Path, path: str, content: str = "x") -> Path:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(content)
    return folder / path


async def look_twice(folder: ModelFolder) -> None:
    await folder.look()
    await folder.look()


async def test_models_come_change_and_go_with_their_folders(folder, target, tmp_path):
    await look_twice(folder)
    assert target.take_all() == []
    put(tmp_path, "cats/2/model.pt2")
    put(tmp_path, "cats/10/model.pt2")
    await look_twice(folder)
    source = str(tmp_path / "cats/10/model.pt2")
    added = {"name": "cats", "ephemeral": True, "source": source}
    assert target.take_all() == [("add", "cats", added)]
    await look_twice(folder)
    put(tmp_path, "cats/9/model.pt2")
    await look_twice(folder)
    assert target.take_all() == [], "10 is the highest"
    put(tmp_path, "cats/11/model.pt2")
    await look_twice(folder)
    ((kind, name, request),) = target.take_all()
    assert (kind, name, request["policy"], request["ephemeral"]) == (
        "swap", "cats", "verified", True,
    )  # fmt: skip
    assert request["source"] == str(tmp_path / "cats/11/model.pt2")
    (tmp_path / "cats").rename(tmp_path / ".gone")
    await look_twice(folder)
    assert target.take_all() == [("remove", "cats", {})]


async def test_the_log_tells_a_number_that_is_not_the_folders(folder, target, tmp_path, caplog):
    caplog.set_level("INFO")
    put(tmp_path, "cats/7/model.pt2")
    await look_twice(folder)
    put(tmp_path, "cats/7/model.pt2", "other")
    await look_twice(folder)
    assert caplog.messages == [
        "cats: version 7 of the folder begins to load",
        "cats: version 7 of the folder begins to load, as version 8",
    ]


async def test_files_that_are_being_written_are_not_taken(folder, target, tmp_path):
    file = put(tmp_path, "cats/1/model.pt2", "a")
    for num in range(2, 6):
        await folder.look()
        file.write_text("a" * num)
    await folder.look()
    assert target.take_all() == []
    os.utime(file, ns=(1, 1))
    await folder.look()
    assert target.take_all() == []
    await folder.look()
    assert len(target.take_all()) == 1


async def test_an_empty_folder_of_a_version_is_not_taken(folder, target, tmp_path):
    put(tmp_path, "cats/model.toml", 'source = "nets:Net"')
    (tmp_path / "cats/1").mkdir()
    (tmp_path / "cats/readme").touch()
    await look_twice(folder)
    assert target.take_all() == []


async def test_errors_are_logged_once_and_the_next_version_is_tried(
    folder, target, tmp_path, caplog
):
    put(tmp_path, "cats/1/notes.txt")
    for _ in range(5):
        await folder.look()
    assert caplog.text.count("cannot be served") == 1
    assert "there are: none; or name the source in model.toml" in caplog.text
    put(tmp_path, "cats/1/model.pt2")
    target.error = InvalidInputError("source: no")
    for _ in range(5):
        await folder.look()
    assert caplog.text.count("cannot be served: source: no") == 1
    target.error = ConflictError("it is being changed")
    put(tmp_path, "cats/2/model.pt2")
    for _ in range(5):
        await folder.look()
    target.error = None
    await folder.look()
    assert [kind for kind, _, _ in target.take_all()] == ["add"]


async def test_a_folder_that_cannot_be_read_takes_no_model_away(folder, target, tmp_path, caplog):
    put(tmp_path, "cats/1/model.pt2")
    await look_twice(folder)
    tmp_path.rename(tmp_path.with_name("away"))
    await look_twice(folder)
    tmp_path.with_name("away").rename(tmp_path)
    await look_twice(folder)
    assert [kind for kind, _, _ in target.take_all()] == ["add"]
    assert caplog.text.count("cannot be read, so its models stay: No such file") == 1


async def test_a_model_whose_folder_goes_while_it_loads_is_removed_once_it_is_there(
    folder, target, tmp_path
):
    put(tmp_path, "cats/1/model.pt2")
    await look_twice(folder)
    target.served -= {"cats"}  # it loads
    target.error = ConflictError("cats is being changed already (add)")
    (tmp_path / "cats").rename(tmp_path / ".gone")
    await look_twice(folder)
    await look_twice(folder)
    target.error, target.served = None, target.served | {"cats"}
    await folder.look()
    assert [kind for kind, _, _ in target.take_all()] == ["add", "remove"]


async def test_a_model_that_failed_to_come_is_forgotten_with_its_folder(folder, target, tmp_path):
    put(tmp_path, "cats/1/model.pt2")
    await look_twice(folder)
    target.served -= {"cats"}
    target.error = UnknownModelError("no model is called 'cats'")
    (tmp_path / "cats").rename(tmp_path / ".gone")
    await look_twice(folder)
    target.error = None
    (tmp_path / ".gone").rename(tmp_path / "cats")
    await look_twice(folder)
    assert [kind for kind, _, _ in target.take_all()] == ["add", "add"]


async def test_files_that_come_and_go_all_the_time_take_no_model_away(
    folder, target, tmp_path, monkeypatch, caplog
):
    put(tmp_path, "cats/1/model.pt2")
    await look_twice(folder)
    monkeypatch.setattr("inferpool.service.parts.watched.versions._MAX_FILES", 3)
    for number in range(4):  # the same holds if one vanishes while it is looked at
        put(tmp_path, f"cats/2/{number}.part")
    await look_twice(folder)
    await look_twice(folder)
    assert [kind for kind, _, _ in target.take_all()] == ["add"]
    assert caplog.text.count("cats stays as it is: ") == 1
    assert "more than 3 files" in caplog.text


async def test_a_link_to_nothing_hides_no_version(folder, target, tmp_path):
    put(tmp_path, "cats/1/model.pt2")
    (tmp_path / "cats/1/.#notes").symlink_to("someone@somewhere.1234")
    await look_twice(folder)
    assert [kind for kind, _, _ in target.take_all()] == ["add"]


async def test_settings_of_a_folder_say_nothing_that_is_no_setting_of_a_model(
    folder, target, tmp_path, caplog
):
    put(tmp_path, "cats/1/model.pt2")
    put(tmp_path, "cats/1/model.toml", 'name = "dogs"\nreplicas = "two"')
    await look_twice(folder)
    assert target.take_all() == []
    text = (
        "replicas: 'two' is not \"auto\" or a whole number from 1 to 1024; name: there is no such"
    )
    assert f"cats/1 cannot be served: {text}" in caplog.text
    put(tmp_path, "cats/1/model.toml", "ephemeral = false")
    await look_twice(folder)
    assert target.take_all() == []


async def test_a_name_that_is_no_text_is_told_and_not_served(folder, target, tmp_path, caplog):
    put(tmp_path, "cats/1/readme")
    (tmp_path / "cats/1" / os.fsdecode(b"m\xff.pt2")).touch()
    await look_twice(folder)
    assert target.take_all() == []
    assert r"'m\udcff.pt2' is not UTF-8" in caplog.text


@pytest.mark.parametrize("place", ["cats/model.toml", "cats/1/model.toml"])
async def test_a_pipe_in_the_place_of_settings_is_not_waited_for(
    folder, target, tmp_path, caplog, place
):
    put(tmp_path, "cats/1/model.pt2")
    os.mkfifo(tmp_path / place)
    await look_twice(folder)
    assert target.take_all() == []
    assert "it is no regular file" in caplog.text


async def test_a_trained_version_is_judged_by_its_own_images_if_they_are_there(
    folder, target, tmp_path
):
    held_out = write_colours(tmp_path / "kept.out", num=1)
    write_run(tmp_path / "a/1", model=TINY, validation=held_out)
    await look_twice(folder)
    run = write_run(tmp_path / "a/2", model=TINY, validation=held_out)
    await look_twice(folder)
    for path, _ in held_out:
        path.unlink()
    write_run(tmp_path / "a/3", model=TINY, validation=held_out)
    await look_twice(folder)
    _, second, third = target.take_all()
    assert (second[2]["source"], second[2]["validation"]) == (str(run), str(run))
    assert "validation" not in third[2]


async def test_models_of_the_settings_are_left_alone(folder, target, tmp_path, caplog):
    put(tmp_path, "fixed/1/model.pt2")
    for _ in range(4):
        await folder.look()
    (tmp_path / "fixed/1/model.pt2").unlink()
    await look_twice(folder)
    assert target.take_all() == []
    assert caplog.text.count("it is served already") == 1


def test_settings_of_a_version_come_from_its_files(tmp_path):
    one = put(tmp_path, "a/1/net.pt2").parent
    assert read_version(one) == {"source": str(one / "net.pt2")}
    put(tmp_path, "a/model.toml", "replicas = 2\ncredit = 1")
    put(tmp_path, "a/1/model.toml", "credit = 3")
    assert read_version(one) == {"source": str(one / "net.pt2"), "replicas": 2, "credit": 3}
    put(tmp_path, "b/model.toml", 'source = "nets:Net"')
    two = put(tmp_path, "b/1/weights.safetensors").parent
    assert read_version(two)["weights"] == str(two / "weights.safetensors")
    three = put(tmp_path, "c/1/config.json").parent
    put(tmp_path, "c/1/model.safetensors")
    assert read_version(three) == {"source": f"encoder:{three}"}
    (three / "config.json").write_text('{"architectures": ["YolosForObjectDetection"]}')
    assert read_version(three) == {"source": f"transformers:{three}"}
    four = write_run(tmp_path / "d/1", model=TINY)
    assert read_version(four) == {"source": str(four)}
    (four / "card.json").unlink()
    with pytest.raises(ValueError, match="d/1 has not ended"):
        read_version(four)
    put(tmp_path, "a/1/other.pt2")
    with pytest.raises(ValueError, match=r"there are: net\.pt2, other\.pt2"):
        read_version(one)
    put(tmp_path, "a/1/model.toml", "credit =")
    with pytest.raises(ValueError, match=r"1/model\.toml: Invalid value"):
        read_version(one)


def test_a_service_that_watches_a_folder_may_start_without_a_model(tmp_path):
    assert load({"watch": "models"}, {}, tmp_path).settings.models == {}
    assert load({}, {"INFERPOOL_WATCH": "models"}, tmp_path).settings.default_model == ""
    assert set(load({"watch": "m", "model": "echo"}, {}, tmp_path).settings.models) == {"echo"}
    with pytest.raises(SettingsError, match="WATCH_POLICY"):
        load({}, {"INFERPOOL_WATCH_POLICY": "perhaps"}, tmp_path)


@pytest.mark.slow
def test_a_real_service_serves_what_is_put_into_its_folder(tmp_path):
    (tmp_path / "models").mkdir()
    with running("--watch", "models", cwd=tmp_path, ready=False) as service:
        service.wait_until_listening()

        def answered(status: int) -> Callable[[], bool]:
            return lambda: service.post("/predict/e", json={"instances": [1]}).status_code == status

        def until(met: Callable[[], bool]) -> None:
            deadline = time.monotonic() + 60
            while not met():
                assert time.monotonic() < deadline, json.dumps(service.log[-5:], default=str)
                time.sleep(0.1)

        put(tmp_path, "models/e/1/model.toml", 'source = "echo"\nreplicas = 1')
        until(answered(200))
        put(tmp_path, "models/e/20/model.toml", 'source = "echo"\nreplicas = 1\ncredit = 3')
        until(
            lambda: (
                service.post("/predict/e", json={"instances": [1]}).headers["x-model-version"]
                == "20"
            )
        )
        asked = service.post("/predict/e/versions/20", json={"instances": [1]})
        assert asked.status_code == 200
        (tmp_path / "models/e").rename(tmp_path / "gone")
        until(answered(404))
        service.process.send_signal(signal.SIGTERM)
