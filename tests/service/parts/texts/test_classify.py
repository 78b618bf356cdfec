"""Calls for labels over ASGI, to a model that answers with the scores that it is told."""

import json
import time
from typing import Any

import httpx
import msgspec
import pytest

from inferpool.models.spec import UNKNOWN_INTERFACE, Interface, TextFacts
from inferpool.service.api.codecs.body import Limits
from inferpool.service.errors import InvalidInputError, OverloadedError
from tests.service.api.fakes import FakeModel, endpoint, post, result

PATH = "/v1/classify"
LABELS = ("sad", "so so", "glad")
FACTS = TextFacts(task="classification", max_tokens=128, vocab_size=100)
CLASSIFIES = Interface(text=FACTS, labels=LABELS)


def classifier(*best: int, num: int = 3, **options: Any) -> FakeModel:
    """It prefers the labels given by their index, by 0.5, 0.375, 0.125; three tokens each."""

    def answer(index: int) -> Any:
        first = best[index]
        order = [first, *(each for each in range(len(LABELS)) if each != first)][:num]
        scored = [
            {"label": LABELS[each], "index": each, "score": score}
            for each, score in zip(order, (0.5, 0.375, 0.125), strict=False)
        ]
        return result(json.dumps([3, scored], separators=(",", ":")).encode())

    return FakeModel(answer, **{"interface": CLASSIFIES, **options})


def ask(model: FakeModel, body: object, limits: Limits | None = None) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return post(endpoint(model, limits=limits or Limits()), PATH, content=content)


def parameters_of(model: FakeModel) -> dict[str, object]:
    (parameters,) = {ref.parameters for ref in model.refs}
    found: dict[str, object] = json.loads(parameters)
    return found


def test_input_is_answered_with_what_jina_and_vllm_say_of_each_text() -> None:
    model = classifier(2, 0)
    answer = ask(model, {"model": "fake", "input": ["hé", {"text": "a", "pair": "b"}]})
    assert answer.status_code == 200
    document = answer.json()
    assert document["data"][0] == {
        "object": "classification",
        "index": 0,
        "prediction": "glad",
        "score": 0.5,
        "predictions": [
            {"label": "glad", "score": 0.5},
            {"label": "sad", "score": 0.375},
            {"label": "so so", "score": 0.125},
        ],
        "label": "glad",
        "probs": [0.375, 0.125, 0.5],
        "num_classes": 3,
    }
    assert [each["index"] for each in document["data"]] == [0, 1]
    assert document["data"][1]["label"] == "sad"
    assert (document["object"], document["model"]) == ("list", "fake")
    assert document["id"] == answer.headers["x-request-id"]
    assert abs(document["created"] - time.time()) < 60
    assert document["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    assert [json.loads(each) for each in model.bodies] == ["hé", {"text": "a", "pair": "b"}]
    assert parameters_of(model) == {"count": True, "top_k": 3}


def test_one_text_may_stand_alone() -> None:
    model = classifier(1)
    (text,) = ask(model, {"input": "a"}).json()["data"]
    assert text["prediction"] == "so so"
    assert model.bodies == [b'"a"']


def test_inputs_are_answered_as_cohere_does() -> None:
    model = classifier(2, 0)
    answer = ask(model, {"inputs": ["x\n", {"text": "a", "pair": "b"}], "examples": []})
    assert answer.status_code == 200
    document = answer.json()
    first, second = document["classifications"]
    assert first == {
        "id": f"{document['id']}-0",
        "input": "x\n",
        "prediction": "glad",
        "confidence": 0.5,
        "predictions": ["glad"],
        "confidences": [0.5],
        "labels": {
            "glad": {"confidence": 0.5},
            "sad": {"confidence": 0.375},
            "so so": {"confidence": 0.125},
        },
        "classification_type": "single-label",
    }
    assert second["input"] == "a"
    assert document["meta"] == {"api_version": {"version": "1"}, "tokens": {"input_tokens": 6}}


def test_labels_that_do_not_exclude_each_other_are_predicted_if_they_are_likely() -> None:
    facts = msgspec.structs.replace(FACTS, is_multi_label=True)
    scored = [("glad", 2, 0.9), ("sad", 0, 0.75), ("so so", 1, 0.25)]
    labels = [{"label": label, "index": index, "score": score} for label, index, score in scored]
    answer = json.dumps([3, labels], separators=(",", ":")).encode()
    model = FakeModel(lambda _: result(answer), interface=Interface(text=facts, labels=LABELS))
    (found,) = ask(model, {"inputs": ["a"]}).json()["classifications"]
    assert found["classification_type"] == "multi-label"
    assert (found["predictions"], found["confidences"]) == (["glad", "sad"], [0.9, 0.75])
    assert not {"prediction", "confidence"} & found.keys()
    assert len(found["labels"]) == 3


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"top_k": 2}, {"top_k": 2}),
        ({"raw_scores": True}, {"top_k": 3, "raw_scores": True}),
        ({"truncate": "NONE"}, {"top_k": 3, "truncate": False}),
        ({"truncate": False}, {"top_k": 3, "truncate": False}),
        ({"truncate": "END"}, {"top_k": 3, "truncate": True}),
        (
            {"truncate": "START"},
            {"top_k": 3, "truncate": True, "truncation_direction": "left"},
        ),
        ({"top_k": None, "user": "me", "labels": None}, {"top_k": 3}),
    ],
)
def test_options_go_to_the_model(options: dict[str, object], expected: dict[str, object]) -> None:
    model = classifier(0, num=2)
    document = ask(model, {"input": "a", **options}).json()
    assert parameters_of(model) == {"count": True, **expected}
    assert "probs" not in document["data"][0]  # only two labels came


def test_a_model_of_unknown_labels_chooses_their_number() -> None:
    model = classifier(0, interface=UNKNOWN_INTERFACE)
    (text,) = ask(model, {"input": "a"}).json()["data"]
    assert text["prediction"] == "sad"
    assert not {"probs", "num_classes"} & text.keys()
    assert parameters_of(model) == {"count": True}


def test_the_labels_of_one_answer_are_bounded() -> None:
    labels = Interface(text=FACTS, labels=tuple(map(str, range(101))))
    model = classifier(*[0] * 200, interface=labels)
    answer = ask(model, {"input": ["a"] * 200})
    assert answer.status_code == 413
    assert "fewer labels" in answer.json()["message"]
    assert ask(model, {"input": ["a"] * 200, "top_k": 100}).is_success


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "malformed JSON"),
        ({}, "input: is missing"),
        ({"input": ["a"], "inputs": ["a"]}, "inputs: stands beside input"),
        ({"input": []}, "input: is an empty list"),
        ({"input": ""}, "input: is an empty text"),
        ({"input": 3}, "input: must be a text"),
        ({"input": ["a", ""]}, "input[1]: is an empty text"),
        ({"inputs": ["a", 3]}, "inputs[1]: must be a text"),
        ({"input": [{"image": "http://x"}]}, "input[0]: is a picture"),
        ({"input": [{"pair": "x"}]}, 'input[0]: must have "text"'),
        ({"input": [{"text": "x", "more": "x"}]}, 'input[0]: must have "text"'),
        (b'{"input": [{"\\ud800": "x"}]}', "half of a surrogate"),
        ({"input": ["a"] * 1025}, "more than 1024"),
        ({"input": "a", "labels": ["x", "y"]}, "labels: is not supported"),
        ({"input": "a", "classifier_id": "x"}, "classifier_id: is not supported"),
        ({"inputs": ["a"], "examples": [{"text": "x", "label": "y"}]}, "examples: is not supp"),
        ({"inputs": ["a"], "preset": "x"}, "preset: is not supported"),
        ({"input": "a", "top_k": 0}, "top_k"),
        ({"input": "a", "truncate": "middle"}, "truncate"),
        ({"input": "a", "texts": 3}, "texts: is unknown"),
    ],
)
def test_a_body_that_does_not_fit_gets_400_and_a_sentence(body: object, said: str) -> None:
    model = classifier(0)
    answer = ask(model, body)
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")
    assert said in answer.json()["message"]
    assert not model.payloads


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (InvalidInputError("instance: too long"), 400, "input[1]: too long"),
        (OverloadedError("the queue is full"), 429, "the queue is full"),
    ],
)
def test_a_text_that_fails_fails_the_call(error: Any, status: int, said: str) -> None:
    fine = b'[1,[{"label":"sad","index":0,"score":1.0}]]'
    model = FakeModel(lambda index: error if index else result(fine), interface=CLASSIFIES)
    answer = ask(model, {"input": ["a", "b"]})
    assert answer.status_code == status
    assert said in answer.json()["message"]


@pytest.mark.parametrize("value", [b"[1,[]]", b'[1,"sad"]', b'[1,[{"label":"sad"}]]', b"[]"])
@pytest.mark.parametrize("param", ["input", "inputs"])
def test_a_model_that_answers_in_another_form_is_at_fault(value: bytes, param: str) -> None:
    model = FakeModel(lambda _: result(value), interface=CLASSIFIES)
    answer = ask(model, {param: "a"})
    assert (answer.status_code, answer.json()["code"]) == (500, "model_error")


def test_a_model_for_something_else_is_refused() -> None:
    ranks = Interface(text=TextFacts(task="reranking", max_tokens=9, vocab_size=9))
    answer = ask(classifier(0, interface=ranks), {"input": "a"})
    assert answer.status_code == 400
    assert "classifies no texts" in answer.json()["message"]
