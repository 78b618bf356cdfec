"""Calls of Text Embeddings Inference over ASGI, to models that answer as told.

The shapes of answers and errors are those of TEI's own documentation (docs/openapi.json and
router/src/http of huggingface/text-embeddings-inference, commit 0d124dc).
"""

import base64
import json
import struct
import sys
from typing import Any, Literal

import httpx
import pytest

from inferpool.models.spec import UNKNOWN_INTERFACE, Interface, TextFacts
from inferpool.service.api.codecs.body import Limits
from inferpool.service.api.exchange import Exchange, Predict
from inferpool.service.api.optional_calls import CALLS_BY_SETTING
from inferpool.service.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidInputError,
    ModelFailedError,
    OverloadedError,
    QuarantinedError,
    ServiceError,
    UnavailableError,
    WorkerCrashedError,
)
from inferpool.service.queue.instance import Result
from tests.service.api.fakes import FakeModel, NoWire, call, endpoint, result

Task = Literal["embedding", "reranking", "classification"]
LABELS = ("bad", "good")
EMPTY = {"error": "`inputs` cannot be empty", "error_type": "Empty"}
EMPTY_TEXT = {
    "error": "Input validation error: `inputs` cannot be empty",
    "error_type": "Empty",
}


def model_of(task: Task, *answers: object) -> FakeModel:
    """A model that gives these answers, each with two tokens; then the numbers of its instances."""

    def reply(index: int) -> Result | Exception:
        answer: object = index / 10
        if index < len(answers):
            answer = answers[index]
        if isinstance(answer, ServiceError):
            return answer
        return result(json.dumps([2, answer]).encode())

    facts = TextFacts(task=task, max_tokens=16, vocab_size=100, num_dimensions=8)
    labels = () if task == "embedding" else LABELS[-1:] if task == "reranking" else LABELS
    return FakeModel(reply, interface=Interface(text=facts, labels=labels))


def ask(model: FakeModel, path: str, body: object, **request: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    limits = Limits(max_json_bytes=2000, max_body_bytes=3500, max_instances=4)
    predict = endpoint(model, limits=limits, optional=[CALLS_BY_SETTING["tei"]])
    return call(predict, request.pop("method", "POST"), path, content=content, **request)


def instances(model: FakeModel) -> list[object]:
    assert all(each.kind == "json" for each in model.payloads)
    return [json.loads(each) for each in model.bodies]


def parameters(model: FakeModel) -> dict[str, object]:
    assert not any(ref.wants_tensors for ref in model.refs)
    (given,) = {ref.parameters for ref in model.refs}
    return dict(json.loads(given))


def packed(*numbers: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()


@pytest.mark.parametrize("path", ["/embed", "/tei/fake/embed"])
@pytest.mark.parametrize(
    ("inputs", "given", "num_characters"),
    [
        ("one ü", ["one ü"], 5),
        (["one", "two"], ["one", "two"], 6),
        ([1, 2, 3], [{"ids": [1, 2, 3]}], 3),
        ([[1, 2], "a", [3]], [{"ids": [1, 2]}, "a", {"ids": [3]}], 4),
    ],
)
def test_vectors_of_all_inputs_come_in_a_list(
    path: str, inputs: object, given: list[object], num_characters: int
) -> None:
    model = model_of("embedding", *([0.5, index] for index in range(len(given))))
    answer = ask(model, path, {"inputs": inputs})
    assert answer.status_code == 200, answer.text
    assert answer.json() == [[0.5, index] for index in range(len(given))]
    assert instances(model) == given
    assert parameters(model) == {"normalize": True, "count": True}
    headers = answer.headers
    assert headers["content-type"] == "application/json"
    assert headers["x-compute-characters"] == str(num_characters)
    assert headers["x-compute-tokens"] == str(2 * len(given))
    assert (headers["x-queue-time"], headers["x-tokenization-time"]) == ("1", "2")
    assert headers["x-inference-time"] == "3"
    assert int(headers["x-total-time"]) == int(headers["x-compute-time"]) < 10_000


@pytest.mark.parametrize("space", [b"", b" ", b"\r\n\t ", b" " * 300])
def test_space_in_lists_is_no_item(space: bytes) -> None:
    for inputs in (b'["a",@"b"]', b'["a",@[1,2]@]', b"[@1,@2]", b'@[@"a"@]@'):
        model = model_of("embedding")
        body = b'{"inputs":@%b}' % inputs
        assert ask(model, "/embed", body.replace(b"@", space)).is_success
        assert len(model.payloads) == (2 if b"a" in inputs and b"," in inputs else 1)
    for inputs in (b"[@]", b'["a",[@]]'):
        body = b'{"inputs":%b}' % inputs.replace(b"@", space)
        assert ask(model_of("embedding"), "/embed", body).status_code == 400


def test_options_of_vectors_reach_the_model() -> None:
    model = model_of("embedding")
    body = {
        "inputs": "a",
        "truncate": False,
        "truncation_direction": "Left",
        "prompt_name": "query",
        "normalize": False,
        "dimensions": 4,
        "unknown": 1,
    }
    assert ask(model, "/embed", body).is_success
    assert parameters(model) == {
        "truncate": False,
        "truncation_direction": "left",
        "prompt_name": "query",
        "normalize": False,
        "dimensions": 4,
        "count": True,
    }


@pytest.mark.parametrize("path", ["/predict", "/tei/fake/predict"])
def test_a_body_may_begin_with_a_byte_order_mark(path: str) -> None:
    answer = ask(model_of("classification", GOOD), path, b'\xef\xbb\xbf{"inputs": "a"}')
    assert (answer.status_code, answer.json()) == (200, SHOWN)


def test_a_body_needs_no_content_type() -> None:
    for media_type in (None, "text/plain"):
        headers = {} if media_type is None else {"content-type": media_type}
        assert ask(model_of("embedding"), "/embed", {"inputs": "a"}, headers=headers).is_success


def test_vectors_of_tokens_come_for_each_input() -> None:
    model = model_of("embedding", [[1, 2], [3, 4]])
    answer = ask(model, "/embed_all", {"inputs": "a b", "truncation_direction": "right"})
    assert answer.json() == [[[1, 2], [3, 4]]]
    assert parameters(model) == {"as": "tokens", "count": True}


def test_similarity_is_the_cosine_of_vectors() -> None:
    model = model_of("embedding", packed(0.6, 0.8), packed(0.6, 0.8), packed(-0.8, 0.6))
    body = {
        "inputs": {"source_sentence": "a", "sentences": ["b", "cc"]},
        "parameters": {"prompt_name": "p", "truncate": True},
    }
    answer = ask(model, "/similarity", body)
    assert answer.json() == pytest.approx([1, 0], abs=1e-6)
    assert instances(model) == ["a", "b", "cc"]
    assert answer.headers["x-compute-characters"] == "4"
    assert parameters(model) == {
        "normalize": True, "as": "base64", "prompt_name": "p", "truncate": True, "count": True,
    }  # fmt: skip


def test_ranks_come_best_first() -> None:
    body = {"query": "q?", "texts": ["a", "b\n", "c"]}
    model = model_of("reranking", 0.1, 0.9, 1e-7)
    answer = ask(model, "/rerank", body)
    assert answer.json() == [
        {"index": 1, "score": 0.9},
        {"index": 0, "score": 0.1},
        {"index": 2, "score": 1e-7},
    ]
    assert answer.headers["x-compute-characters"] == str(3 * 2 + 4)
    assert instances(model) == [{"query": "q?", "text": each} for each in ("a", "b\n", "c")]
    assert parameters(model) == {"count": True}


def test_ranks_may_have_their_texts_and_raw_scores() -> None:
    body = {"query": "q", "texts": ["a", "b\n"], "return_text": True, "raw_scores": True}
    model = model_of("reranking", -3.5, 4)
    answer = ask(model, "/tei/fake/rerank", body)
    assert answer.json() == [
        {"index": 1, "text": "b\n", "score": 4},
        {"index": 0, "text": "a", "score": -3.5},
    ]
    assert parameters(model) == {"raw_scores": True, "count": True}


GOOD = [{"label": "good", "index": 1, "score": 0.8}, {"label": "bad", "index": 0, "score": 0.2}]
SHOWN = [{"score": 0.8, "label": "good"}, {"score": 0.2, "label": "bad"}]


@pytest.mark.parametrize("path", ["/predict", "/tei/fake/predict"])
@pytest.mark.parametrize(
    ("inputs", "given", "shown"),
    [
        ("a", ["a"], SHOWN),
        (["a"], ["a"], SHOWN),
        (["a", "b"], [{"text": "a", "pair": "b"}], SHOWN),
        ([["a"], ["b", "c"]], ["a", {"text": "b", "pair": "c"}], [SHOWN, SHOWN]),
        ([["a"]], ["a"], [SHOWN]),
    ],
)
def test_labels_come_for_a_text_a_pair_or_a_list_of_these(
    path: str, inputs: object, given: list[object], shown: object
) -> None:
    model = model_of("classification", GOOD, GOOD)
    answer = ask(model, path, {"inputs": inputs, "raw_scores": True})
    assert (answer.status_code, answer.json()) == (200, shown), answer.text
    assert instances(model) == given
    assert parameters(model) == {"raw_scores": True, "top_k": 2, "count": True}


def test_a_reranker_predicts_its_only_label_for_a_pair() -> None:
    model = model_of("reranking", 0.25)
    answer = ask(model, "/predict", {"inputs": ["q", "t"]})
    assert answer.json() == [{"score": 0.25, "label": "good"}]
    assert instances(model) == [{"query": "q", "text": "t"}]
    refused = ask(model, "/predict", {"inputs": "q"})
    assert (refused.status_code, refused.json()["error_type"]) == (422, "Validation")


def test_only_a_text_of_a_pair_may_be_empty() -> None:
    assert ask(model_of("classification", GOOD), "/predict", {"inputs": ["a", ""]}).is_success
    for inputs in ("", [""], [["a"], [""]]):
        refused = ask(model_of("classification"), "/predict", {"inputs": inputs})
        assert (refused.status_code, refused.json()) == (400, EMPTY_TEXT)


@pytest.mark.parametrize(
    ("inputs", "place"),
    [(["a"] * 3, "inputs"), ([["a"], ["a"] * 3], "inputs[1]"), ([["a"], "b"], "inputs[1]")],
)
def test_more_than_a_pair_is_to_be_a_list_of_lists(inputs: object, place: str) -> None:
    refused = ask(model_of("classification"), "/predict", {"inputs": inputs})
    assert (refused.status_code, refused.json()["error_type"]) == (422, "Validation")
    assert refused.json()["error"].startswith(f"{place}: must have one or two texts; several")


def test_a_query_counts_with_each_text() -> None:
    body = {"query": "a" * 900, "texts": ["b"] * 4}
    answer = ask(model_of("reranking"), "/rerank", body)
    assert (answer.status_code, answer.json()["error_type"]) == (413, "Validation")
    assert ask(model_of("reranking"), "/rerank", {**body, "texts": ["b"] * 3}).is_success


@pytest.mark.parametrize(
    ("task", "path", "body"),
    [
        ("embedding", "embed", b'{"inputs": "a"}'),
        ("embedding", "similarity", b'{"inputs": {"source_sentence": "a", "sentences": ["b"]}}'),
        ("reranking", "rerank", b'{"query": "a", "texts": ["b", "c"]}'),
        ("classification", "predict", b'{"inputs": [["a"], ["b"]]}'),
        ("embedding", "decode", b'{"ids": [1]}'),
    ],
)
def test_the_body_of_a_call_is_not_kept_once_its_instances_are_submitted(
    task: Task, path: str, body: bytes
) -> None:
    body = bytes(bytearray(body))  # nothing else has it
    num_owners = sys.getrefcount(body)
    model = model_of(task)
    predict = endpoint(model, optional=[CALLS_BY_SETTING["tei"]])
    exchange = Exchange.open(NoWire(), predict, "POST", f"/tei/fake/{path}", b"", [])
    assert exchange.call.protocol is not None
    decoded = exchange.call.protocol.decode(exchange, model, (body,))
    assert decoded is not None
    assert sys.getrefcount(body) > num_owners
    del decoded
    assert sys.getrefcount(body) == num_owners


def test_inputs_of_one_call_wait_for_room() -> None:
    model = model_of("embedding", [1], [2], [3])
    model._refusals = [None, OverloadedError("the queue is full"), None, None]
    answer = ask(model, "/embed", {"inputs": ["a", "b", "c"]})
    assert answer.json() == [[1], [2], [3]]
    refused = ask(model_of("embedding", OverloadedError("it is full")), "/embed", {"inputs": "a"})
    assert (refused.status_code, refused.json()["error_type"]) == (429, "Overloaded")
    assert refused.headers["retry-after"] == "1"


def test_tokens_come_from_a_worker() -> None:
    tokens = [{"id": 7, "text": "a", "special": False, "start": 0, "stop": 1}]
    model = model_of("reranking")
    model._reply = lambda _: result(json.dumps(tokens).encode())  # without a count
    answer = ask(model, "/tokenize", {"inputs": "a", "add_special_tokens": False})
    assert (answer.status_code, answer.json()) == (200, [tokens])
    assert parameters(model) == {"tokenizer": "tokenize", "add_special_tokens": False}
    assert ask(model, "/tokenize", {"inputs": ["a", "b"]}).json() == [tokens, tokens]
    assert instances(model) == ["a", "a", "b"]
    assert "x-compute-tokens" not in answer.headers


def test_texts_of_ids_come_from_a_worker() -> None:
    model = model_of("embedding")
    model._reply = lambda _: result(b'"hello"')
    answer = ask(model, "/decode", {"ids": [1, 2], "skip_special_tokens": True})
    assert (answer.status_code, answer.json()) == (200, ["hello"])
    assert parameters(model) == {"tokenizer": "decode", "skip_special_tokens": True}
    assert ask(model, "/decode", {"ids": [[1], [2]]}).json() == ["hello", "hello"]
    assert instances(model) == [{"ids": [1, 2]}, {"ids": [1]}, {"ids": [2]}]


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/embed", {"inputs": []}, 400, EMPTY_TEXT),
        ("/embed", {"inputs": ""}, 400, EMPTY_TEXT),
        ("/embed", {"inputs": ["a", ""]}, 400, EMPTY_TEXT),
        ("/embed", {"inputs": ["a", []]}, 400, EMPTY_TEXT),
        ("/embed", {}, 422, "inputs: is missing"),
        ("/embed", b"[]", 422, "must be an object"),
        ("/embed", b"{", 400, "malformed JSON"),
        ("/embed", b"", 400, "empty"),
        ("/embed", b'{"inputs":"\xff"}', 400, "UTF-8"),
        ("/embed", b'{"inputs":"\\ud800"}', 400, "surrogate"),
        ("/embed", b'{"inputs":' + b"[" * 200 + b"]" * 200 + b"}", 422, "deep"),
        ("/embed", {"inputs": 3}, 422, "inputs: must be"),
        ("/embed", {"inputs": None}, 422, "inputs: must be"),
        ("/embed", {"inputs": {"a": 1}}, 422, "inputs: must be"),
        ("/embed", {"inputs": ["a", 3]}, 422, "inputs[1]: must be"),
        ("/embed", {"inputs": ["a", ["b"]]}, 422, "inputs[1]: must be"),
        ("/embed", {"inputs": ["a"] * 5}, 422, "more than 4"),
        ("/embed", {"inputs": "a" * 3000}, 413, "limit for JSON"),
        ("/embed", {"inputs": "a", "truncate": 1}, 422, "truncate"),
        ("/embed", {"inputs": "a", "truncation_direction": "Up"}, 422, "truncation_direction"),
        ("/embed", {"inputs": "a", "dimensions": 0}, 422, "should be positive"),
        ("/embed", {"inputs": "a", "dimensions": 9}, 422, "smaller than the maximum"),
        ("/embed_sparse", {"inputs": "a"}, 424, "Model is not an embedding model with SPLADE"),
        ("/embed_sparse", {"inputs": ""}, 400, EMPTY_TEXT),
        ("/similarity", {"inputs": "a"}, 422, "inputs"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, 400, "cannot be"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": [1]}}, 422, "a text"),
        (
            "/similarity",
            {"inputs": {"source_sentence": "a", "sentences": ["b"] * 4}},
            422,
            "more than 3",
        ),
        (
            "/rerank",
            {"query": "a", "texts": []},
            400,
            {"error": "`texts` cannot be empty", "error_type": "Empty"},
        ),
        (
            "/rerank",
            {"query": "a", "texts": ["b"]},
            424,
            "not a re-ranker model ('fake' was asked;",
        ),
        ("/predict", {"inputs": "a"}, 424, "Model is not a classifier model"),
        ("/tokenize", {"inputs": []}, 400, EMPTY),
        ("/tokenize", {"inputs": [1]}, 422, "inputs[0]: must be a text"),
        ("/similarity", {"inputs": {"source_sentence": "", "sentences": ["a"]}}, 400, EMPTY_TEXT),
        ("/decode", {"ids": []}, 400, "`input_ids` cannot be empty"),
        ("/decode", {"ids": ["a"]}, 422, "ids"),
        ("/decode", {"ids": "a"}, 422, "ids"),
        ("/tei/other/embed", {"inputs": "a"}, 404, "no model is called 'other'"),
        ("/tei//embed", {"inputs": "a"}, 404, "no model"),
    ],
)
def test_a_body_that_does_not_fit_gets_an_error_of_tei(
    path: str, body: object, status: int, said: object
) -> None:
    model = model_of("embedding")
    answer = ask(model, path, body)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
    assert set(answer.json()) == {"error", "error_type"}
    types = {400: ("Empty", "Validation"), 424: ("Backend",)}
    assert answer.json()["error_type"] in types.get(status, ("Validation",))
    assert said in answer.json()["error"] if isinstance(said, str) else answer.json() == said
    assert not model.payloads


@pytest.mark.parametrize("task", ["reranking", "classification"])
@pytest.mark.parametrize(
    "path", ["/embed", "/embed_all", "/embed_sparse", "/similarity", "/tei/fake/embed"]
)
def test_a_model_without_vectors_is_refused_in_teis_words(path: str, task: Task) -> None:
    inputs = {"source_sentence": "a", "sentences": ["b"]} if path == "/similarity" else "a"
    answer = ask(model_of(task), path, {"inputs": inputs})
    assert answer.status_code == 424
    assert answer.json()["error"].startswith("Backend error: Model is not an embedding model")
    assert answer.json()["error_type"] == "Backend"


def test_a_model_that_is_not_about_texts_is_refused_and_one_that_loads_is_unhealthy() -> None:
    assert ask(FakeModel(), "/tokenize", {"inputs": "a"}).status_code == 424
    answer = ask(FakeModel(interface=UNKNOWN_INTERFACE), "/embed", {"inputs": "a"})
    assert (answer.status_code, answer.json()["error_type"]) == (503, "Unhealthy")
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (UnavailableError("no worker is ready"), 503, "Unhealthy"),
        (DeadlineExceededError("too late"), 504, "Backend"),
        (ModelFailedError("forward raised"), 424, "Backend"),
        (WorkerCrashedError("it died"), 424, "Backend"),
        (InternalError("ours"), 500, "Backend"),
        (QuarantinedError("killed workers"), 422, "Validation"),
        (InvalidInputError("instance.ids[3]: is beyond the vocabulary"), 422, "Validation"),
    ],
)
def test_an_input_that_fails_fails_the_call_and_is_named(
    error: ServiceError, status: int, kind: str
) -> None:
    said = error.message.removeprefix("instance.ids")
    answer = ask(model_of("embedding", [1], error), "/embed", {"inputs": ["a", [1], "c"]})
    assert (answer.status_code, answer.json()["error_type"]) == (status, kind)
    assert answer.json()["error"].removeprefix("inputs[1]").removeprefix(": ") == said
    assert ("retry-after" in answer.headers) == (status == 503)
    alone = ask(model_of("embedding", error), "/embed", {"inputs": [1]})
    assert alone.status_code == status
    assert alone.json()["error"].removeprefix("inputs").removeprefix(": ") == said


@pytest.mark.parametrize(
    ("path", "answer"),
    [("/embed", b'"x"'), ("/embed", b"[1.5]"), ("/embed", b"[x,1]"), ("/predict", b"[1,2]")],
)
def test_a_model_that_answers_in_another_form_has_failed(path: str, answer: bytes) -> None:
    model = model_of("embedding" if path == "/embed" else "classification")
    model._reply = lambda _: result(answer)
    refused = ask(model, path, {"inputs": "a"})
    assert (refused.status_code, refused.json()["error_type"]) == (424, "Backend")


@pytest.mark.parametrize(
    ("failed", "place"), [(0, "inputs.source_sentence"), (2, "inputs.sentences[1]")]
)
def test_a_sentence_that_fails_is_named(failed: int, place: str) -> None:
    answers: list[object] = [packed(1.0)] * 3
    answers[failed] = InvalidInputError("instance: is too long")
    body = {"inputs": {"source_sentence": "a", "sentences": ["b", "c"]}}
    refused = ask(model_of("embedding", *answers), "/similarity", body)
    assert (refused.status_code, refused.json()["error"]) == (422, f"{place}: is too long")


@pytest.mark.parametrize(
    ("task", "path", "limit", "good", "bad"),
    [
        ("embedding", "embed_all", "_MOST_NUMBERS", ["a" * 99, "a"], ["a" * 99, "a" * 5]),
        ("embedding", "embed_all", "_MOST_NUMBERS", [1] * 99, [[1] * 99, [1] * 99]),
        ("embedding", "tokenize", "_MOST_TOKENIZED", ["ü" * 100, "a" * 60], ["a" * 161]),
        ("classification", "predict", "MAX_SCORES", [["a"]] * 3, [["a"]] * 4),
    ],
)
def test_what_would_have_too_long_an_answer_is_refused(
    monkeypatch: pytest.MonkeyPatch, task: Task, path: str, limit: str, good: object, bad: object
) -> None:
    most = 7 if path == "predict" else 160
    monkeypatch.setattr(f"inferpool.service.parts.tei.requests.{limit}", most)
    model = model_of(task, *[GOOD] * 4)
    assert ask(model, f"/tei/fake/{path}", {"inputs": good}).status_code == 200
    model = model_of(task)
    refused = ask(model, f"/tei/fake/{path}", {"inputs": bad})
    assert (refused.status_code, refused.json()["error_type"]) == (413, "Validation")
    assert not model.payloads


def test_only_post_is_allowed_and_without_the_setting_there_is_nothing() -> None:
    answer = ask(model_of("embedding"), "/embed", b"", method="GET")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert set(answer.json()) == {"error", "error_type"}
    predict = endpoint(model_of("embedding"))
    for path in ("/embed", "/tei/fake/embed", "/rerank", "/tokenize"):
        assert not predict.takes(path)
        assert endpoint(model_of("embedding"), optional=[CALLS_BY_SETTING["tei"]]).takes(path)


@pytest.mark.parametrize("path", ["/embed", "/embed_sparse"])
def test_a_call_for_the_default_model_that_was_removed_is_told_to_name_one(path: str) -> None:
    predict = Predict({"other": FakeModel()}, default="gone", optional=[CALLS_BY_SETTING["tei"]])
    answer = call(predict, "POST", path, json={"inputs": "a"})
    assert answer.status_code == 404
    assert answer.json()["error"].startswith("the default model 'gone' is not served now")
