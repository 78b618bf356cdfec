"""Folders of texts named alone as sources, before real workers: a reranker and a classifier.

Their networks are BERT with random weights, so that no library but tokenizers is needed.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from inferpool.models.sources.registry import build
from inferpool.models.text.bert import BertConfig
from inferpool.models.text.encoder import packaged_folder
from inferpool.models.text.scores import BertScorer
from tests.e2e.running import Running, running
from tests.models.items import answers, json_item, loaded

CONFIG = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "vocab_size": 30522,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
}
LABELS = ["cat", "dog", "eel"]
QUERY = "Who is Alice?"
TEXTS = ["a rabbit", "a girl in a book", "rain " * 100, ""]


def write_folder(folder: Path, labels: list[str]) -> Path:
    folder.mkdir()
    torch.manual_seed(0)
    network = BertScorer(msgspec.convert(CONFIG, BertConfig), len(labels))
    for name, parameter in network.named_parameters():
        if "LayerNorm" not in name:
            torch.nn.init.normal_(parameter, std=0.4)
    save_file(network.state_dict(), folder / "model.safetensors")
    named = {"id2label": dict(enumerate(labels))}
    (folder / "config.json").write_text(json.dumps(CONFIG | named))
    shutil.copy(packaged_folder() / "tokenizer.json", folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("folders")
    return {
        "rank": str(write_folder(root / "rank", ["LABEL_0"])),
        "kinds": str(write_folder(root / "kinds", LABELS)),
    }


@pytest.fixture(scope="module")
def service(folders: dict[str, str]) -> Iterator[Running]:
    models = {name: {"source": folder, "replicas": 1} for name, folder in folders.items()}
    with running(settings={"tei": True, "models": models}) as service:
        yield service


def test_a_folder_of_one_label_ranks(service: Running, folders: dict[str, str]) -> None:
    model = loaded(build(folders["rank"], "DEFAULT", {}))
    items = [json_item({"query": QUERY, "text": text}, count=True) for text in TEXTS]
    nums, scores = zip(*answers(model, items), strict=True)
    order = sorted(range(len(TEXTS)), key=lambda row: -scores[row])
    call = {"model": "rank", "query": QUERY, "documents": TEXTS, "return_documents": False}
    answer = service.post("/v1/rerank", json=call).json()
    assert [each["index"] for each in answer["results"]] == order
    found = [each["relevance_score"] for each in answer["results"]]
    assert found == pytest.approx([scores[row] for row in order], abs=1e-5)
    assert answer["usage"]["total_tokens"] == sum(nums)
    theirs = service.post("/tei/rank/rerank", json={"query": QUERY, "texts": TEXTS}).json()
    assert [each["score"] for each in theirs] == pytest.approx(found, abs=1e-5)
    instances = [{"query": QUERY, "text": text} for text in TEXTS]
    ours = service.post("/predict/rank", json={"instances": instances}).json()
    assert ours["predictions"] == pytest.approx(scores, abs=1e-5)


def test_a_folder_of_several_labels_classifies(service: Running, folders: dict[str, str]) -> None:
    model = loaded(build(folders["kinds"], "DEFAULT", {}))
    ((best, *_),) = answers(model, [json_item(TEXTS[0])])
    call = {"model": "kinds", "input": TEXTS[:1]}
    (found,) = service.post("/v1/classify", json=call).json()["data"]
    assert (found["label"], found["score"]) == (best["label"], pytest.approx(best["score"]))
    theirs = service.post("/tei/kinds/predict", json={"inputs": TEXTS[0]}).json()
    assert theirs[0]["label"] == best["label"]
    assert {each["label"] for each in theirs} == {*LABELS}
    query = {
        "inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": TEXTS[:1]}],
        "outputs": [{"name": "probabilities", "parameters": {"classification": 1}}],
    }
    (output,) = service.post("/v2/models/kinds/infer", json=query).json()["outputs"]
    assert output["data"][0].endswith(f":{best['label']}")


@pytest.mark.parametrize("name", ["rank", "kinds"])
def test_the_tokenizer_of_a_folder_answers(service: Running, name: str) -> None:
    (tokens,) = service.post(f"/tei/{name}/tokenize", json={"inputs": "Hi you"}).json()
    assert [each["text"] for each in tokens] == ["[CLS]", "Hi", "you", "[SEP]"]
    ids = [[each["id"] for each in tokens]]
    assert service.post(f"/tei/{name}/decode", json={"ids": ids}).json() == ["hi you"]


def test_what_does_not_fit_is_refused_by_each(service: Running) -> None:
    wrong = service.post("/predict/rank", json={"instances": ["a text alone"]})
    assert (wrong.status_code, "'query' and 'text'" in wrong.json()["error"]) == (422, True)
    wrong = service.post("/v1/rerank", json={"model": "kinds", "query": "a", "documents": ["b"]})
    assert wrong.status_code == 400
