import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferpool.service.api.codecs.parameters import (
    MAX_DEPTH,
    from_query,
    is_too_deep,
    literal,
    merge,
    read_query,
)
from inferpool.service.errors import BadRequestError, InvalidInputError, ServiceError, TooLargeError

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


def test_json_literals_in_the_query_are_taken_as_such_and_the_rest_as_strings() -> None:
    given = from_query(b"top_k=3&flag=true&word=cat&list=[1,2]&nan=NaN&big=1e999&shape=1&output=y")
    assert {key: json.loads(value) for key, value in given.items()} == {
        "top_k": 3,
        "flag": True,
        "word": "cat",
        "list": [1, 2],
        "nan": "NaN",
        "big": "1e999",
    }


def test_a_key_given_twice_and_too_many_fields_are_refused() -> None:
    with pytest.raises(BadRequestError, match="'top_k' more than once"):
        read_query(b"a=1&top_k=1&top_k=2")
    with pytest.raises(BadRequestError, match="64 fields"):
        read_query(b"&".join(b"k%d=1" % index for index in range(65)))


def test_parameters_of_the_body_go_before_those_of_the_query() -> None:
    merged = merge({"a": b"1", "b": b"2"}, b'{"b": 3, "c": [1]}')
    assert json.loads(merged) == {"a": 1, "b": 3, "c": [1]}
    assert merge({}, b'{"b":  3}') == b'{"b":  3}'
    assert merge({}, b"null") == b""
    assert json.loads(merge({"a": b"1"}, b"null")) == {"a": 1}


@pytest.mark.parametrize(
    ("query", "text", "error", "message"),
    [
        *(({}, text, InvalidInputError, "must be an object") for text in (b"[1]", b"3", b'"x"')),
        *(
            ({}, text, BadRequestError, "parameters: ")
            for text in (b"{", b'{"a":NaN}', b'{"a":1e999}', b'{"a":"\xff"}')
        ),
        ({}, b'{"a":"%s"}' % (b"x" * 16384), TooLargeError, "parameters: more than 16384 bytes"),
        ({"a": b'"%s"' % (b"x" * 16384)}, b"", TooLargeError, "16384"),
    ],
)
def test_parameters_that_are_no_object_or_too_long_are_refused(
    query: dict[str, bytes], text: bytes, error: type[ServiceError], message: str
) -> None:
    with pytest.raises(error, match=message):
        merge(query, text)


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_depth_is_counted_exactly(opening: bytes) -> None:
    closing = b"]" if opening == b"[" else b"}"
    fits = opening * MAX_DEPTH + b"1" + closing * MAX_DEPTH
    assert not is_too_deep(fits)
    assert is_too_deep(opening + fits + closing)
    assert not is_too_deep(b"[" + b",".join([b"[1]"] * 1000) + b"]")
    flat = b"[" + b",".join([b"[]"] * 100_000) + b"]"
    assert not is_too_deep(b"[" * 98 + flat + b"]" * 98)
    assert is_too_deep(b"[" * 99 + flat + b"]" * 99)


@given(json_values)
def test_brackets_in_strings_have_no_depth(value: object) -> None:
    nested = json.dumps([value, "[{" * 200, '\\"' * 50 + "[" * 200, {"[[\\" * 60: "\\"}])
    assert not is_too_deep(nested.encode())
    assert is_too_deep(b"[" * 101 + nested.encode() + b"]" * 101)


@given(st.text())
def test_a_literal_is_always_json(text: str) -> None:
    json.loads(literal(text))


@given(st.binary(max_size=200))
def test_any_query_makes_an_object_or_a_service_error(query: bytes) -> None:
    try:
        merged = merge(from_query(query))
    except BadRequestError:
        return
    assert merged == b"" or isinstance(json.loads(merged), dict)
