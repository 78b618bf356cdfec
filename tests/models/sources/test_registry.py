import os
import py_compile
import re
import sys
import textwrap
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest
import torch

from inferpool.models.errors import CheckpointError, SourceError
from inferpool.models.sources import classes
from inferpool.models.sources.archives import ExportedModel, ScriptedModel
from inferpool.models.sources.echo import Echo
from inferpool.models.sources.registry import build, specs_of
from inferpool.models.vision.efficientnet import EfficientNetLite0
from tests.models.items import answers, json_item, loaded

USER_MODULE = """
    import torch
    from torch import nn
    from inferpool.models.base import Model
    from inferpool.models.spec import TensorSpec

    class Doubler(Model):
        inputs = [TensorSpec(name="x", dtype="float32", shape=(-1, 2))]
        def __init__(self, factor=2, weights=None):
            self.factor, self.weights = factor, weights
        def forward(self, batch):
            return {"y": batch["x"] * self.factor}

    class Plain(Model):
        pass

    class Net(nn.Module):
        def __init__(self, width=2):
            super().__init__()
            self.linear = nn.Linear(2, width)
        def forward(self, x):
            return self.linear(x)

    class Fussy(Model):
        def __init__(self):
            raise RuntimeError("no licence found")

    class Neither:
        pass

    class Outer:
        class Inner(Plain):
            pass

    def function():
        pass
"""


@pytest.fixture
def user(tmp_path, monkeypatch):
    """A project's folder, as the current one, with a module of models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != ""])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    known = set(sys.modules)
    (tmp_path / "mymodels.py").write_text(textwrap.dedent(USER_MODULE))
    yield tmp_path
    for name in set(sys.modules) - known:
        if name.startswith(("mymodels", "broken", "package")):
            del sys.modules[name]


def refused(source, weights="DEFAULT", **options):
    with pytest.raises(SourceError) as info:
        loaded(build(source, weights, options))
    return str(info.value)


# What is built


def test_names_of_what_ships_build_it():
    assert isinstance(build("efficientnet_lite0", "DEFAULT", {}), EfficientNetLite0)
    assert isinstance(build("echo", None, {"delay_s": 0.5}), Echo)


def test_a_users_model_gets_the_options_and_the_weights_if_it_has_an_argument_for_them(user):
    model = loaded(build("mymodels:Doubler", "DEFAULT", {"factor": 3}))
    assert answers(model, [json_item([1, 2])]) == [[3.0, 6.0]]
    assert vars(build("mymodels:Doubler", "a.pth", {}))["weights"] == "a.pth"
    assert vars(build("mymodels:Doubler", None, {}))["weights"] is None
    assert "takes no weights" in refused("mymodels:Plain", "a.pth")


def test_nested_classes_and_modules_are_found(user):
    assert type(build("mymodels:Outer.Inner", None, {})).__name__ == "Inner"
    (user / "package").mkdir()
    (user / "package" / "__init__.py").touch()
    (user / "mymodels.py").rename(user / "package" / "deep.py")
    assert type(build("package.deep:Plain", None, {})).__name__ == "Plain"


class Installed:
    """Finds a module where it lies, as an editable installation does."""

    @staticmethod
    def find_spec(name, path, target=None):
        if name == "package.deep":
            return spec_from_file_location(name, "package/deep.py")
        return None


@pytest.mark.parametrize("finders", [(), (Installed,)], ids=["here", "installed"])
def test_code_is_what_a_file_says_even_if_older_bytecode_fits_its_date(user, monkeypatch, finders):
    monkeypatch.setattr(classes, "parent_process", object)  # as in a worker
    monkeypatch.setattr(sys, "meta_path", [*finders, *sys.meta_path])
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (user / "package").mkdir()
    (user / "package" / "__init__.py").touch()
    deep = (user / "mymodels.py").rename(user / "package" / "deep.py")
    os.utime(deep, (1e9, 1e9))
    bytecode = Path(py_compile.compile(str(deep)))
    for factor, was in (3, 2), (4, 3):
        deep.write_text(deep.read_text().replace(f"factor={was}", f"factor={factor}"))
        os.utime(deep, (1e9, 1e9))
        assert vars(build("package.deep:Doubler", None, {}))["factor"] == factor
        for name in ("package.deep", "package"):
            del sys.modules[name]
    written = bytecode.stat().st_mtime_ns
    build("package.deep:Doubler", None, {})
    assert bytecode.stat().st_mtime_ns == written, "it is used, and not made anew"


def test_a_users_network_is_wrapped_and_its_weights_loaded(user):
    torch.save({"linear.weight": torch.eye(2), "linear.bias": torch.ones(2)}, "w.pth")
    inputs = [{"name": "x", "dtype": "float32", "shape": [-1, 2]}]
    model = loaded(build("mymodels:Net", "w.pth", {"inputs": inputs}))
    assert answers(model, [json_item([4, 5])]) == [[5.0, 6.0]]
    assert model.outputs[0].shape == (-1, 2)
    with pytest.raises(CheckpointError, match="does not fit Net: 2 of another shape"):
        loaded(build("mymodels:Net", "w.pth", {"width": 7}))


def test_archives_are_built_by_their_suffix(tmp_path):
    for name in ("a.pt2", "a.pt", "a.ts", "a.torchscript"):
        (tmp_path / name).touch()
    assert isinstance(build(str(tmp_path / "a.pt2"), "DEFAULT", {}), ExportedModel)
    inputs = [{"name": "x", "dtype": "float32", "shape": [-1, 2]}]
    for name in ("a.pt", "a.ts", "a.torchscript"):
        model = build(str(tmp_path / name), None, {"inputs": inputs})
        assert isinstance(model, ScriptedModel)
        assert model.inputs == specs_of(inputs, "inputs")


# What is refused


def test_an_unknown_form_is_told_the_forms():
    assert refused("efficientnet_lite") == (
        "there is no source 'efficientnet_lite': did you mean efficientnet_lite0?"
    )
    for source in ("something", "", ":", "module:", ":Class", "torchvision:", "model.tflite"):
        assert "a source is efficientnet_lite0, minilm_l6, echo, torchvision:NAME" in refused(
            source
        )


def test_a_module_that_is_not_there_is_named_with_what_is_near(user):
    assert refused("mymodel:Doubler") == (
        f"there is no module 'mymodel': it must be installed, or lie under {user}, "
        "which has mymodels"
    )
    assert refused("mymodels.py:Doubler") == "a module is named without .py: mymodels:CLASS"
    assert "there is no module 'nowhere': " in refused("nowhere.inside:Class")
    assert "there is no module 'mymodels.inside': " in refused("mymodels.inside:Class")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import surely_not_installed", "No module named 'surely_not_installed'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("from torch import nonsense", "ImportError: cannot import name 'nonsense'"),
    ],
)
def test_a_module_that_fails_on_import_is_told_by_its_own_error(user, code, message):
    (user / "broken.py").write_text(f"\n{code}\n")
    text = refused("broken:Class")
    assert "module 'broken' fails on import" in text
    assert message in text
    assert text.endswith(f"({user / 'broken.py'}:2)")


def test_a_syntax_error_in_what_a_module_imports_is_told_by_its_own_file_and_line(user):
    (user / "broken.py").write_text("import broken_too\n")
    (user / "broken_too.py").write_text("\n\nclass Net(:\n")
    text = refused("broken:Class")
    assert text.startswith("module 'broken' fails on import: SyntaxError: ")
    assert text.endswith(f"({user / 'broken_too.py'}:3)")


@pytest.mark.parametrize("package", ["models", "workers", "service"])
def test_a_users_package_may_be_called_as_one_of_our_folders(user, package, monkeypatch):
    (user / package).mkdir()
    (user / package / "net.py").write_text("class Foo: pass\n")
    assert refused(f"{package}.net:Foo").startswith(
        f"module '{package}.net' fails on import: ImportError: write `inferpool.{package}` to "
        f"import this. If you have a package `{package}` of your own, give it an __init__.py"
    )
    (user / package / "__init__.py").touch()
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, package)
    assert refused(f"{package}.net:Foo").startswith(f"{package}.net:Foo is no subclass of")


def test_a_class_that_is_not_there_is_named_with_what_is_near(user):
    assert refused("mymodels:Dubler") == "module 'mymodels' has no 'Dubler': it has Doubler"
    assert "it has Doubler, Plain, Net, Fussy" in refused("mymodels:Xyz")
    assert "has no 'Outer.Other'" in refused("mymodels:Outer.Other")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("Neither", "is no subclass of"),
        ("function", "is no class: it must be a subclass of"),
        ("torch", "is no class: it must be a subclass of"),
    ],
)
def test_anything_but_a_model_is_refused(user, name, what):
    assert refused(f"mymodels:{name}") == (
        f"mymodels:{name} {what} inferpool.Model or torch.nn.Module"
    )


def test_options_that_are_not_taken_are_named_with_those_that_are(user):
    assert "unexpected keyword argument 'fctor'; it takes factor" in refused(
        "mymodels:Doubler", fctor=3
    )
    assert "unexpected keyword argument 'size'; it takes width" in refused("mymodels:Net", size=3)
    assert "it takes delay_s" in refused("echo", delay=1)
    assert "it takes none" in refused("efficientnet_lite0", size=1)
    assert "missing 'inputs'" not in refused("mymodels:Net", inputs=3)


def test_a_constructor_that_fails_is_told_by_its_own_error(user):
    text = refused("mymodels:Fussy")
    assert text.startswith("mymodels:Fussy cannot be constructed: RuntimeError: no licence found")
    assert "mymodels.py:" in text
    assert "delay_s must be from 0" in refused("echo", delay_s=-1)


def test_files_that_are_not_there_or_no_models_are_refused(user):
    assert "there is no file a.pt2" in refused("a.pt2")
    assert "there is no file a.pt " in refused("a.pt")
    assert "a.pth is a file of weights: name the network as the source" in refused("a.pth")
    assert "is a file of weights" in refused("models/a.safetensors")


def test_weights_for_what_takes_none_are_refused(user):
    assert refused("echo", "a.pth") == "echo takes no weights, but was given 'a.pth'"
    (user / "a.pt2").touch()
    assert "takes no weights" in refused("a.pt2", "a.pth")


@pytest.mark.parametrize(
    "value",
    ["x", [{"name": "x"}], [{"name": "x", "dtype": "float32", "shape": "4"}], [{"nome": 1}]],
)
def test_malformed_specs_are_refused_with_an_example(value):
    with pytest.raises(SourceError, match=r"option 'inputs' must be a list like \[\{name"):
        specs_of(value, "inputs")
    with pytest.raises(SourceError, match="no dtype 'float'; known are bool"):
        specs_of([{"name": "x", "dtype": "float", "shape": [-1]}], "inputs")


@pytest.mark.parametrize(
    ("shape", "right"), [([3, 8], "[-1, 3, 8]"), ([3], "[-1, 3]"), ([1, 3], "[-1, 3]")]
)
def test_spec_without_the_batch_is_refused_with_the_shape_to_write(shape, right):
    with pytest.raises(SourceError, match=re.escape("'inputs': the shape of 'x' must")) as caught:
        specs_of([{"name": "x", "dtype": "float32", "shape": shape}], "inputs")
    assert str(caught.value).endswith(f"write {right}, not {shape}")
    assert specs_of([{"name": "x", "dtype": "float32", "shape": []}], "inputs")[0].shape == ()
