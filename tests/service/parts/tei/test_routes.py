"""`/info`, `/` and the documentation of calls, for versions of models that are ready or not."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from inferpool.models.spec import UNKNOWN_INTERFACE, USUAL_INTERFACE, Interface, TextFacts
from inferpool.service.api.exchange import Predict
from inferpool.service.api.optional_calls import CALLS_BY_SETTING
from inferpool.service.api.web import App
from inferpool.service.parts.tei.routes import info_router, root_router, tei_router
from tests.service.api.fakes import FakeModel, call, result

SETTINGS: Any = SimpleNamespace(default_model="texts", max_instances_per_request=256)


def version(interface: Interface, preset: str = "exact", most_tokens: int | None = None) -> Any:
    slot = SimpleNamespace(config=SimpleNamespace(chosen=SimpleNamespace(preset=preset)))
    dispatcher = SimpleNamespace(max_queue_length=1024)
    pool = SimpleNamespace(slots=[slot, slot], dispatcher=dispatcher, reason="loading weights")
    settings = SimpleNamespace(batch_size=8, max_batch_tokens=most_tokens)
    return SimpleNamespace(interface=interface, pool=pool, settings=settings)


def about(task: Any, labels: tuple[str, ...] = (), pooling: str = "") -> Interface:
    facts = TextFacts(task=task, max_tokens=512, vocab_size=9, num_dimensions=4, pooling=pooling)
    return Interface(text=facts, labels=labels)


ENTRIES = {
    "texts": version(about("embedding", pooling="last"), "compiled_bf16"),
    "mean": version(about("embedding", pooling="mean"), most_tokens=1000),
    "ranks": version(about("reranking")),
    "moods": version(about("classification", ("sad", "glad")), "graphed_fp16"),
    "pictures": version(USUAL_INTERFACE),
    "late": version(UNKNOWN_INTERFACE),
}


@pytest.fixture(scope="module")
def app() -> App:
    routers = [info_router(ENTRIES, SETTINGS), tei_router(ENTRIES, SETTINGS), root_router()]
    made = App(version="0", routers=routers)
    form = "inferpool.service.parts.tei.answers:error_answer"
    made.forms_of_errors = {"info": form, "tei": form}
    return made


def test_info_has_the_members_of_tei(app: App) -> None:
    info = call(app, "GET", "/info").json()
    assert info.pop("version")
    assert info == {
        "model_id": "texts",
        "model_sha": None,
        "model_dtype": "bfloat16",
        "served_model_name": "texts",
        "model_type": {"embedding": {"pooling": "last_token"}},
        "max_concurrent_requests": 1024,
        "max_input_length": 512,
        "max_batch_tokens": 4096,
        "max_batch_requests": 8,
        "max_client_batch_size": 256,
        "auto_truncate": True,
        "tokenization_workers": 2,
        "sha": None,
        "docker_label": None,
    }


@pytest.mark.parametrize(
    ("name", "dtype", "kind", "facts"),
    [
        ("mean", "float32", "embedding", {"pooling": "mean"}),
        ("ranks", "float32", "reranker", ["LABEL_0"]),
        ("moods", "float16", "classifier", ["sad", "glad"]),
    ],
)
def test_a_models_type_has_its_pooling_or_its_labels(
    app: App, name: str, dtype: str, kind: str, facts: Any
) -> None:
    info = call(app, "GET", f"/tei/{name}/info").json()
    if isinstance(facts, list):
        names = {str(index): label for index, label in enumerate(facts)}
        facts = {"id2label": names, "label2id": {label: int(each) for each, label in names.items()}}
    assert (info["model_dtype"], info["model_type"]) == (dtype, {kind: facts})
    assert info["max_batch_tokens"] == (1000 if name == "mean" else 4096)


@pytest.mark.parametrize(
    ("name", "status", "kind", "said"),
    [
        ("nobody", 404, "Validation", "there are: texts, mean, ranks"),
        ("pictures", 424, "Backend", "not about texts"),
        ("late", 503, "Unhealthy", "late is not ready: loading weights"),
    ],
)
def test_a_model_without_facts_about_texts_is_refused(
    app: App, name: str, status: int, kind: str, said: str
) -> None:
    answer = call(app, "GET", f"/tei/{name}/info")
    assert (answer.status_code, answer.json()["error_type"]) == (status, kind)
    assert said in answer.json()["error"]


def test_without_a_default_model_info_names_those_that_there_are() -> None:
    settings: Any = SimpleNamespace(default_model=None)
    answer = call(App(version="0", routers=[info_router(ENTRIES, settings)]), "GET", "/info")
    assert answer.status_code == 404
    assert "no model is the default" in answer.json()["error"]


def test_all_calls_are_documented_at_the_root_and_below_tei(app: App) -> None:
    paths: Any = app.openapi()["paths"]
    calls = ["embed", "embed_all", "embed_sparse", "similarity", "rerank", "tokenize", "decode"]
    assert {f"/{each}" for each in calls} < paths.keys()
    assert {f"/tei/{{model}}/{each}" for each in (*calls, "predict", "info")} < paths.keys()
    assert "/predict" not in paths  # it is described as ours
    body = paths["/embed"]["post"]["requestBody"]["content"]["application/json"]
    assert "dimensions" in body["schema"]["properties"]


@pytest.mark.parametrize(
    ("task", "body", "answer", "shown"),
    [
        ("embedding", {"inputs": "a"}, [0.5], [[0.5]]),
        (
            "embedding",
            {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
            "AACAPwAAAAA=",
            [1.0],
        ),
        ("reranking", {"query": "q", "texts": ["a"]}, 0.5, [{"index": 0, "score": 0.5}]),
        (
            "classification",
            {"inputs": "a"},
            [{"label": "x", "index": 0, "score": 1.0}],
            [{"score": 1.0, "label": "x"}],
        ),
    ],
)
@pytest.mark.parametrize("path", ["/", "/tei/fake", "/tei/fake/"])
def test_a_call_without_a_task_is_for_that_of_the_model(
    app: App, path: str, task: Any, body: object, answer: object, shown: object
) -> None:
    encoded = json.dumps([2, answer]).encode()
    model = FakeModel(lambda _: result(encoded), interface=about(task))
    app.predict = Predict({"fake": model}, default="fake", optional=[CALLS_BY_SETTING["tei"]])
    found = call(app, "POST", path, json=body)
    assert (found.status_code, found.json()) == (200, shown)
    assert found.headers["x-compute-tokens"] == str(2 * len(model.payloads))
    app.predict = Predict({"fake": FakeModel()}, default="fake", optional=[CALLS_BY_SETTING["tei"]])
    assert call(app, "POST", path, json=body).status_code == 424
    app.predict = Predict({}, optional=[CALLS_BY_SETTING["tei"]])
    assert call(app, "POST", path, json=body).status_code == 404
