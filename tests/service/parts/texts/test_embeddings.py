"""Calls for vectors of texts, in OpenAI's form, to a model that answers as told."""

import asyncio
import base64
import json
import struct
import sys
from copy import copy
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferpool.models.spec import UNKNOWN_INTERFACE, Interface, TextFacts
from inferpool.service.api.auth import Guard
from inferpool.service.api.codecs.body import Limits
from inferpool.service.api.exchange import Exchange, Predict
from inferpool.service.errors import (
    DeadlineExceededError,
    GivenUpError,
    InvalidInputError,
    ModelFailedError,
    OverloadedError,
    QuarantinedError,
    ServiceError,
    UnavailableError,
    WorkerCrashedError,
)
from inferpool.service.parts.texts.embeddings import MAX_INPUTS, is_list, payloads_of
from inferpool.service.parts.texts.errors import ArgumentError
from inferpool.service.queue.instance import CanaryShare
from inferpool.service.settings.draft import read_keys
from tests.service.api.fakes import FakeModel, NoWire, body_of, call, endpoint, post, result
from tests.service.api.server import WAYS, PredictServer, RawAnswer, Way, serve, silent_model, until

PATH = "/v1/embeddings"
FACTS = TextFacts(task="embedding", max_tokens=128, vocab_size=100, num_dimensions=2)
EMBEDS = Interface(text=FACTS)
RANKS = Interface(text=TextFacts(task="reranking", max_tokens=128, vocab_size=100))
CLASSIFIES = Interface(text=TextFacts(task="classification", max_tokens=128, vocab_size=100))
KEY, ADMIN = "k" * 20, "a" * 20
HEAD = b"POST /v1/embeddings HTTP/1.1\r\nhost: h\r\n"


def encoder(**options: Any) -> FakeModel:
    """Its answers are the place of the instance, from 0, as its only number, and 3 tokens."""
    options = {"interface": EMBEDS, "reply": lambda index: result(b"[3,[%d]]" % index), **options}
    return FakeModel(**options)


def ask(
    model: FakeModel, body: object, limits: Limits | None = None, **request: Any
) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return post(endpoint(model, limits=limits or Limits()), PATH, content=content, **request)


def refused(answer: httpx.Response | RawAnswer, status: int) -> dict[str, Any]:
    """The error of an answer, in OpenAI's form."""
    found = answer.json if isinstance(answer, RawAnswer) else answer.json()
    has = answer.status if isinstance(answer, RawAnswer) else answer.status_code
    assert has == status, found
    assert answer.headers["content-type"] == "application/json"
    assert found.keys() == {"error"}
    error = dict(found["error"])
    assert error.keys() == {"message", "type", "param", "code", "request_id"}
    assert error["request_id"] == answer.headers["x-request-id"]
    return error


def asked(model: FakeModel) -> list[Any]:
    assert {each.kind for each in model.payloads} == {"json"}
    return [json.loads(each) for each in model.bodies]


@pytest.mark.parametrize(
    ("given", "instances"),
    [
        ('a "text"', ['a "text"']),
        (["a", "b\n", "é"], ["a", "b\n", "é"]),
        ([5], [{"ids": [5]}]),
        ([5, 6, 7], [{"ids": [5, 6, 7]}]),
        ([[5, 6], [7]], [{"ids": [5, 6]}, {"ids": [7]}]),
        (" ", [" "]),
        ([" [1]"], [" [1]"]),
    ],
)
def test_texts_and_ids_are_answered_in_their_order(given: object, instances: object) -> None:
    model = encoder()
    answer = ask(model, {"input": given, "model": "fake"})
    assert asked(model) == instances
    num = len(model.payloads)
    assert answer.status_code == 200
    assert answer.json() == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": [index]} for index in range(num)
        ],
        "model": "fake",
        "usage": {"prompt_tokens": 3 * num, "total_tokens": 3 * num},
    }
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-model-version"] == "1"
    assert not any(ref.wants_tensors for ref in model.refs)


def test_space_between_values_changes_nothing() -> None:
    model = encoder()
    body = b'\xef\xbb\xbf {\n "input" : [ \t[ 1 , 2 ] ,\r\n [3] ] , "model" : null }\n'
    assert ask(model, body).status_code == 200
    assert asked(model) == [{"ids": [1, 2]}, {"ids": [3]}]


@pytest.mark.parametrize(
    ("arguments", "parameters"),
    [
        ({}, {}),
        ({"encoding_format": "float", "user": "me"}, {}),
        ({"encoding_format": "base64"}, {"as": "base64"}),
        ({"dimensions": 2}, {"dimensions": 2}),
        ({"dimensions": None, "user": None, "encoding_format": None}, {}),
        (
            {"truncate": False, "truncation_direction": "left", "normalize": False},
            {"truncate": False, "truncation_direction": "left", "normalize": False},
        ),
        ({"prompt_name": "query"}, {"prompt_name": "query"}),
    ],
)
def test_arguments_become_parameters_of_the_model(
    arguments: dict[str, object], parameters: dict[str, object]
) -> None:
    model = encoder()
    assert ask(model, {"input": "a", **arguments}).status_code == 200
    (ref,) = model.refs
    assert json.loads(ref.parameters) == {"count": True, **parameters}


def test_base64_of_the_worker_comes_through_as_it_is() -> None:
    encoded = base64.b64encode(struct.pack("<2f", 0.5, -2)).decode()
    model = encoder(reply=lambda _: result(f'[1,"{encoded}"]'.encode()))
    answer = ask(model, {"input": ["a"], "encoding_format": "base64"})
    (vector,) = answer.json()["data"]
    assert struct.unpack("<2f", base64.b64decode(vector["embedding"])) == (0.5, -2)


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        (b"", None, "empty"),
        (b"  ", None, "empty"),
        (b"{", None, "malformed JSON"),
        (b'{"input": "\xff"}', None, "UTF-8"),
        (b"[1]", None, "must be an object"),
        (b'"a"', None, "must be an object"),
        (b'{"input":' + b"[" * 200 + b"]" * 200 + b"}", None, "deep"),
        ({}, "input", "input: is missing"),
        ({"input": ""}, "input", "input: is an empty text"),
        ({"input": []}, "input", "input: is an empty list"),
        ({"input": ["a", ""]}, "input", "input[1]: is an empty text"),
        ({"input": [[1], []]}, "input", "input[1]: is an empty list of ids"),
        ({"input": None}, "input", "input: must be a text"),
        ({"input": 3}, "input", "input: must be a text"),
        ({"input": {"a": 1}}, "input", "input: must be a text"),
        ({"input": [None]}, "input", "input[0]: must be a text"),
        ({"input": ["a", [1]]}, "input", "either texts or lists"),
        ({"input": ["a", 1]}, "input", "either texts or lists"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input", "more than 2048"),
        ({"input": "a", "model": 3}, "model", "model: expected"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions: expected"),
        ({"input": "a", "dimensions": True}, "dimensions", "dimensions: expected"),
        ({"input": "a", "dimensions": 1e99}, "dimensions", "dimensions"),
        ({"input": "a", "truncation_direction": "up"}, "truncation_direction", "'left'"),
        ({"input": "a", "prompt_name": "a" * 257}, "prompt_name", "prompt_name: expected"),
        ({"input": "a", "instances": []}, "instances", "this call takes input, "),
    ],
)
def test_a_body_that_does_not_fit_is_refused_with_the_argument_s_name(
    body: object, param: str | None, said: str
) -> None:
    model = encoder()
    error = refused(ask(model, body), 400)
    assert said in error["message"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert error["code"] == ("invalid_input" if param or "must be" in said or "deep" in said
                             else "bad_request")  # fmt: skip
    assert not model.payloads


def test_a_long_body_is_refused_and_a_list_of_millions_too() -> None:
    answer = ask(encoder(), {"input": "a" * 1000}, Limits(max_json_bytes=1000))
    assert "max_json_bytes" in refused(answer, 413)["message"]
    error = refused(ask(encoder(), b'{"input":["a"' + b',"a"' * 500_000 + b"]}"), 400)
    assert (error["param"], "more than 2048" in error["message"]) == ("input", True)


@pytest.mark.parametrize("name", ["encoding_format", "x" * 10_000])
def test_an_error_repeats_only_the_beginning_of_a_long_argument(name: str) -> None:
    error = refused(ask(encoder(), {"input": "a", name: "y" * 10_000}), 400)
    assert error["param"] == name[:80]
    assert len(error["message"]) < 1000


def test_the_body_s_type_does_not_matter_but_its_encoding_does() -> None:
    for media_type in ("application/json", "text/plain", "image/png"):
        answer = ask(encoder(), {"input": "a"}, headers={"content-type": media_type})
        assert answer.status_code == 200
    answer = ask(encoder(), {"input": "a"}, headers={"content-encoding": "gzip"})
    assert refused(answer, 415)["code"] == "unsupported_type"
    assert answer.headers["accept-encoding"] == "identity"


def test_the_body_names_the_model_or_leaves_the_choice() -> None:
    one, two, other = encoder(name="one"), encoder(name="two"), FakeModel(name="other")
    ranker = FakeModel(name="ranker", interface=RANKS)
    models = {each.name: each for each in (one, two, other, ranker)}
    predict = Predict(models, default="one")

    def of(name: object) -> httpx.Response:
        return post(predict, PATH, json={"input": "a", "model": name})

    assert [of(name).json()["model"] for name in ("one", "two", None)] == ["one", "two", "one"]
    assert post(predict, PATH, json={"input": "a"}).json()["model"] == "one"
    for name in ("text-embedding-3-small", "", "*", "/predict", "one/versions/7", "é" * 200):
        error = refused(of(name), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "there are: one, two, other, ranker" in refused(of("gpt"), 404)["message"]
    for name in ("other", "ranker"):
        error = refused(of(name), 400)
        assert error["message"] == (
            f"model: '{name}' computes no vectors of texts; those that do: one, two"
        )
        assert error["param"] == "model"
    nameless = post(Predict(models), PATH, json={"input": "a"})
    assert "none is the default" in refused(nameless, 404)["message"]


@pytest.mark.parametrize(
    ("path", "model", "body"),
    [
        (PATH, encoder(), b'{"input": ["a", "b"]}'),
        ("/v2/rerank", FakeModel(interface=RANKS), b'{"query": "a", "documents": ["b", "c"]}'),
        ("/v1/classify", FakeModel(interface=CLASSIFIES), b'{"input": ["a", "b"]}'),
    ],
)
def test_the_body_of_a_call_is_not_kept_once_its_instances_are_submitted(
    path: str, model: FakeModel, body: bytes
) -> None:
    body = bytes(bytearray(body))  # nothing else has it
    num_owners = sys.getrefcount(body)
    exchange = Exchange.open(NoWire(), endpoint(model), "POST", path, b"", [])
    assert exchange.call.protocol is not None
    protocol = exchange.call.protocol.opened(exchange, (body,))
    assert len(protocol.decode(exchange, model, (body,)).payloads) == 2  # type: ignore[union-attr]  # they read all
    assert sys.getrefcount(body) == num_owners


def test_a_model_that_loads_is_unavailable_and_not_unfit() -> None:
    refusal = UnavailableError("no worker is ready")
    answer = ask(encoder(interface=UNKNOWN_INTERFACE, refusals=[refusal]), {"input": "a"})
    assert refused(answer, 503)["code"] == "unavailable"


@pytest.mark.parametrize(
    ("error", "status", "kind", "is_named"),
    [
        (InvalidInputError("instance.ids[0]: 300 is beyond"), 400, "invalid_request_error", True),
        (QuarantinedError("it killed workers"), 400, "invalid_request_error", True),
        (OverloadedError("the queue is full", retry_after_s=3), 429, "rate_limit_error", False),
        (ModelFailedError("forward raised"), 500, "server_error", True),
        (WorkerCrashedError("workers died"), 500, "server_error", True),
        (UnavailableError("no worker is ready"), 503, "server_error", False),
        (GivenUpError("no worker can be started"), 503, "server_error", True),
        (DeadlineExceededError("too late"), 504, "server_error", False),
    ],
    ids=lambda value: value.code if isinstance(value, ServiceError) else "",
)
@pytest.mark.parametrize("at_once", [True, False])
def test_an_input_that_fails_fails_the_call_and_is_named(
    error: Any, status: int, kind: str, is_named: bool, at_once: bool
) -> None:
    error, said = copy(error), error.message
    model = encoder(
        reply=lambda index: error if index else result(b"[1,[0]]"),
        refusals=[None, error, error, error] * at_once,
    )
    answer = ask(model, {"input": ["a", "b", "c"]})
    found = refused(answer, status)
    assert (found["type"], found["code"]) == (kind, error.code)
    assert found["message"].startswith("input[1]") == is_named
    assert found["param"] == ("input" if isinstance(error, InvalidInputError) else None)
    assert said.removeprefix("instance.ids") in found["message"]
    assert "input" not in error.message  # calls may share it
    assert ("retry-after" in answer.headers) == (status in (429, 503) and error.code != "given_up")
    will_fail_again = status >= 500 and is_named
    assert answer.headers.get("x-should-retry") == ("false" if will_fail_again else None)
    alone = refused(ask(encoder(reply=lambda _: error), {"input": "a"}), status)
    assert alone["message"].startswith("input") == is_named
    assert "[1]" not in alone["message"]


def test_an_error_about_a_parameter_names_it() -> None:
    error = InvalidInputError("parameter 'dimensions' must be from 1 to 8")
    found = refused(ask(encoder(reply=lambda _: error), {"input": ["a", "b"]}), 400)
    assert (found["param"], found["message"]) == ("dimensions", error.message)


def test_a_model_that_counts_no_tokens_is_at_fault() -> None:
    for value in (b"[0.5]", b"3", b'"a"'):
        answer = ask(encoder(reply=lambda _, value=value: result(value)), {"input": "a"})
        assert refused(answer, 500)["code"] == "model_error"


@pytest.mark.parametrize("way", WAYS)
async def test_calls_over_sockets_get_openai_s_form_for_every_error(way: Way) -> None:
    fits, guard = b'{"input":"a"}', Guard(predict=read_keys(KEY), admin=read_keys(ADMIN))
    keyed = HEAD + b"authorization: Bearer %b\r\n" % KEY.encode()

    def with_body(head: bytes, body: bytes = fits) -> bytes:
        return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)

    rows = [
        (with_body(keyed), 200, ""),
        (with_body(HEAD), 401, "invalid_api_key"),
        (with_body(HEAD + b"authorization: Bearer nobody\r\n"), 401, "invalid_api_key"),
        (with_body(HEAD + b"x-api-key: %b\r\n" % ADMIN.encode()), 403, "forbidden"),
        (with_body(keyed.replace(b"POST", b"PUT")), 405, "method_not_allowed"),
        (keyed.replace(b"POST", b"GET") + b"\r\n", 405, "method_not_allowed"),
        (with_body(keyed, b'{"input":"a","model":"gpt"}'), 404, "model_not_found"),
        (with_body(keyed + b"x-model-version: 7\r\n"), 404, "model_not_found"),
        (with_body(keyed + b"x-priority: 12\r\n"), 400, "bad_request"),
        (with_body(keyed, b"{"), 400, "bad_request"),
        (keyed + b"content-length: 1001\r\n\r\n", 413, "too_large"),
        (with_body(keyed + b"prefer: respond-async\r\n"), 200, ""),
    ]
    async with serve(encoder(), way=way, guard=guard, max_body_bytes=1000) as server:
        for data, status, code in rows:
            answer = await server.answer_to(data)
            assert answer.status == status, (data, answer)
            if status != 200:
                assert refused(answer, status)["code"] == code
        async with server.connect() as client:
            for _ in range(3):  # a head that comes again
                assert (await client.ask(with_body(keyed))).json["data"][0]["embedding"]
    assert set(server.statuses) >= {200, 401, 404}


async def test_calls_get_the_version_that_they_name_or_that_has_their_share() -> None:
    first, second = encoder(), encoder()
    second.version, second.is_serving = 2, False

    def with_body(body: bytes, lines: bytes = b"") -> bytes:
        return HEAD + lines + b"content-length: %d\r\n\r\n%b" % (len(body), body)

    plain = b'{"input":"a","model":"fake"}'
    async with serve(first) as server:
        models = server.protocol.predict.models
        models |= {"fake/versions/1": first, "fake/versions/2": second}  # type: ignore[operator]  # a dict here
        first.canary, first.is_serving = CanaryShare("fake/versions/2", 0.5), False  # type: ignore[assignment]  # as a catalog does
        calls = [
            with_body(plain, b"x-model-version: 2\r\n"),
            with_body(b'{"input":"a","model":"fake/versions/2"}'),
            *(with_body(plain, b"x-request-id: call-%d\r\n" % number) for number in range(16)),
        ]
        answers = [await server.answer_to(each) for each in calls]
    versions = [answer.headers["x-model-version"] for answer in answers]
    assert {answer.status for answer in answers} == {200}
    assert versions[:2] == ["2", "2"]
    assert set(versions[2:]) == {"1", "2"}


async def many(server: PredictServer, num: int) -> RawAnswer:
    body = json.dumps({"input": [f"text {number}" for number in range(num)]}).encode()
    return await server.answer_to(HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body))


@pytest.mark.parametrize("way", WAYS)
async def test_many_inputs_are_submitted_in_turn(way: Way) -> None:
    model = encoder()
    async with serve(model, way=way, max_instances=16) as server:
        answer = await many(server, MAX_INPUTS)
        assert answer.status == 200
        assert [each["index"] for each in answer.json["data"]] == list(range(MAX_INPUTS))
        texts = [json.loads(each) for each in model.bodies]
        assert sorted(texts) == sorted(f"text {number}" for number in range(MAX_INPUTS))
        vectors = [each["embedding"][0] for each in answer.json["data"]]
        assert [texts[place] for place in vectors] == [f"text {n}" for n in range(MAX_INPUTS)]
        assert server.protocol.predict.unfinished.held.total == 0


@pytest.mark.parametrize(("num", "num_places"), [(3, 2), (16, 2), (40, 2), (400, 12)])
async def test_a_call_with_more_inputs_than_there_is_room_for_waits(
    num: int, num_places: int
) -> None:
    model, room = encoder(), OverloadedError("the queue is full", retry_after_s=1)
    submit, model.submit = model.submit, lambda *args, **more: submit_if_room(*args, **more)  # type: ignore[method-assign]  # it is a fake
    num_refused = 0

    def submit_if_room(*args: Any, **more: Any) -> Any:
        nonlocal num_refused
        if sum(not future.done() for future in model.futures) >= num_places:
            num_refused += 1
            raise room
        return submit(*args, **more)

    async with serve(model, max_instances=16) as server:
        assert len((await many(server, num)).json["data"]) == num
    # Each counts as a rejected instance.
    assert num_refused <= (num / 4 if num_places >= 8 else num)


async def test_a_call_has_as_many_in_flight_again_once_there_is_room() -> None:
    model, room = silent_model(), OverloadedError("the queue is full", retry_after_s=1)
    model.interface = EMBEDS
    model._refusals = [None, None, room]
    async with serve(model, max_instances=16) as server, server.connect() as client:
        body = json.dumps({"input": ["a"] * 300}).encode()
        client.send(HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        for number in range(300):
            await until(lambda: len(model.futures) > number)  # noqa: B023  # it is called here
            model.futures[number].set_result(result(b"[1,[0]]"))
            if number == 200:
                await until(lambda: sum(not each.done() for each in model.futures) == 16)
        assert len((await client.read_answer()).json["data"]) == 300


async def test_no_more_of_one_call_are_in_the_queue_than_a_request_may_have() -> None:
    model = silent_model()
    model.interface = EMBEDS
    async with serve(model, max_instances=16) as server, server.connect() as client:
        body = json.dumps({"input": ["a"] * 40}).encode()
        client.send(HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        await until(lambda: len(model.futures) == 16)
        assert server.protocol.predict.unfinished.held.total == len(body)
        for number in range(40):
            await until(lambda: len(model.futures) > number)  # noqa: B023  # it is called here
            num_open = sum(not future.done() for future in model.futures)
            assert num_open <= 16
            model.futures[number].set_result(result(b"[1,[0]]"))
        assert len((await client.read_answer()).json["data"]) == 40


async def test_a_client_that_hangs_up_in_the_middle_has_the_rest_dropped() -> None:
    model = silent_model()
    model.interface = EMBEDS
    async with serve(model, max_instances=16) as server:
        async with server.connect() as client:
            body = json.dumps({"input": ["a"] * 100}).encode()
            client.send(HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body))
            await until(lambda: len(model.futures) == 16)
        await until(lambda: all(future.cancelled() for future in model.futures))
        await until(lambda: server.statuses == [499])
        assert len(model.futures) == 16
        assert server.protocol.predict.unfinished.held.total == 0
        model.futures.clear()


@pytest.mark.parametrize("way", WAYS)
async def test_one_of_many_that_fails_ends_the_call(way: Way) -> None:
    error = InvalidInputError("instance: is no text")
    model = encoder(reply=lambda index: error if index == 20 else result(b"[1,[0]]"))
    async with serve(model, way=way, max_instances=16) as server:
        found = refused(await many(server, 500), 400)
        assert found["message"] == "input[20]: is no text"
        assert len(model.payloads) < 100


async def test_a_queue_with_less_room_than_a_call_needs_only_slows_it_down() -> None:
    full = OverloadedError("the queue is full", retry_after_s=1)
    at_once = [full if number % 5 == 4 else None for number in range(400)]
    model = encoder(refusals=at_once)
    async with serve(model, max_instances=16) as server:
        assert len((await many(server, 200)).json["data"]) == 200


async def test_what_is_refused_later_is_tried_again_while_others_are_in_flight() -> None:
    full = OverloadedError("the queue is full", retry_after_s=1)
    model = encoder(reply=lambda index: full if index % 4 == 3 else result(b"[1,[%d]]" % index))
    async with serve(model, max_instances=16) as server:
        answer = await many(server, 200)
        assert answer.status == 200, answer
        places = [each["embedding"][0] for each in answer.json["data"]]
        texts = [json.loads(model.bodies[place]) for place in places]
        assert texts == [f"text {number}" for number in range(200)]
        assert server.protocol.predict.unfinished.held.total == 0


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_queue_without_any_room_refuses_the_call(at_once: bool) -> None:
    full = OverloadedError("the queue is full", retry_after_s=7)
    model = encoder(reply=lambda _: full, refusals=[full] * 400 * at_once)
    async with serve(model, max_instances=16) as server:
        answer = await many(server, 200)
        assert refused(answer, 429)["code"] == "overloaded"
        assert answer.headers["retry-after"] == "7"


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_call_is_begun_anew_if_its_version_leaves_for_another_one(at_once: bool) -> None:
    former, now = silent_model(), encoder()
    former.interface, now.version = EMBEDS, 2
    async with serve(former, max_instances=16) as server, server.connect() as client:
        body = json.dumps({"input": [f"text {number}" for number in range(40)]}).encode()
        client.send(HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        await until(lambda: len(former.futures) == 16)
        former.futures[0].set_result(result(b"[1,[7]]"))
        await until(lambda: len(former.futures) == 17)
        leaving = UnavailableError("this server is shutting down", retry_after_s=1)
        server.protocol.predict.models["fake"] = now  # type: ignore[index]  # a dict here
        if at_once:
            former._refusals = [leaving]
            former.futures[1].set_result(result(b"[1,[7]]"))
        else:
            former.futures[1].end(leaving)
        async with asyncio.timeout(10):
            answer = await client.read_answer()
        assert (answer.status, answer.headers["x-model-version"]) == (200, "2")
        places = [each["embedding"][0] for each in answer.json["data"]]
        assert [json.loads(now.bodies[place]) for place in places] == [
            f"text {number}" for number in range(40)
        ]
        assert all(future.done() for future in former.futures)
        assert server.protocol.predict.unfinished.held.total == 0
        former.futures.clear()


async def test_a_fault_of_ours_in_the_middle_ends_the_call_at_once() -> None:
    model = silent_model()
    model.interface = EMBEDS
    async with serve(model, max_instances=16) as server, server.connect() as client:
        body = json.dumps({"input": ["a"] * 40}).encode()
        client.send(HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        await until(lambda: len(model.futures) == 16)
        model._refusals = [RuntimeError("a bug")]  # type: ignore[list-item]  # none of ours
        model.futures[0].set_result(result(b"[1,[0]]"))
        async with asyncio.timeout(10):
            found = refused(await client.read_answer(), 500)
        assert found["code"] == "internal_error"
        await until(lambda: all(future.done() for future in model.futures))
        assert server.protocol.predict.unfinished.held.total == 0
        model.futures.clear()


PLAIN = st.text(st.characters(codec="utf-8"))
ITEMS = st.one_of(PLAIN, st.lists(st.integers(), max_size=3), st.integers(), st.none())
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e9, 1e9) | PLAIN,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(PLAIN, inner, max_size=2),
)


def instances_of(value: Any) -> list[object] | None:
    """The instances of an input; None if it is refused before a worker sees it."""
    is_number = isinstance(value, list) and bool(value) and type(value[0]) in (int, float)
    items = value if isinstance(value, list) and not is_number else [value]
    kinds = {type(each) for each in items}
    if kinds not in ({str}, {list}) or not all(items):
        return None
    return [each if isinstance(each, str) else {"ids": each} for each in items]


@given(value=VALUES | st.lists(ITEMS, max_size=6), spaced=st.booleans())
def test_any_input_is_read_as_it_is_or_refused(value: Any, spaced: bool) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=1 if spaced else None)
    raw = msgspec.json.decode(text.encode(), type=msgspec.Raw)
    expected = instances_of(value)
    if expected is None:
        with pytest.raises(ArgumentError, match=r"^input(\[\d\])?: ") as refusal:
            payloads_of(raw, is_batch=is_list(raw))
        assert refusal.value.param == "input"
    else:
        assert [
            json.loads(body_of(each)) for each in payloads_of(raw, is_batch=is_list(raw))
        ] == expected


def test_other_methods_are_refused_in_openai_s_form() -> None:
    for method in ("GET", "PUT", "DELETE"):
        answer = call(endpoint(encoder()), method, PATH)
        assert refused(answer, 405)["type"] == "invalid_request_error"
        assert answer.headers["allow"] == "POST"
