"""Packages of AOTInductor as models."""

import logging
import shutil
import zipfile

import pytest
import torch
from torch import nn
from torch.export import Dim

from inferpool.models.errors import ModelError, SourceError
from inferpool.models.sources.inductor import InductorModel
from inferpool.models.sources.registry import build
from inferpool.models.spec import TensorSpec
from tests.models.items import loaded, run, tensor_item


def test_a_package_for_another_device_says_so_before_it_is_loaded(tmp_path):
    with zipfile.ZipFile(tmp_path / "net.pt2", "w") as archive:
        archive.writestr("net/archive_format", "pt2")
        name = "net/data/aotinductor/model/a.wrapper_metadata.json"
        archive.writestr(name, '{"AOTI_DEVICE_KEY": "cuda"}')
    model = build(str(tmp_path / "net.pt2"), None, {})
    assert isinstance(model, InductorModel)
    with pytest.raises(ModelError, match=r'net\.pt2 is compiled for cuda, .* devices = "cuda"'):
        loaded(model)


def test_a_package_with_an_encrypted_member_is_named(tmp_path):
    path = tmp_path / "net.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("net/data/aotinductor/model/a.wrapper_metadata.json", "{}")
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\1\2") + 8] |= 1
    content[6] |= 1
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"net\.pt2 is damaged: .*encrypted"):
        loaded(InductorModel(path))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x, *, scale):
        return {"logits": self.linear(x) * scale, "sum": x.sum(-1)}


@pytest.mark.compile
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    ("batch", "least", "said"),
    [(None, 3, "computes 3 at a time"), (Dim("n", max=8), 2, "batches of 2 to 8")],
    ids=["fixed", "limited"],
)
def test_a_package_says_what_it_takes_and_computes_batches_of_any_size(
    tmp_path, caplog, batch, least, said
):
    network, path = Scaled().eval(), tmp_path / "net.pt2"
    shapes = batch and {"x": {0: batch}, "scale": {0: batch}}
    program = torch.export.export(
        network, (torch.zeros(3, 4),), {"scale": torch.zeros(3, 1)}, dynamic_shapes=shapes
    )
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    with caplog.at_level(logging.INFO):
        model = loaded(build(str(path), None, {}))
    assert "net.pt2: a package of AOTInductor for cpu; inputs 'input' (float32 [4])" in caplog.text
    assert said in caplog.text
    assert model.inputs == [
        TensorSpec(name="input", dtype="float32", shape=(-1, 4)),
        TensorSpec(name="scale", dtype="float32", shape=(-1, 1)),
    ]
    assert [(spec.name, spec.shape) for spec in model.outputs] == [
        ("logits", (-1, 3)),
        ("sum", (-1,)),
    ]
    assert model.smallest == least
    for num_rows in (1, 2, 3, 11):
        x, scale = torch.randn(num_rows, 4), torch.rand(num_rows, 1)
        items = [tensor_item({"input": a, "scale": b}) for a, b in zip(x, scale, strict=True)]
        with torch.inference_mode():
            wanted = network(x, scale=scale)
        assert torch.allclose(run(model, items)["logits"], wanted["logits"], atol=1e-5)
        assert torch.allclose(run(model, items)["sum"], wanted["sum"], atol=1e-5)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"net\.pt2 is not an archive of torch's, or is cut short"):
        loaded(build(str(path), None, {}))
