"""Handlers of archives: where they are found, and TorchServe's modules."""

import subprocess
import sys
from pathlib import Path

import pytest

from inferpool.models.errors import ModelError, SourceError
from inferpool.models.torchserve.model import model_of_archive
from tests.models.items import answers, json_item, loaded
from tests.models.torchserve.archives import make_folder

ENTRY = """
class Context:
    pass

def run(data, context):
    if data is None:
        context.manifest["seen"] = "initialised"
        return
    return [context.manifest["seen"]] * len(data)
"""


def archive(folder: Path, code: str, config: str = "", **fields: object) -> Path:
    if config:
        fields["configFile"] = "model-config.yaml"
    make_folder(folder, **fields)
    (folder / "handler.py").write_text(code)
    if config:
        (folder / "model-config.yaml").write_text(config)
    return folder


def answered(folder: Path, value: object = 1, **options: object) -> object:
    return answers(loaded(model_of_archive(folder, **options)), [json_item(value)])[0]


def test_a_function_of_another_name_is_called_once_to_initialise(tmp_path):
    folder = archive(tmp_path / "entry", ENTRY, handler="handler.py:run")

    assert answered(folder) == "initialised"


def test_an_object_may_stand_in_the_place_of_a_function(tmp_path):
    code = """
class Service:
    def __call__(self, data, context):
        return ["called"] * len(data or ())

handle = Service()
"""
    assert answered(archive(tmp_path / "object", code)) == "called"


@pytest.mark.parametrize("deed", ["import sys; sys.exit(3)", "raise ValueError('a bad file')", "("])
def test_a_handler_that_fails_on_import_is_refused_with_its_line(tmp_path, deed):
    with pytest.raises(SourceError, match=r"'handler.py' fails on import: .*handler.py:1\)"):
        answered(archive(tmp_path / "bad", deed))


def test_a_class_below_torchserves_own_is_the_one_of_its_file(tmp_path):
    code = """
from ts.torch_handler.base_handler import BaseHandler
from ts.torch_handler.image_classifier import ImageClassifier

class Mine(BaseHandler):
    def initialize(self, context):
        self.config = context.model_yaml_config

    def handle(self, data, context):
        return [self.config["top"]] * len(data)
"""
    assert answered(archive(tmp_path / "below", code, "top: 5\n")) == 5


def test_an_archive_does_not_get_the_modules_of_another(tmp_path):
    for number in (1, 2):
        folder = archive(tmp_path / f"archive{number}", "from helper import handle\n")
        (folder / "helper.py").write_text(
            f"def handle(data, context):\n    return [{number}] * len(data or ())\n"
        )
        assert answered(folder) == number


def test_an_envelope_makes_one_batch_of_all_instances(tmp_path):
    code = """
def handle(data, context):
    return [len(data) if isinstance(row, bytes) else row * 2 for row in data or ()]
"""
    folder = archive(tmp_path / "toy", code)

    document = {"instances": [1, 2, {"b64": "YQ=="}]}
    assert answered(folder, document, envelope="json") == '{"predictions": [2, 4, 3]}'
    assert answered(folder, 4, envelope="body") == 8
    with pytest.raises(ModelError, match="'kserve' is not supported"):
        answered(folder, envelope="kserve")


def test_a_handler_without_its_methods_is_refused(tmp_path):
    with pytest.raises(SourceError, match=r"Empty has no initialize"):
        answered(archive(tmp_path / "empty", "class Empty:\n    pass\n"))


def test_an_installed_torchserve_has_the_modules_that_are_not_ours(tmp_path):
    """In a process of its own, since `ts` stays as it was imported."""
    installed = tmp_path / "site" / "ts"
    for name, code in {
        "__init__.py": "raise AssertionError('ours comes first')",
        "model_loader.py": "",
        "torch_handler/__init__.py": "",
        "torch_handler/vllm_handler.py": "from ts.utils.util import PredictionException as P",
    }.items():
        (installed / name).parent.mkdir(parents=True, exist_ok=True)
        (installed / name).write_text(code)
    code = (
        "from inferpool.models.torchserve.modules import supply_modules\n"
        "supply_modules()\n"
        "from ts.torch_handler.vllm_handler import P\n"
        "import ts.context, ts\n"
        "print(ts.__version__, P.__module__)\n"
    )

    found = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )

    assert found.stdout == "0.12.0 inferpool.models.torchserve.handlers.util\n", found.stderr
