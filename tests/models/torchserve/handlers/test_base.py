"""Networks are loaded from archives, and no code that lies in weights runs."""

import importlib
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from inferpool.models.errors import CheckpointError, ModelError, SourceError
from inferpool.models.torchserve.handlers import HANDLERS, MODULES
from inferpool.models.torchserve.handlers.base import BaseHandler
from tests.models.torchserve.handlers.archives import CLASSIFIER, StillContext, write_archive


class StepsHandler(BaseHandler):
    """A user's class whose archive has one network."""

    def started(self, archive: Path, config: dict[str, Any] | None = None) -> "StepsHandler":
        self.initialize(StillContext(archive, config))
        return self


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return write_archive(tmp_path / "archive", "base_handler", CLASSIFIER)


def change_manifest(archive: Path, **model: str | None) -> None:
    path = archive / "MAR-INF" / "MANIFEST.json"
    manifest = json.loads(path.read_text())
    manifest["model"] |= model
    path.write_text(json.dumps(manifest))


def test_a_batch_of_numbers_goes_through_the_three_steps(archive: Path):
    handler = StepsHandler().started(archive)
    assert (handler.initialized, handler.mapping, handler.map_location) == (True, None, "cpu")
    assert handler.get_device() == torch.device("cpu")
    assert not handler.model.training
    answers = handler.handle(torch.zeros(2, 3, 30, 30).tolist(), StillContext(archive))
    assert [len(each) for each in answers] == [7, 7]
    assert answers[0] == answers[1] != [0] * 7


def test_weights_are_optional_for_a_class(archive: Path):
    change_manifest(archive, serializedFile=None)
    assert StepsHandler().started(archive).model_pt_path is None


class Opens:
    """Opens a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


def test_code_in_weights_does_not_run(archive: Path, tmp_path: Path):
    torch.save({"conv.weight": Opens(tmp_path / "ran")}, archive / "weights.pt")
    with pytest.raises(CheckpointError, match="loading those would run code"):
        StepsHandler().started(archive)
    assert not (tmp_path / "ran").exists()


def test_weights_of_another_network_are_refused(archive: Path):
    torch.save(nn.Linear(1, 1).state_dict(), archive / "weights.pt")
    with pytest.raises(CheckpointError, match="does not fit Net"):
        StepsHandler().started(archive)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"modelFile": "lost.py"}, "names 'lost.py' as modelFile: it is not there"),
        ({"modelFile": "weights.pt"}, "that is no file of Python"),
        ({"modelFile": None, "serializedFile": None}, "neither a serializedFile nor a modelFile"),
        ({"modelFile": None}, r"weights\.pt is missing, or no TorchScript file"),
        ({"modelFile": None, "serializedFile": "weights.so"}, r"libraries \(\.so\) of AOTInductor"),
        (
            {"modelFile": None, "serializedFile": "lost.pt"},
            r"lost\.pt is missing, or no TorchScript file",
        ),
    ],
)
def test_an_archive_that_lacks_something_is_refused(
    model: dict[str, str | None], message: str, archive: Path
):
    change_manifest(archive, **model)
    with pytest.raises(SourceError, match=message):
        StepsHandler().started(archive)


def test_a_file_with_two_classes_is_refused(archive: Path):
    (archive / "two.py").write_text("class A: pass\n\n\nclass B: pass\n")
    change_manifest(archive, modelFile="two.py")
    with pytest.raises(SourceError, match="must define one class, the network's, not A, B"):
        StepsHandler().started(archive)


def test_a_class_is_found_in_its_file_whatever_else_is_called_so(archive: Path):
    (archive / "json.py").write_text(CLASSIFIER)
    change_manifest(archive, modelFile="json.py")
    assert StepsHandler().started(archive).model.head.out_features == 7
    assert sys.modules["json"] is json


def test_a_file_of_onnx_is_opened_for_handlers_that_call_it(archive: Path):
    graph = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["y"])],
        "negation",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    (archive / "net.onnx").write_bytes(model.SerializeToString())
    change_manifest(archive, modelFile=None, serializedFile="net.onnx")
    session = StepsHandler().started(archive).model
    assert isinstance(session, onnxruntime.InferenceSession)
    assert session.get_session_options().intra_op_num_threads == torch.get_num_threads()
    assert session.run(None, {"x": torch.ones(2).numpy()})[0].tolist() == [-1, -1]


def test_compiling_is_named_and_not_done(archive: Path, caplog: pytest.LogCaptureFixture):
    handler = StepsHandler().started(archive, {"pt2": {"compile": {"enable": True}}})
    assert [each.levelno for each in caplog.records] == [logging.WARNING]
    assert "served as it is, not compiled" in caplog.text
    assert type(handler.model).__name__ == "Net"


def test_names_of_classes_that_are_none_are_refused(archive: Path):
    (archive / "index_to_name.json").write_text("[]")
    with pytest.raises(ModelError, match=r"index_to_name\.json must hold an object"):
        StepsHandler().started(archive)


@pytest.mark.parametrize(
    ("profile", "names"), [(True, {"preprocess", "inference", "postprocess"}), (False, set())]
)
def test_steps_are_measured_if_the_archive_asks_for_it(
    profile: bool, names: set[str], archive: Path
):
    context = StillContext(archive, {"handler": {"profile": profile}})
    measured: list[str] = []
    context.metrics.add_time = lambda name, *_: measured.append(name)  # type: ignore[method-assign]
    handler = StepsHandler()
    handler.initialize(context)
    handler.handle(torch.zeros(1, 3, 30, 30).tolist(), context)
    assert {*measured} == {"HandlerTime", *(f"ts_handler_{name}" for name in names)}


class Explains(StepsHandler):
    def get_insights(self, tensor_data: Any, inputs: Any, target: Any = 0) -> Any:
        return [tensor_data.shape, inputs, target]

    def preprocess(self, data: Any) -> Any:
        return torch.zeros(len(data), 3, 30, 30)

    def describe_handle(self) -> Any:
        return {"takes": "zeros"}


def test_a_users_class_may_explain_and_describe(archive: Path):
    context = StillContext(archive)
    context.headers = {"explain": "True"}
    rows = [{"data": b"zero", "target": 3}]
    assert Explains().started(archive).handle(rows, context) == [(1, 3, 30, 30), b"zero", 3]
    numbers = torch.zeros(1, 3, 30, 30).tolist()
    with pytest.raises(NotImplementedError, match="StepsHandler explains no answers"):
        StepsHandler().started(archive).handle(numbers, context)
    context.headers = {"describe": "True"}
    assert Explains().started(archive).handle(rows, context) == [{"takes": "zeros"}]


def test_a_users_module_imports_what_torchserve_has(monkeypatch: pytest.MonkeyPatch):
    for name, ours in MODULES.items():
        monkeypatch.setitem(sys.modules, name, importlib.import_module(ours))
    for name in ("ts", "ts.torch_handler", "ts.utils", "ts.handler_utils"):
        monkeypatch.setitem(sys.modules, name, type(sys)(name))
    found: dict[str, Any] = {"__name__": "users"}
    exec(
        "from ts.torch_handler.base_handler import BaseHandler\n"
        "from ts.torch_handler.vision_handler import VisionHandler\n"
        "from ts.torch_handler.image_classifier import ImageClassifier\n"
        "from ts.torch_handler.object_detector import ObjectDetector\n"
        "from ts.torch_handler.image_segmenter import ImageSegmenter\n"
        "from ts.torch_handler.text_handler import TextHandler\n"
        "from ts.torch_handler.text_classifier import TextClassifier\n"
        "from ts.handler_utils.timer import timed\n"
        "from ts.handler_utils.text_utils import get_tokenizer, ngrams_iterator\n"
        "from ts.utils.util import PredictionException, get_yaml_config, "
        "list_classes_from_module, load_label_mapping, map_class_to_label\n",
        found,
    )
    assert issubclass(found["TextClassifier"], found["BaseHandler"])
    for name, ours in HANDLERS.items():
        module, _, called = ours.partition(":")
        called_there = name.title().replace("_", "")
        assert found[called_there] is getattr(importlib.import_module(module), called)


def test_the_names_of_handlers_import_no_torch():
    code = "import sys, inferpool.models.torchserve.handlers; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
