"""Calls of TorchServe's inference API. Statuses and bodies are those of TorchServe 0.12."""

from typing import Any

import httpx
import pytest

from inferpool.models.spec import UNKNOWN_INTERFACE
from inferpool.service.api.auth import Guard
from inferpool.service.api.codecs.body import Limits
from inferpool.service.api.exchange import Predict
from inferpool.service.errors import (
    DeadlineExceededError,
    InvalidInputError,
    ModelFailedError,
    OverloadedError,
    UnavailableError,
    WorkerCrashedError,
)
from inferpool.service.queue.instance import CanaryShare
from inferpool.service.queue.quarantine import InputContent
from inferpool.service.settings.draft import read_keys
from tests.service.api.fakes import FakeModel, call, result
from tests.service.parts.torchserve.fake_archives import (
    OPTIONAL,
    answer,
    archive,
    parameters_of,
    parts_of,
    served,
)

PNG = {"content-type": "image/png"}
PATH = "/predictions/fake"


def error(found: httpx.Response) -> tuple[int, str, str]:
    assert found.headers["content-type"] == "application/json"
    document = found.json()
    assert set(document) == {"code", "type", "message"}
    assert document["code"] == found.status_code
    assert found.headers["x-request-id"]
    return found.status_code, document["type"], document["message"]


@pytest.mark.parametrize("method", ["POST", "PUT"])
@pytest.mark.parametrize(
    "path", [PATH, f"{PATH}/", f"{PATH}/1.0", "/fake/predict", "/fake/1.0/predict"]
)
def test_a_body_reaches_the_handler_as_it_is(method: str, path: str) -> None:
    model = archive(reply=lambda _: answer(b'{\n  "a": 0.5\n}'))
    found = call(served(model), method, path, content=b"\x00\xff", headers=PNG)
    assert (found.status_code, found.content) == (200, b'{\n  "a": 0.5\n}')
    assert "content-type" not in found.headers
    assert found.headers["content-length"] == "14"
    assert "no-cache" in found.headers["cache-control"]
    assert parts_of(model) == [("body", b"\x00\xff", "bytes", "image/png")]
    assert parameters_of(model)["envelope"] is True


@pytest.mark.parametrize(
    ("given", "kind", "shown"),
    [
        (None, "bytes", ""),
        ("application/json", "json", "application/json"),
        ("application/json; charset=utf-8", "json", "application/json"),
        ("text/plain", "text", "text/plain"),
        ("text/csv;header=present", "text", "text/csv"),
        ("application/octet-stream", "bytes", "application/octet-stream"),
    ],
)
def test_the_content_type_decides_how_a_body_is_handed_over(
    given: str | None, kind: str, shown: str
) -> None:
    model = archive()
    headers = {} if given is None else {"content-type": given}
    assert call(served(model), "PUT", PATH, content=b"{no", headers=headers).status_code == 200
    assert parts_of(model) == [("body", b"{no", kind, shown)]


def test_an_empty_body_is_an_empty_part() -> None:
    model = archive()
    assert call(served(model), "GET", PATH).status_code == 200
    assert parts_of(model) == [("body", b"", "bytes", "")]


def test_the_fields_of_a_form_are_parts() -> None:
    model = archive()
    found = call(
        served(model),
        "POST",
        PATH,
        data={"text": "a b"},
        files={
            "data": ("x.jpg", b"\xff\xd8", "image/jpeg"),
            "meta": ("m.json", b"{}", "application/json; charset=utf-8"),
            "other": ("noname", b"z", ""),
        },
    )
    assert found.status_code == 200
    assert parts_of(model) == [
        ("text", b"a b", "bytes", ""),
        ("data", b"\xff\xd8", "bytes", "image/jpeg"),
        ("meta", b"{}", "json", "application/json"),
        ("other", b"z", "bytes", "application/octet-stream"),
    ]


def test_the_fields_of_an_encoded_form_are_parts() -> None:
    model = archive()
    headers = {"content-type": "application/x-www-form-urlencoded"}
    call(served(model), "POST", PATH, content=b"a=1+2%FF&b=&c", headers=headers)
    assert parts_of(model) == [
        ("a", b"1 2\xff", "bytes", ""),
        ("b", b"", "bytes", ""),
    ]


@pytest.mark.parametrize(
    ("path", "names"),
    [
        (f"{PATH}?k=v", ["body"]),
        ("/fake/predict?k=v&k=w", ["k", "k", "body"]),
        ("/models/fake/invoke?k=v", ["k", "body"]),
        ("/invocations?model_name=fake&k=v", ["model_name", "k", "body"]),
        ("/invocations?k=v", ["k", "body"]),
    ],
)
def test_fields_of_a_query_are_parts_but_below_predictions(path: str, names: list[str]) -> None:
    model = archive()
    assert call(served(model), "POST", path, content=b"x").status_code == 200
    found = parts_of(model)
    assert [name for name, *_ in found] == names
    assert found[-1] == ("body", b"x", "bytes", "")
    assert all(part == ("k", part[1], "bytes", "") for part in found if part[0] == "k")


def test_a_handler_is_told_the_headers_and_the_rest_of_the_path() -> None:
    model = archive()
    headers = {"x-mine": "1", "x-request-id": "a" * 32, "authorization": "Bearer x"}
    call(served(model), "POST", f"{PATH}/1.0/a/b", content=b"x", headers=headers)
    found = parameters_of(model)["headers"]
    assert (found["x-mine"], found["url_path"], found["explain"]) == ("1", "a/b", "False")
    assert found["authorization"] == "Bearer x"
    assert found["x-request-id"] == "a" * 32
    key = "k" * 20
    guarded = served(model, guard=Guard(predict=read_keys(key)))
    for name, value in (("authorization", f"Bearer {key}"), ("x-api-key", key)):
        assert call(guarded, "POST", PATH, headers={name: value}).status_code == 200
        assert name not in parameters_of(model)["headers"]


def test_the_quarantine_knows_an_input_whatever_its_headers_are() -> None:
    model = archive()
    for headers in ({"date": "1"}, {"date": "2", "x-request-id": "a" * 32}, PNG):
        call(served(model), "POST", PATH, content=b"x", headers=headers)
    one, same, other = (InputContent.of(ref, b"x").digest() for ref in model.refs)
    assert one == same != other


def test_a_handler_decides_status_headers_and_type() -> None:
    head = {
        "status": 418,
        "reason": "Teapot",
        "headers": [
            *(["X-A", "b"], ["Content-Length", "99"], ["X-Request-Id", "z"], ["Pragma", "x"]),
            ["X-Content-Type-Options", "x"],
        ],
        "content_type": "text/html",
    }
    found = call(served(archive(reply=lambda _: answer(b"<p>", **head))), "POST", PATH)
    assert (found.status_code, found.content) == (418, b"<p>")
    assert found.headers["content-type"] == "text/html"
    assert (found.headers["x-a"], found.headers["content-length"]) == ("b", "3")
    assert found.headers["x-request-id"] != "z"
    assert found.headers["pragma"] == "no-cache"
    assert "x-content-type-options" not in found.headers  # our server adds it to all answers
    assert found.headers["content-security-policy"] == "sandbox"


def test_an_answer_without_a_body_has_none() -> None:
    found = call(served(archive(reply=lambda _: answer(b"x", status=204))), "POST", PATH)
    assert (found.status_code, found.content) == (204, b"")
    assert "content-length" not in found.headers


def test_an_error_that_a_handler_chose_is_rendered() -> None:
    model = archive(reply=lambda _: answer(b"", status=507, error="Out of resources"))
    found = call(served(model), "POST", PATH)
    assert error(found) == (507, "InternalServerException", "Out of resources")


@pytest.mark.parametrize(
    "head",
    [
        {"status": 99},
        {"status": 600},
        {"headers": [["a b", "c"]]},
        {"headers": [["a", "b\r\nc: d"]]},
        {"headers": [["a", "\u00e9"]]},
        {"content_type": "a\nb"},
        {"headers": 3},
    ],
)
def test_what_cannot_be_sent_fails_the_call(head: Any) -> None:
    found = call(served(archive(reply=lambda _: answer(**head))), "POST", PATH)
    assert error(found) == (503, "InternalServerException", "Prediction failed")


@pytest.mark.parametrize(
    ("raised", "status", "kind", "message"),
    [
        (ModelFailedError("ZeroDivisionError"), 503, "InternalServerException", None),
        (InvalidInputError("bad"), 400, "BadRequestException", "bad"),
        (OverloadedError("full"), 503, "ServiceUnavailableException", "full"),
        (UnavailableError("none"), 503, "ServiceUnavailableException", "none"),
        (DeadlineExceededError("late"), 504, "InternalServerException", "late"),
        (WorkerCrashedError("died"), 500, "InternalServerException", "died"),
    ],
)
def test_errors_have_the_form_of_torchserve(
    raised: Any, status: int, kind: str, message: str | None
) -> None:
    found = call(served(archive(reply=lambda _: raised)), "POST", PATH, content=b"x")
    assert error(found) == (status, kind, message or "Prediction failed")
    assert found.content.startswith(b'{\n  "code": ')
    assert found.content.endswith(b"}\n")
    refused = call(served(archive(refusals=[raised])), "POST", PATH, content=b"x")
    assert error(refused) == error(found)


@pytest.mark.parametrize(
    ("path", "kind", "message"),
    [
        ("/predictions/no", "ModelNotFoundException", "Model not found: no"),
        ("/predictions/no/1.0", "ModelNotFoundException", "Model not found: no"),
        ("/no%20no/predict", "ModelNotFoundException", "Model not found: no no"),
        ("/models/no/invoke", "ModelNotFoundException", "Model not found: no"),
        ("/invocations?model_name=no", "ModelNotFoundException", "Model not found: no"),
        (
            "/predictions/fake/2.0",
            "ModelVersionNotFoundException",
            "Model version: 2.0 does not exist for model: fake",
        ),
        (
            "/predictions/fake/1",  # the number that it has here
            "ModelVersionNotFoundException",
            "Model version: 1 does not exist for model: fake",
        ),
        ("/predictions/*", "ModelNotFoundException", "Model not found: *"),
    ],
)
def test_a_model_that_is_not_there_is_not_found(path: str, kind: str, message: str) -> None:
    predict = served(archive(), default="fake")
    predict.models = {**predict.models, "fake/versions/1": archive()}
    assert error(call(predict, "POST", path)) == (404, kind, message)


@pytest.mark.parametrize(
    "path",
    [
        *("/admin/models/predict", "/v2/models/predict", "/v1/models/predict", "/tei/fake/predict"),
        *("/models/predict", "/models/a/b/invoke", "/jobs/predict", "/docs/predict", "/v2/predict"),
        *("/ping/predict", "/a/b/c/predict"),
    ],
)
def test_other_paths_stay_those_of_others(path: str) -> None:
    assert not served(archive("predict")).takes(path)


def test_a_model_may_be_called_as_the_ends_of_paths() -> None:
    predict = served(FakeModel(name="predict"))
    headers = {"content-type": "application/json"}
    for body in (b'{"instances":[1]}', b'{"instances":[1], "parameters": 3}'):
        mine = call(predict, "POST", "/predict/predict", content=body, headers=headers)
        usual = call(
            Predict(predict.models), "POST", "/predict/predict", content=body, headers=headers
        )
        assert mine.status_code == usual.status_code
        assert mine.headers["content-type"] == usual.headers["content-type"]


def test_a_version_is_asked_by_its_name_in_the_archive() -> None:
    old, new = archive(version="1.0"), archive(version="2.0", key="fake-2.0")
    predict = served(old, new)
    for path in (PATH, f"{PATH}/1.0", "/fake/1.0/predict", "/invocations", "/models/fake/invoke"):
        assert call(predict, "POST", path).status_code == 200, path
    assert (len(old.payloads), len(new.payloads)) == (5, 0)
    for path in (f"{PATH}/2.0", "/fake/2.0/predict", "/predictions/fake-2.0"):
        assert call(predict, "POST", path).status_code == 200, path
    assert (len(old.payloads), len(new.payloads)) == (5, 3)


def test_an_archive_answers_by_its_own_name_and_by_ours() -> None:
    model = archive("theirs", key="ours")
    for name in ("ours", "theirs"):
        assert call(served(model), "POST", f"/predictions/{name}/1.0").status_code == 200
        assert error(call(served(model), "POST", f"/predictions/{name}/2.0")) == (
            404,
            "ModelVersionNotFoundException",
            f"Model version: 2.0 does not exist for model: {name}",
        )


def test_our_header_may_ask_for_a_version_too() -> None:
    old, new = archive(), archive(version="2.0")
    predict = Predict({"fake": old, "fake/versions/2": new}, optional=OPTIONAL)
    assert call(predict, "POST", PATH, headers={"x-model-version": "2"}).status_code == 200
    assert (len(old.payloads), len(new.payloads)) == (0, 1)
    assert error(call(predict, "POST", PATH, headers={"x-model-version": "9"})) == (
        404,
        "ModelVersionNotFoundException",
        "Model version: 9 does not exist for model: fake",
    )


def test_calls_that_name_a_version_go_to_no_canary() -> None:
    old, new = archive(), archive(version="2.0")
    old.is_serving, new.version = False, 2
    old.canary = CanaryShare("fake/versions/2", 1.0)
    models = {"fake": old, "fake/versions/2": new, "fake/versions/1": old}
    predict = Predict(models, optional=OPTIONAL)
    for path in (f"{PATH}/1.0", "/fake/1.0/predict"):
        assert call(predict, "POST", path).status_code == 200
    assert (len(old.payloads), len(new.payloads)) == (2, 0)
    assert call(predict, "POST", PATH).status_code == 200
    assert call(predict, "POST", f"{PATH}/2.0").status_code == 200
    assert (len(old.payloads), len(new.payloads)) == (2, 2)


def test_invocations_must_name_one_of_several_models() -> None:
    one, other = archive("one"), archive("other")
    predict = served(one, other, default="one")
    found = call(predict, "POST", "/invocations", content=b"x")
    assert error(found) == (400, "BadRequestException", "Parameter model_name is required.")
    form = {"model_name": "other", "data": "x"}
    for sent in ({"data": form}, {"data": form, "files": {"f": b"y"}}):
        assert call(predict, "POST", "/invocations", **sent).status_code == 200
        assert parts_of(other)[:2] == [
            ("model_name", b"other", "bytes", ""),
            ("data", b"x", "bytes", ""),
        ]
    found = call(predict, "POST", "/invocations", data={"model_name": "no"})
    assert error(found) == (404, "ModelNotFoundException", "Model not found: no")
    found = call(predict, "POST", "/invocations", files={"model_name": b"n" * 100_000})
    assert error(found) == (404, "ModelNotFoundException", f"Model not found: {'n' * 256}")
    assert not one.payloads


def test_a_model_that_is_no_archive_answers_as_usual() -> None:
    model = FakeModel()
    body, headers = b'{"instances":[1,2]}', {"content-type": "application/json"}
    for path in (f"{PATH}/1", f"{PATH}/1.0", "/invocations?model_name=fake"):
        found = call(served(model), "POST", path, content=body, headers=headers)
        assert (found.status_code, list(found.json())) == (200, ["predictions"])
    found = call(served(FakeModel()), "PUT", PATH, content=b"\x89PNG\r\n\x1a\n")
    assert found.json() == {"predictions": [0]}
    refused = call(served(FakeModel()), "POST", PATH, content=b"x", headers={"content-type": "a/b"})
    assert error(refused)[:2] == (415, "BadRequestException")
    failed = FakeModel(lambda _: InvalidInputError("instance: no"))
    found = call(served(failed), "POST", PATH, content=body, headers=headers)
    assert error(found) == (400, "BadRequestException", "instances[0]: no")


def test_a_model_that_has_not_loaded_is_unavailable() -> None:
    found = call(served(FakeModel(interface=UNKNOWN_INTERFACE)), "POST", f"{PATH}/1.0")
    assert error(found)[:2] == (503, "ServiceUnavailableException")


@pytest.mark.parametrize("path", ["/predictions/My%20BERT", "/predictions/My%20BERT/1.0"])
def test_a_model_that_has_not_loaded_is_known_by_the_name_in_its_archive(path: str) -> None:
    predict = served(FakeModel(name="my-bert", interface=UNKNOWN_INTERFACE))
    assert error(call(predict, "POST", path))[0] == 503
    assert error(call(served(archive("my-bert")), "POST", path))[0] == 404


def test_a_models_own_path_goes_first() -> None:
    model = FakeModel(lambda _: result(b"1"))
    predict = Predict({"fake": model, "/shop/predict": model}, optional=OPTIONAL)
    headers = {"content-type": "application/json"}
    found = call(predict, "POST", "/shop/predict", content=b'{"instances":[1]}', headers=headers)
    assert found.json() == {"predictions": [1]}


def test_bodies_and_heads_are_bounded() -> None:
    limits = Limits(max_body_bytes=20_000)
    predict = served(archive(), limits=limits)
    many = {f"x-{i}": "1" for i in range(65)}
    assert error(call(predict, "POST", PATH, headers=many))[0] == 431
    long = {"x-a": "a" * 16_384}
    assert error(call(predict, "POST", PATH, headers=long))[0] == 431
    assert error(call(predict, "POST", PATH, content=b"x" * 20_001))[0] == 413
    form = {"content-type": "application/x-www-form-urlencoded"}
    for content in (b"&".join([b"a=1"] * 258), b"a" * 17_000 + b"=1"):
        assert error(call(predict, "POST", PATH, content=content, headers=form))[0] == 413
    roomy = served(archive(), limits=Limits(max_json_bytes=300_000))
    for content in (b"a=" + b"b" * 300_000, b"a=" + b"%41" * 65_537):
        found = call(roomy, "POST", PATH, content=content, headers=form)
        assert (found.status_code, "curl -F" in found.json()["message"]) == (413, True)
    query = "&".join(["a=1"] * 257)
    assert error(call(predict, "POST", f"/fake/predict?{query}"))[0] == 413
    many_parts = {str(index): b"1" for index in range(257)}
    assert error(call(predict, "POST", PATH, files=many_parts))[0] in (400, 413)
    broken = {"content-type": "multipart/form-data; boundary=b"}
    assert error(call(predict, "POST", PATH, content=b"x", headers=broken))[0] == 400
    coded = {"content-encoding": "gzip"}
    assert error(call(predict, "POST", PATH, content=b"x", headers=coded))[0] == 415
    found = call(predict, "HEAD", PATH)
    assert (found.status_code, found.content) == (405, b"")
    found = call(predict, "OPTIONS", PATH)
    assert error(found)[:2] == (405, "MethodNotAllowedException")
    assert found.headers["allow"] == "POST, PUT, GET, PATCH, DELETE"


def test_keys_are_those_of_predict() -> None:
    predict = served(archive(), guard=Guard(predict=read_keys("k" * 20)))
    refused = call(predict, "POST", PATH)
    assert error(refused)[:2] == (401, "InvalidKeyException")
    assert refused.headers["www-authenticate"]
    headers = {"authorization": "Bearer " + "k" * 20}
    assert call(predict, "POST", PATH, headers=headers).status_code == 200


def test_nothing_is_there_without_the_setting() -> None:
    predict = Predict({"fake": archive()})
    for path in (PATH, "/invocations", "/fake/predict", "/models/fake/invoke"):
        assert not predict.takes(path)
