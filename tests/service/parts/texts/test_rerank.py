"""Calls to rank documents over ASGI, to a model that answers with the scores that it is told."""

import json
from typing import Any

import httpx
import pytest

from inferpool.models.spec import UNKNOWN_INTERFACE, Interface, TextFacts
from inferpool.service.api.codecs.body import Limits
from inferpool.service.api.exchange import Predict
from inferpool.service.errors import (
    DeadlineExceededError,
    InvalidInputError,
    ModelFailedError,
    OverloadedError,
    UnavailableError,
)
from tests.service.api.fakes import FakeModel, call, endpoint, post, result

V1, V2 = "/v1/rerank", "/v2/rerank"
RANKS = Interface(text=TextFacts(task="reranking", max_tokens=128, vocab_size=100))
EMBEDS = Interface(text=TextFacts(task="embedding", max_tokens=128, vocab_size=100))
A_CALL = {"query": "q", "documents": ["a", "b"]}


def ranker(*scores: float, **options: Any) -> FakeModel:
    """It has counted as many tokens as the place of an instance says, from 1."""
    options = {"interface": RANKS, **options}
    return FakeModel(lambda index: result(b"[%d,%r]" % (index + 1, scores[index])), **options)


def ask(
    model: FakeModel, body: object, path: str = V1, limits: Limits | None = None, **request: Any
) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return post(endpoint(model, limits=limits or Limits()), path, content=content, **request)


def order_in(answer: httpx.Response) -> list[tuple[int, float]]:
    assert answer.status_code == 200, answer.text
    return [(each["index"], each["relevance_score"]) for each in answer.json()["results"]]


def asked(model: FakeModel) -> list[object]:
    assert {each.kind for each in model.payloads} == {"json"}
    return [json.loads(each) for each in model.bodies]


@pytest.mark.parametrize("path", [V1, V2])
def test_documents_come_back_best_first_and_equals_as_they_came(path: str) -> None:
    model = ranker(0.25, 0.75, 0.25, 1.0)
    body = {"model": "fake", "query": 'a "q"', "documents": ["w", "x\n", "w", "é"]}
    answer = ask(model, body, path)
    assert order_in(answer) == [(3, 1.0), (1, 0.75), (0, 0.25), (2, 0.25)]
    assert asked(model) == [{"query": 'a "q"', "text": text} for text in ["w", "x\n", "w", "é"]]
    assert [ref.parameters for ref in model.refs] == [b'{"count":true}'] * 4
    document = answer.json()
    assert document["model"] == "fake"
    assert document["id"] == answer.headers["x-request-id"]
    assert document["usage"] == {"prompt_tokens": 10, "total_tokens": 10}
    version = {"version": path[2]}
    assert document["meta"] == {"api_version": version, "tokens": {"input_tokens": 10}}
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("top_n", "indices"), [(1, [1]), (2, [1, 0]), (9, [1, 0, 2]), (0, [1, 0, 2]), (None, [1, 0, 2])]
)
def test_top_n_is_the_most_that_come_back(top_n: int | None, indices: list[int]) -> None:
    body = {"query": "q", "documents": ["a", "b", "c"], "top_n": top_n}
    assert [index for index, _ in order_in(ask(ranker(0.5, 0.6, 0.1), body))] == indices


def test_a_single_document_is_ranked_too() -> None:
    assert order_in(ask(ranker(0.5), {"query": "q", "documents": ["a"]})) == [(0, 0.5)]


@pytest.mark.parametrize(
    ("path", "wanted", "shown"),
    [
        (V1, None, True),
        (V1, True, True),
        (V1, False, False),
        (V2, None, False),
        (V2, True, True),
        (V2, False, False),
    ],
)
def test_documents_are_shown_as_they_came_where_the_call_or_jina_wants_them(
    path: str, wanted: bool | None, shown: bool
) -> None:
    documents = ["ä", {"text": "b", "page": 3}]
    body = {"query": "q", "documents": documents, "return_documents": wanted}
    results = ask(ranker(0.9, 0.1), body, path).json()["results"]
    found = [each.get("document") for each in results]
    assert found == ([{"text": "ä"}, {"text": "b", "page": 3}] if shown else [None, None])


def test_objects_have_their_text_or_the_members_that_the_call_names() -> None:
    model = ranker(0.1, 0.2, 0.3)
    documents = [{"title": "T", "year": 1999, "text": "x"}, "plain", {"text": "y\n", "title": None}]
    body = {"query": "q", "documents": documents, "rank_fields": ["title", "year", "text", "title"]}
    assert ask(model, body).is_success
    assert [each["text"] for each in asked(model)] == [  # type: ignore[index]  # objects
        "title: T\nyear: 1999\ntext: x",
        "plain",
        "text: y\n",
    ]
    model = ranker(0.1)
    assert ask(model, {"query": "q", "documents": [{"title": "T", "text": "x"}]}).is_success
    assert asked(model) == [{"query": "q", "text": "x"}]


def test_what_cohere_jina_and_infinity_call_options_is_accepted() -> None:
    model = ranker(-3.5, 4.25)
    options = {
        "top_n": None, "rank_fields": None, "return_documents": None, "model": None, "user": "me",
        "max_chunks_per_doc": 1, "max_tokens_per_doc": 4096, "priority": 0, "truncation": False,
        "raw_scores": True, "return_embeddings": False,
    }  # fmt: skip
    answer = ask(model, {**A_CALL, **options})
    assert order_in(answer) == [(1, 4.25), (0, -3.5)]
    assert "warnings" not in answer.json()["meta"]
    parameters = {"count": True, "truncate": False, "raw_scores": True}
    assert json.loads(model.refs[0].parameters) == parameters


def test_the_answer_says_what_could_not_be_done() -> None:
    body = {**A_CALL, "max_chunks_per_doc": 10, "max_tokens_per_doc": 100}
    chunks, tokens = ask(ranker(0.1, 0.2), body).json()["meta"]["warnings"]
    assert "not split" in chunks
    assert "128 tokens" in tokens


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "empty"),
        (b"{", "malformed JSON"),
        (b'{"query": "\xff", "documents": ["a"]}', "UTF-8"),
        ([], "must be an object"),
        ({"documents": ["a"]}, "query: is missing"),
        ({"query": "q"}, "documents: is missing"),
        ({"query": "", "documents": ["a"]}, "query: is an empty text"),
        ({"query": 3, "documents": ["a"]}, "query: must be a text"),
        ({"query": "q", "documents": []}, "documents: is an empty list"),
        ({"query": "q", "documents": "a"}, "documents: must be a list"),
        ({"query": "q", "documents": ["a", 3]}, "documents[1]: must be a text"),
        ({"query": "q", "documents": [["a"]]}, "documents[0]: must be a text"),
        ({"query": "q", "documents": [{"title": "a"}]}, 'documents[0]: has no "text"'),
        ({"query": "q", "documents": [{"text": 3}]}, 'documents[0]: has no "text"'),
        ({"query": "q", "documents": [{"image": "http://x"}]}, "documents[0]: is a picture"),
        ({"query": "q", "documents": ["a"] * 1001}, "more than 1000"),
        ({**A_CALL, "top_n": -1}, "top_n"),
        ({**A_CALL, "top_n": "3"}, "top_n"),
        ({**A_CALL, "return_embeddings": True}, "return_embeddings: must be false"),
        ({**A_CALL, "return_documents": 1}, "return_documents"),
        ({**A_CALL, "rank_fields": "text"}, "rank_fields: must be a list"),
        ({**A_CALL, "rank_fields": [3]}, "rank_fields[0]: must be the name"),
        ({**A_CALL, "rank_fields": ['a"']}, "rank_fields[0]: must have no backslash"),
        ({**A_CALL, "rank_fields": ["a"] * 17}, "rank_fields: has more than 16"),
        ({**A_CALL, "rank_fields": ["a" * 255]}, "rank_fields[0]: has more than 256 bytes"),
        ({"query": "q", "documents": [{"a": [1]}], "rank_fields": ["a"]}, "documents[0].a: must"),
        ({"query": "q", "documents": [{"a": "x"}], "rank_fields": ["b"]}, "documents[0]: has none"),
        (b'{"query": "q", "documents": [{"a": "\\ud800"}], "rank_fields": ["a"]}', "surrogate"),
        ({**A_CALL, "passages": 3}, "passages: is unknown"),
        ({**A_CALL, "model": 3}, "model"),
    ],
)
def test_a_body_that_does_not_fit_gets_400_and_a_sentence_with_the_place(
    body: object, said: str
) -> None:
    model = ranker(0.1, 0.2)
    answer = ask(model, body)
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")
    assert said in answer.json()["message"]
    assert answer.json()["detail"] == answer.json()["message"]
    assert answer.json()["id"] == answer.headers["x-request-id"]
    assert not model.payloads


def test_copies_of_a_long_query_count_like_bytes_of_a_body() -> None:
    limits = Limits(max_body_bytes=10_000)
    body = {"query": "q" * 1998, "documents": ["a"] * 5}
    assert ask(ranker(*[0.5] * 5), body, limits=limits).is_success
    answer = ask(ranker(), {**body, "documents": ["a"] * 6}, limits=limits)
    assert answer.status_code == 413
    assert "send fewer documents" in answer.json()["message"]


def test_a_thousand_documents_are_submitted_in_turn() -> None:
    model = ranker(*[index / 1000 for index in range(1000)])
    body = {"query": "q", "documents": ["a"] * 1000, "top_n": 2}
    answer = ask(model, body)
    assert order_in(answer) == [(999, 0.999), (998, 0.998)]
    assert len(model.payloads) == 1000


@pytest.mark.parametrize(
    ("error", "status", "said", "retry_after"),
    [
        (InvalidInputError("instance.text: too long"), 400, "documents[1].text: too long", None),
        (ModelFailedError("it raised"), 500, "documents[1]: it raised", None),
        (OverloadedError("the queue is full", retry_after_s=3), 429, "the queue is full", "3"),
        (UnavailableError("no worker is ready"), 503, "no worker is ready", "1"),
        (DeadlineExceededError("too late"), 504, "too late", None),
    ],
)
def test_a_document_that_fails_fails_the_call(
    error: Any, status: int, said: str, retry_after: str | None
) -> None:
    model = FakeModel(lambda index: error if index else result(b"[1,0.5]"), interface=RANKS)
    answer = ask(model, {"query": "q", "documents": ["a", "b", "c"]})
    assert answer.status_code == status
    assert said in answer.json()["message"]
    assert answer.json()["code"] == error.code
    assert answer.headers.get("retry-after") == retry_after


@pytest.mark.parametrize("value", [b'[1,"high"]', b"[1,null]", b"[1,[0.5]]", b"0.5"])
def test_a_model_that_answers_in_another_form_is_at_fault(value: bytes) -> None:
    answer = ask(FakeModel(lambda _: result(value), interface=RANKS), A_CALL)
    assert (answer.status_code, answer.json()["code"]) == (500, "model_error")


def test_a_model_for_something_else_or_of_no_such_name_is_refused() -> None:
    answer = ask(ranker(interface=EMBEDS), A_CALL)
    assert answer.status_code == 400
    assert "ranks no texts" in answer.json()["message"]
    answer = ask(ranker(), {**A_CALL, "model": "rerank-v3.5"})
    assert answer.status_code == 404
    assert "there are: fake" in answer.json()["message"]
    model = ranker()
    answer = post(Predict({"fake": model}), V1, json=A_CALL)
    assert answer.status_code == 404
    assert not model.payloads


def test_a_model_that_has_not_loaded_yet_is_asked_all_the_same() -> None:
    assert order_in(ask(ranker(0.1, 0.2, interface=UNKNOWN_INTERFACE), A_CALL))


def test_another_method_is_refused_in_the_same_form() -> None:
    answer = call(endpoint(ranker()), "GET", V2)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert "takes POST" in answer.json()["message"]
