import contextlib
import os

import pytest
import torch

from inferpool.models.base import Model
from inferpool.models.errors import InputError, SourceError
from inferpool.models.item import Features, Item
from inferpool.models.overrides import is_streaming
from inferpool.models.sources import poisonable
from inferpool.models.sources.registry import build
from inferpool.models.streams import StreamSteps


class Strict(Model):
    """Refuses parameters that it does not know, and has attributes of its own."""

    max_image_pixels = 5

    def __init__(self, *, factor: int = 2) -> None:
        self.factor = factor

    def preprocess(self, item: Item) -> Features:
        if item.parameters:
            raise InputError("no parameters")
        return {"x": torch.tensor(len(item.payload))}

    def forward(self, batch: Features) -> Features:
        assert set(batch) == {"x"}
        return {"y": batch["x"] * self.factor}


class DeathError(Exception):
    pass


@pytest.fixture(autouse=True)
def deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(pid: int, number: int) -> None:
        assert pid == os.getpid()
        raise DeathError

    monkeypatch.setattr("inferpool.models.sources.poisonable.os.kill", kill)


def item(**parameters: object) -> Item:
    return Item(kind="bytes", payload=memoryview(b"abc"), parameters=parameters)


def wrapped(**options: object) -> Model:
    inner = {"source": f"{__name__}:Strict", "options": options}
    return build("inferpool.models.sources.poisonable:Poisonable", "DEFAULT", inner)


def ask(model: Model, *items: Item) -> object:
    batch = model.collate([model.preprocess(each) for each in items])
    outputs = model.postprocess(model.forward(batch))
    return model.render_batch(outputs, [each.parameters for each in items])


def test_model_without_poison_is_the_users_own_in_all_else():
    model = wrapped(factor=3)
    assert isinstance(model, Strict)
    assert ask(model, item(), item()) == [9, 9]
    with pytest.raises(InputError, match="no parameters"):
        ask(model, item(other=1))
    with pytest.raises(SourceError, match="factr"):
        wrapped(factr=3)


def test_poisoned_input_dies_where_it_says():
    model = wrapped()
    with pytest.raises(DeathError):
        model.preprocess(item(inferpool_chaos="preprocess-1"))

    for_forward = item(inferpool_chaos="forward-2")
    batch = model.collate([model.preprocess(each) for each in (item(), for_forward)])
    with pytest.raises(DeathError):
        model.forward(batch)

    for_render = item(inferpool_chaos="render")
    outputs = model.forward(model.collate([model.preprocess(for_render)]))
    with pytest.raises(DeathError):
        model.render_batch(outputs, [for_render.parameters])


@pytest.mark.parametrize("place", ["preprocess", "forward", "render"])
def test_poison_that_exits_or_scribbles_does_so_where_it_says(
    place: str, monkeypatch: pytest.MonkeyPatch
):
    written: list[str] = []
    monkeypatch.setattr(poisonable, "_scribble", lambda: written.append(place))
    with pytest.raises(SystemExit):
        ask(wrapped(), item(inferpool_chaos=f"{place}-exit-1"))
    assert ask(wrapped(), item(), item(inferpool_chaos=f"{place}-scribble-2")) == [6, 6]
    assert written == [place]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the child only writes
def test_scribbling_writes_to_shared_memory_and_pipes_and_to_no_file(tmp_path):
    memory = os.memfd_create("region")
    reader, writer = os.pipe()
    with (tmp_path / "file").open("w+") as file:
        file.write("kept")
        file.flush()
        child = os.fork()
        if not child:  # which has no descriptor of the test's
            for fd in {*range(3, 4096)} - {memory, reader, writer, file.fileno()}:
                with contextlib.suppress(OSError):
                    os.close(fd)
            poisonable._scribble()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert os.pread(memory, 4, 0) == os.read(reader, 4) == b"\xff" * 4
        file.seek(0)
        assert file.read() == "kept"
    for fd in (memory, reader, writer):
        os.close(fd)


@pytest.mark.parametrize("kind", ["CountingStream", "AsyncCountingStream", "JoiningStream"])
def test_stream_is_the_users_own_until_its_input_is_poisoned(kind):
    inner = {"source": f"tests.streaming_model:{kind}"}
    model = build("inferpool.models.sources.poisonable:Poisonable", "DEFAULT", inner)

    def parts(**parameters: object) -> list[object]:
        instance = Item(kind="json", payload=memoryview(b'{"n": 7}'), parameters=parameters)
        steps = StreamSteps(model, model.collate([model.preprocess(instance)]))
        found: list[object] = []
        with contextlib.suppress(StopIteration):
            while len(found) < 9:
                found.append(steps.next())
        steps.close()
        return found

    assert is_streaming(model)
    assert len(parts()) >= 3
    for place in "preprocess", "forward", "render":
        with pytest.raises(DeathError):
            parts(inferpool_chaos=f"{place}-die-0")


def test_chaos_and_the_model_mean_the_same_parameter_places_and_ways():
    from inferpool.service.tools.chaos.faults import PARAMETER, PLACES, POISONS

    assert PARAMETER == poisonable.PARAMETER
    assert {each.how for each in POISONS.values()} == set(poisonable.HOWS)
    for place in PLACES:
        with pytest.raises(DeathError):
            ask(wrapped(), item(inferpool_chaos=f"{place}-0"))
