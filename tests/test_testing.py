"""Unit tests of a model, as its author writes them."""

import asyncio
import io
import os
import signal
import subprocess
import sys
from collections.abc import Mapping

import pytest
import torch

from inferpool.models.base import Features, Item, Model
from inferpool.models.errors import InputError
from inferpool.models.spec import Placement, TensorSpec
from inferpool.models.upload import Upload
from inferpool.service.client.errors import (
    InvalidInputError,
    ModelFailedError,
    NonFiniteOutputError,
)
from inferpool.service.errors import StartError
from inferpool.service.settings.names import SettingsError
from inferpool.testing import client, predict
from tests.small_classifier import SmallClassifier
from tests.streaming_model import AsyncCountingStream, CountingStream, JoiningStream


class SquareRoot(Model):
    inputs = (TensorSpec(name="x", dtype="float32", shape=(-1, 2)),)
    outputs = (TensorSpec(name="y", dtype="float32", shape=(-1, 2)),)

    def __init__(self, offset: float = 0.0) -> None:
        self.offset = offset

    def load(self, placement: Placement) -> None:
        self.device = torch.device(placement.devices[0])

    def forward(self, batch: Features) -> Features:
        if (batch["x"] == 13).any():
            raise ArithmeticError("unlucky")
        return {"y": batch["x"].to(self.device).sqrt() + self.offset}

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        digits = parameters.get("digits", 3)
        if not isinstance(digits, int):
            raise InputError("digits: must be a whole number")
        return [round(each, digits) for each in outputs["y"].tolist()]


def test_model_predicts_on_its_whole_path():
    assert predict(SquareRoot, [4, 2]).value == [2.0, 1.414]
    assert predict(SquareRoot, torch.tensor([4.0, 2.0]), digits=1).value == [2.0, 1.4]


class Described(Model):
    form = "instance"
    path = "/describe"

    def preprocess(self, item: Item) -> Features:
        form = item.json()
        assert isinstance(form, dict)
        self.found = {
            name: [each.filename, len(each.data)] if isinstance(each, Upload) else each
            for name, each in form.items()
        }
        return {"x": torch.zeros(1)}

    def forward(self, batch: Features) -> Features:
        return batch

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        return [self.found, parameters]


class Bare(Described):
    envelope = False

    def preprocess(self, item: Item) -> Features:
        self.found = {"document": item.json()}
        return {"x": torch.zeros(1)}


def test_a_whole_form_and_a_whole_document_reach_their_models():
    form = {"text": "hello", "image": io.BytesIO(b"abc"), "numbers": [1, 2]}
    found = {"text": "hello", "image": ["image", 3], "numbers": [1, 2]}
    assert predict(Described, form, top=3).value == [found, {"top": 3}]
    with client(Bare) as asking:
        for document in ({"instances": [{"b64": "AAAA"}]}, "text", 3, None):
            answer = asking.predict(document, envelope=False, parameters={"k": 1})
            assert answer.value == [{"document": document}, {"k": 1}]
        (model,) = asking.models()
        assert (model.envelope, model.path) == (False, "/describe")
    with client(Described, form="instances", path="", envelope=False) as asking:
        (model,) = asking.models()
        assert (model.envelope, model.path) == (False, "")


@pytest.mark.parametrize("kind", [CountingStream, AsyncCountingStream, JoiningStream])
def test_parts_of_a_stream_are_collected(kind: type[Model]):
    with client(kind) as asking:
        assert asking.predict({"n": 3, "parts": 3}).value == [3, 4, 5]
        found = asking.predict_many([{"n": n, "parts": n} for n in range(20)])
        assert [each.value for each in found] == [list(range(n, 2 * n)) for n in range(20)]
        with pytest.raises(ModelFailedError, match="I was told to"):
            asking.predict({"n": 3, "do": "raise"})
        assert asking.predict({"n": 3, "parts": 1}).value == [3]


def test_input_is_checked_as_a_service_checks_it():
    with pytest.raises(InvalidInputError, match=r"shape|length|2"):
        predict(SquareRoot, [1, 2, 3])
    with pytest.raises(InvalidInputError, match="digits: must be a whole number"):
        predict(SquareRoot, [1, 2], digits="all")


def test_failures_are_the_errors_of_a_client():
    with client(SquareRoot) as asking:
        with pytest.raises(NonFiniteOutputError):
            asking.predict([-1, 1])
        with pytest.raises(ModelFailedError, match='raise ArithmeticError\\("unlucky"\\)'):
            asking.predict([13, 1])
        assert asking.predict([1, 4]).value == [1.0, 2.0]


def test_class_may_be_local_and_an_event_loop_may_run():
    class ModelInATest(SquareRoot):
        def preprocess(self, item: Item) -> Features:
            return {"x": torch.tensor([item.json(), 0.0])}

    async def run() -> object:
        return predict(ModelInATest, 9).value

    assert asyncio.run(run()) == [3.0, 0.0]


def test_client_takes_options_and_settings():
    with client(SquareRoot, options={"offset": 1.0}) as asking:
        assert asking.predict([4, 9]).value == [3.0, 4.0]
        assert asking.predict([0, 1]).value == [1.0, 2.0]
    with pytest.raises(SettingsError, match="did you mean options"), client(SquareRoot, option={}):
        pass


def test_model_that_cannot_be_loaded_is_an_error():
    class UnloadableModel(SquareRoot):
        def load(self, placement: Placement) -> None:
            raise FileNotFoundError("weights.bin")

    with pytest.raises(StartError, match=r"unloadablemodel: .*FileNotFoundError: weights\.bin"):
        predict(UnloadableModel, [1, 2])


def test_nothing_is_kept_in_the_users_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert predict(SquareRoot, [4, 2]).value == [2.0, 1.414]
    assert not (tmp_path / "state").exists()
    with client(SquareRoot, job_store=tmp_path / "jobs"):  # whoever wants jobs names a folder
        pass
    assert (tmp_path / "jobs").is_dir()


def test_process_is_left_as_it_was():
    threads, affinity = torch.get_num_threads(), os.sched_getaffinity(0)
    environ = dict(os.environ)
    photo = torch.zeros(3, 40, 40, dtype=torch.uint8)
    assert len(predict(SmallClassifier, photo, top_k=3).labels) == 3
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == (threads, affinity)
    assert dict(os.environ) == environ


def test_options_must_be_what_a_service_could_have():
    with client(SquareRoot, options={"offset": 1.0}) as asking, client(SquareRoot) as other:
        assert asking.predict([4, 9]).value == [3.0, 4.0]
        assert other.predict([4, 9]).value == [2.0, 3.0]
    with pytest.raises(SettingsError, match=r"^options\.offset: None cannot be passed"):
        predict_with({"offset": None})
    with pytest.raises(SettingsError, match=r"^options\.of\.set: a object cannot be passed"):
        predict_with({"of": {"set": object()}})


def predict_with(options: Mapping[str, object]) -> None:
    with client(SquareRoot, options=options) as asking:
        asking.predict([1, 2])


def test_instance_of_a_model_is_refused():
    with pytest.raises(TypeError, match="a SquareRoot cannot be served: give its class"):
        predict(SquareRoot(), [1, 2])  # type: ignore[arg-type]  # what a user may do
    with pytest.raises(TypeError, match="models cannot be set"), client(SquareRoot, models={}):
        pass


def test_clients_may_be_closed_in_any_order():
    first, second = client(SquareRoot), client(SmallClassifier)
    first.__enter__()
    asking = second.__enter__()
    first.__exit__(None, None, None)
    assert asking.models()[0].name == "smallclassifier"
    second.__exit__(None, None, None)


def test_ctrl_c_ends_a_test_while_its_model_loads():
    text = """
import time
from inferpool import Model, testing
class Slow(Model):
    def load(self, placement):
        print("loads", flush=True)
        time.sleep(600)
testing.predict(Slow, 1)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "loads\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert err.splitlines()[-1] == "KeyboardInterrupt"


def test_every_answer_of_a_mounted_service_forbids_to_guess_its_type():
    with client(SquareRoot) as asking:
        assert asking.predict([4.0, 9.0]).headers["x-content-type-options"] == "nosniff"
