"""Encoders on the simulated accelerator."""

import json

import pytest
import torch

from inferpool.models.sources.registry import build
from inferpool.models.spec import Placement
from tests.models.items import json_item
from tests.models.text.recorded import FILE, TEXTS, write_folder

pytestmark = pytest.mark.simulated


@pytest.mark.parametrize("name", ["mean", "no prompt", "dense"])
def test_vectors_are_the_same_and_the_host_does_not_wait_for_them(name, tmp_path):
    case = json.loads(FILE.read_text())[name]
    model = build(f"encoder:{write_folder(tmp_path, case)}", "DEFAULT", {})
    model.load(Placement(devices=("sim:0",)))
    rows = [model.preprocess(json_item(text)) for text in TEXTS]
    with torch.inference_mode():
        batch = {key: value.pin_memory() for key, value in model.collate(rows).items()}
        with torch.sim.held():
            outputs = model.forward(batch)  # it would wait without end
        assert outputs["embedding"].device.type == "sim"
        found = model.postprocess({key: value.cpu() for key, value in outputs.items()})
    wanted = torch.tensor(case["vectors"])
    torch.testing.assert_close(found["embedding"], wanted, atol=1e-5, rtol=0)


def test_vectors_of_tokens_are_cut_to_a_text_of_a_batch_on_a_device(tmp_path):
    case = json.loads(FILE.read_text())["mean"]
    model = build(f"encoder:{write_folder(tmp_path, case)}", "DEFAULT", {})
    model.load(Placement(devices=("sim:0",)))
    items = [json_item(text, **{"as": "tokens", "count": True}) for text in TEXTS[:2]]
    with torch.inference_mode():
        outputs = model.forward(model.collate([model.preprocess(item) for item in items]))
        found = model.postprocess({key: value.cpu() for key, value in outputs.items()})
    answers = model.render_batch(found, [item.parameters for item in items])
    assert [(num_tokens, len(vectors)) for num_tokens, vectors in answers] == [(8, 8), (2, 2)]
