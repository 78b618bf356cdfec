import time

import pytest

from inferpool.models.texts import described, text_of, traceback_of

LONG = "x" * 50_000_000


class NoTextError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text today")


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def with_note(error: BaseException) -> BaseException:
    error.add_note(LONG)
    return error


@pytest.mark.parametrize(
    ("error", "start"),
    [
        (ValueError(LONG), "ValueError: xxx"),
        (ValueError(LONG.encode()), "ValueError: b'xxx"),
        (KeyError(LONG), "KeyError: xxx"),
        (OSError(5, LONG[:1000]), "OSError: [Errno 5] xxx"),
        (ValueError("\ud800"), r"ValueError: \ud800"),
        (NoTextError(), "NoTextError: (its text cannot be read: RuntimeError)"),
        (with_note(ValueError("short")), "ValueError: short"),
        (raised(ValueError("short"), KeyError(LONG)), "ValueError: short"),
        (ExceptionGroup("some", [ValueError(LONG)]), "ExceptionGroup: some"),
        (type("N" * 1000, (Exception,), {})("y"), "N" * 100 + ": y"),
    ],
)
def test_texts_are_cut_before_they_are_formatted(error: BaseException, start: str):
    began = time.process_time()
    text, trace = described(error), traceback_of(error)
    assert time.process_time() - began < 0.5
    assert text.startswith(start)
    assert len(text) <= 500
    assert len(trace) <= 20_000
    text.encode()
    trace.encode()
    assert "xxx" not in trace or len(trace) < 2_000


def test_a_short_error_is_printed_as_python_prints_it():
    trace = traceback_of(raised(ValueError("two"), KeyError("one")))
    assert trace.startswith("KeyError: 'one'")
    assert "direct cause" in trace
    assert "in raised\n    raise error from cause" in trace
    assert trace.endswith("ValueError: two")
    assert text_of(ValueError("two"), 2) == "tw"
