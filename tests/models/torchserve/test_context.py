"""The context that handlers get."""

import json

import pytest

from inferpool.models.torchserve.context import HandlerContext
from inferpool.models.torchserve.requests import HandlerRequest
from tests.models.items import bytes_item


def context_of(*headers: dict[str, str]) -> HandlerContext:
    context = HandlerContext("fruit", "/models/fruit", {}, 1, None)
    requests = []
    for each in headers:
        item = bytes_item(b"kiwi")
        item.parameters = {"parts": [["data", 0, 4, "bytes", "image/png"]], "headers": each}
        requests.append(HandlerRequest(item))
    context.begin(requests)
    return context


def test_headers_are_found_with_any_capitals():
    context = context_of({"content-type": "text/csv", "X-User": "ann"}, {})

    assert context.get_request_header(0, "Content-Type") == "text/csv"
    assert context.get_request_header(0, "x-user") == "ann"
    assert context.get_request_header(1, "x-user") is None
    every = context.get_all_request_header(0)
    assert every["X-USER"] == "ann"
    assert "x-USER" in every
    assert "x-other" not in every
    assert json.dumps(every) == (
        '{"data": {"content-type": "image/png"}, "content-type": "text/csv", "X-User": "ann"}'
    )
    with pytest.raises(KeyError, match="X-Other"):
        every["X-Other"]


def test_each_request_has_an_id_its_own_if_it_came_with_one():
    context = context_of({"x-request-id": "r-1"}, {}, {})

    assert context.get_request_id(0) == "r-1"
    assert context.request_ids is not None
    assert len({*context.request_ids.values()}) == 3
    assert context.metrics.request_ids is context.request_ids


def test_what_is_set_counts_for_one_answer_of_one_batch():
    context = context_of({}, {})
    context.set_response_status(404, "No such fruit", 1)
    context.set_response_content_type(1, "text/csv; charset=utf-8")
    context.set_response_header(1, "X-Ripe", 5)  # type: ignore[arg-type]  # handlers do such things

    first, second = context.answer(0, "a"), context.answer(1, "b")

    assert (first.status, first.reason, first.content_type, first.headers) == (200, None, None, {})
    assert (second.status, second.reason) == (404, "No such fruit")
    assert (second.content_type, second.headers) == ("text/csv; charset=utf-8", {"X-Ripe": "5"})
    assert context.get_response_status(1) == (404, "No such fruit")
    context.begin([HandlerRequest(bytes_item(b""))])
    assert context.answer(0, "c").status == 200
    context.set_all_response_status(503)
    assert context.answer(0, "c").status == 503


def test_what_http_cannot_say_is_not_set(caplog):
    context = context_of({})

    for code in (99, 100, 600):
        with pytest.raises(ValueError, match="must be from 200 to 599"):
            context.set_response_status(code)
    context.set_response_status(200, "OK\r\nX-Evil: 1")
    context.set_response_content_type(0, "text/plain\r\nX-Evil: 1")
    context.set_response_header(0, "X Evil", "1")
    context.set_response_header(0, "Content-Length", "1")
    for number in range(40):
        context.set_response_header(0, f"X-{number}", "1")

    answer = context.answer(0, "a")
    assert (answer.reason, answer.content_type) == (None, None)
    assert [*answer.headers] == [f"X-{number}" for number in range(16)]
    assert "'Content-Length'" in caplog.text
