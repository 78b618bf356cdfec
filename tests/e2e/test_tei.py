"""Text Embeddings Inference before real workers, with several front ends, keys and a root path."""

from collections.abc import Iterator

import pytest

from tests.e2e.running import Running, running
from tests.text_model import SCORE_UNIT, vector_of

KEY = "a-key-for-predictions"
BEARER = {"authorization": f"Bearer {KEY}"}
MODEL = "tests.text_model:TextFaultModel"
SETTINGS = {
    "tei": True,
    "front_ends": 2,
    "root_path": "/texts",
    "default_model": "encoder",
    "models": {
        "encoder": {"source": MODEL, "replicas": 1},
        "ranker": {"source": MODEL, "replicas": 1, "options": {"task": "reranking"}},
    },
}


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    env = {"INFERPOOL_PREDICT_KEYS": KEY}
    with running(settings=SETTINGS, env=env) as service:
        yield service


@pytest.mark.parametrize(
    "path",
    ["/embed", "/texts/embed", "/tei/encoder/embed", "/", "/tei/encoder", "/texts/tei/encoder"],
)
def test_vectors_come_from_workers_by_every_path(service: Running, path: str) -> None:
    texts = ["ok 1", "ok 2", "three words here"]
    answer = service.post(path, json={"inputs": texts, "normalize": False}, headers=BEARER)
    assert (answer.status_code, answer.json()) == (200, [vector_of(each) for each in texts])
    assert answer.headers["x-compute-tokens"] == "7"
    assert answer.headers["x-compute-characters"] == "24"


@pytest.mark.parametrize("path", ["/embed", "/tei/encoder/embed", "/", "/tei/encoder"])
def test_a_call_needs_a_key(service: Running, path: str) -> None:
    answer = service.post(path, json={"inputs": "ok 1"}, headers={"authorization": "Bearer no"})
    assert answer.status_code == 401
    assert "not known here" in answer.json()["error"]
    assert service.get("/info", headers={"authorization": "Bearer no"}).status_code == 401


def test_tokens_and_texts_come_from_a_worker(service: Running) -> None:
    found = service.post("/tokenize", json={"inputs": "ok 7"}, headers=BEARER).json()
    (tokens,) = found
    assert [(each["text"], each["start"], each["stop"]) for each in tokens] == [
        ("ok", 0, 2),
        ("7", 3, 4),
    ]
    ids = [[each["id"] for each in tokens], [1]]
    texts = service.post("/decode", json={"ids": ids}, headers=BEARER).json()
    assert texts[1] == "t1"
    path = "/tei/ranker/rerank"
    body = {"query": "q", "texts": ["ok 7", "ok 900"]}
    assert service.post(path, json=body, headers=BEARER).json() == [
        {"index": 1, "score": 900 / SCORE_UNIT},
        {"index": 0, "score": 7 / SCORE_UNIT},
    ]


def test_predict_is_shared_by_both_kinds_of_calls(service: Running) -> None:
    ours = service.post(json={"instances": ["ok 1"]}, headers=BEARER)
    assert ours.json() == {"predictions": [vector_of("ok 1")]}
    theirs = service.post(json={"inputs": "ok 1"}, headers=BEARER)
    assert (theirs.status_code, theirs.json()["error_type"]) == (424, "Backend")


def test_info_is_that_of_the_default_model(service: Running) -> None:
    info = service.get("/info", headers=BEARER).json()
    assert (info["model_id"], info["model_type"]) == (
        "encoder",
        {"embedding": {"pooling": "mean"}},
    )
    assert info["max_client_batch_size"] == 256


def test_a_failure_of_the_model_is_a_failed_dependency(service: Running) -> None:
    answer = service.post("/embed", json={"inputs": ["ok 1", "raise 2"]}, headers=BEARER)
    assert (answer.status_code, answer.json()["error_type"]) == (424, "Backend")
    assert answer.json()["error"].startswith("inputs[1]: ")
    answer = service.post("/embed", json={"inputs": [1, 5000]}, headers=BEARER)
    assert (answer.status_code, answer.json()["error_type"]) == (422, "Validation")
    assert "check_embedding_ctx_length=False" in answer.json()["error"]
