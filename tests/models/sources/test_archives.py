import re
import warnings
import zipfile

import pytest
import torch
from torch import nn
from torch.export import Dim

from inferpool.models.errors import InputError, ModelError, SourceError
from inferpool.models.sources.archives import ExportedModel, ScriptedModel
from inferpool.models.spec import TensorSpec
from tests.models.items import CPU, answers, json_item, loaded, run, tensor_item

# torch.jit is deprecated, and still what users have.
scripting = pytest.mark.filterwarnings("ignore:`torch.jit")


class Pair(nn.Module):
    """Two inputs, two named outputs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x, y):
        return {"logits": self.linear(x), "sum": x + y}


def exported(path, module, args, **options):
    torch.export.save(torch.export.export(module, args, **options), path)
    return loaded(ExportedModel(path))


def spec(name, dtype, *shape):
    return TensorSpec(name=name, dtype=dtype, shape=shape)


BATCH = Dim("batch")


# torch.export


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # before torch 2.12
def test_a_program_says_what_it_takes_and_gives(tmp_path):
    free = ({0: BATCH}, {0: BATCH})
    model = exported(
        tmp_path / "a.pt2", Pair(), (torch.zeros(3, 4), torch.zeros(3, 4)), dynamic_shapes=free
    )
    assert model.inputs == [spec("x", "float32", -1, 4), spec("y", "float32", -1, 4)]
    assert model.outputs == [spec("logits", "float32", -1, 3), spec("sum", "float32", -1, 4)]
    with pytest.raises(InputError, match=r"instance\.x: expected 4 numbers, found 1"):
        model.preprocess(json_item({"x": [1], "y": [0, 0, 0, 0]}))
    assert run(model, model.warmup())["sum"].shape == (2, 4)


@pytest.mark.parametrize(
    "shapes",
    [
        None,
        {"x": {0: Dim("batch", min=2, max=4)}, "y": {0: Dim("batch", min=2, max=4)}},
        {"x": {0: BATCH}, "y": {0: BATCH}},
        {"x": {0: Dim.AUTO}, "y": {0: Dim.AUTO}},
    ],
    ids=["fixed", "limited", "free", "auto"],
)
def test_batches_of_any_size_are_computed_whatever_size_was_exported(tmp_path, shapes):
    module = Pair().eval()
    model = exported(
        tmp_path / "a.pt2", module, (torch.zeros(3, 4), torch.zeros(3, 4)), dynamic_shapes=shapes
    )
    for num_rows in (1, 2, 3, 4, 7, 9):
        x, y = torch.randn(2, num_rows, 4)
        outputs = run(model, [tensor_item({"x": a, "y": b}) for a, b in zip(x, y, strict=True)])
        with torch.inference_mode():
            expected = module(x, y)
        assert torch.allclose(outputs["logits"], expected["logits"], atol=1e-6)
        assert torch.equal(outputs["sum"], expected["sum"])


def test_keywords_and_nested_inputs_are_put_back_where_they_belong(tmp_path):
    class Nested(nn.Module):
        def forward(self, pair, *, scale):
            return pair[0] - pair[1]["deep"] * scale

    args, kwargs = ((torch.ones(2, 1), {"deep": torch.ones(2, 1)}),), {"scale": torch.ones(2, 1)}
    model = exported(tmp_path / "a.pt2", Nested(), args, kwargs=kwargs)
    names = [each.name for each in model.inputs]
    values = dict(zip(names, (torch.tensor([v]) for v in (7.0, 2.0, 3.0)), strict=True))
    assert answers(model, [tensor_item(values)]) == [[1.0]]


def test_inner_dimensions_may_be_free_too(tmp_path):
    model = exported(
        tmp_path / "a.pt2",
        nn.ReLU(),
        (torch.zeros(3, 5),),
        dynamic_shapes=({0: BATCH, 1: Dim("length")},),
    )
    assert model.inputs[0].shape == (-1, -1)
    assert run(model, [tensor_item({"": torch.ones(9)})])["output"].shape == (1, 9)
    assert list(model.warmup()) == []


@pytest.mark.parametrize(
    ("function", "args", "shapes", "message"),
    [
        (lambda x, n: x * n, (torch.ones(2), 3), None, "only tensors can be served"),
        (lambda x: x + 1, (torch.tensor(1.0),), None, "'x' has no batch dimension"),
        (lambda x: x.sum(), (torch.ones(3),), None, r"'output' has shape \[\]"),
        (lambda x: x.sum(0), (torch.ones(3, 2),), None, r"'output' has shape \[2\]"),
        (
            lambda x, y: x + y.sum(),
            (torch.ones(3), torch.ones(2)),
            ({0: BATCH}, None),
            "dimension 0 of 'y' is fixed",
        ),
        (lambda x, y: x + y.sum(), (torch.ones(3), torch.ones(2)), None, "different batch sizes"),
        (lambda x: x.to(torch.complex64), (torch.ones(3),), None, "complex64 cannot be served"),
    ],
)
def test_a_program_without_batches_of_tensors_is_refused(tmp_path, function, args, shapes, message):
    class Wrapped(nn.Module):
        forward = staticmethod(function)

    with pytest.raises(ModelError, match=message):
        exported(tmp_path / "a.pt2", Wrapped(), args, dynamic_shapes=shapes)


class Trained(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.first(x))


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # raised by torch's own copy
@pytest.mark.parametrize("decomposed", [False, True])
def test_a_program_that_was_exported_in_training_mode_names_its_nodes(tmp_path, decomposed):
    path = tmp_path / "a.pt2"
    for is_training in (True, False):
        program = torch.export.export(
            Trained().train(is_training), (torch.rand(3, 4),), dynamic_shapes=({0: BATCH},)
        )
        torch.export.save(program.run_decompositions({}) if decomposed else program, path)
        flaws = loaded(ExportedModel(path))._load_flaws
        assert len(flaws) == 2 * is_training
        if is_training:
            assert re.search(r"dropout \(first\.1\); .*`network\.eval\(\)`", flaws[0])
            assert "options = { repeatable = false }" in flaws[0]
            assert re.search(r"batch_norm\w* \(norm\); .*alone_as_in_batch = false", flaws[1])
            meant = ExportedModel(path, repeatable=False, alone_as_in_batch=False)
            assert loaded(meant)._load_flaws == []


# TorchScript


@scripting
def test_torchscript_takes_the_inputs_that_the_settings_declare(tmp_path):
    module = Pair().eval()
    torch.jit.script(module).save(tmp_path / "a.pt")
    inputs = [spec("first", "float32", -1, 4), spec("second", "float32", -1, 4)]
    model = loaded(ScriptedModel(tmp_path / "a.pt", inputs=inputs))
    assert model.outputs == [spec("logits", "float32", -1, 3), spec("sum", "float32", -1, 4)]
    x, y = torch.randn(2, 4)
    outputs = run(model, [tensor_item({"second": y, "first": x})])
    with torch.inference_mode():
        assert torch.allclose(outputs["logits"][0], module(x[None], y[None])["logits"][0])
    assert run(model, model.warmup())["sum"].shape == (2, 4)


@scripting
def test_torchscript_without_declared_inputs_takes_any_tensor_and_warns_of_nothing(tmp_path):
    torch.jit.trace(nn.Flatten(), torch.zeros(1, 2, 2)).save(tmp_path / "a.ts")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of its deprecation
        model = loaded(ScriptedModel(tmp_path / "a.ts"))
    assert answers(model, [json_item([[1, 2], [3, 4]])]) == [[1.0, 2.0, 3.0, 4.0]]
    assert list(model.warmup()) == []


# Files that are something else


@scripting
def test_every_other_file_is_told_for_what_it_is(tmp_path):
    torch.jit.script(nn.ReLU()).save(tmp_path / "script.pt2")
    program = torch.export.export(nn.ReLU(), (torch.zeros(1, 1),))
    torch.export.save(program, tmp_path / "program.pt2")
    (tmp_path / "program.pt2").rename(tmp_path / "program.pt")
    torch.save(nn.Linear(1, 1).state_dict(), tmp_path / "weights.pt")
    (tmp_path / "rubbish.pt2").write_bytes(b"rubbish")
    for model, message in [
        (ExportedModel(tmp_path / "script.pt2"), "is a TorchScript archive: give it a name"),
        (ScriptedModel(tmp_path / "program.pt"), "is a torch.export archive: give it a name"),
        (ScriptedModel(tmp_path / "weights.pt"), "holds weights or pickled objects, not a whole"),
        (ExportedModel(tmp_path / "rubbish.pt2"), "is not an archive of torch's, or is cut short"),
    ]:
        with pytest.raises(SourceError, match=message):
            model.load(CPU)


@scripting
def test_a_damaged_archive_cannot_be_read(tmp_path):
    torch.jit.script(nn.Linear(64, 64)).save(tmp_path / "a.pt")
    program = torch.export.export(nn.Linear(64, 64), (torch.zeros(1, 64),))
    torch.export.save(program, tmp_path / "a.pt2")
    for model in (ScriptedModel(tmp_path / "a.pt"), ExportedModel(tmp_path / "a.pt2")):
        with zipfile.ZipFile(model._path) as archive:
            contents = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(model._path, "w") as archive:
            for name, content in contents.items():
                is_code = name.endswith(("constants.pkl", "model.json"))
                archive.writestr(name, b"rubbish" if is_code else content)
        with pytest.raises(SourceError, match="cannot be read"):
            model.load(CPU)
