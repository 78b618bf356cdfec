import pytest

from inferpool.service.api.trace import new_ids, request_id_of, trace_of, trace_state_of

TRACE = b"4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = b"00f067aa0ba902b7"
FOUND = (TRACE.decode(), SPAN.decode(), "01")


def test_new_ids_are_hexadecimal_digits_and_differ() -> None:
    pairs = [new_ids() for _ in range(1000)]
    for position, num_digits in ((0, 32), (1, 16)):
        ids = {pair[position] for pair in pairs}
        assert len(ids) == 1000
        assert all(len(each) == num_digits and int(each, 16) >= 0 for each in ids)


@pytest.mark.parametrize(
    ("value", "is_kept"),
    [
        *((value, True) for value in (b"a", b"A-b_c.d:9", b"x" * 128)),
        *(
            (value, False)
            for value in (None, b"", b"x" * 129, b"a b", b"a\n", b"\xe4", b"a/b", b'"')
        ),
    ],
)
def test_a_request_id_is_kept_if_it_is_fit_for_logs(value: bytes | None, is_kept: bool) -> None:
    assert request_id_of(value) == ((value or b"").decode() if is_kept else "")


@pytest.mark.parametrize(
    ("version", "flags"),
    [(b"00", b"01"), (b"00", b"fd"), (b"01", b"01-more")],
    ids=["as it came", "unknown flags are cleared", "a later version's first four fields"],
)
def test_a_trace_is_continued(version: bytes, flags: bytes) -> None:
    assert trace_of(b"-".join([version, TRACE, SPAN, flags])) == FOUND


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"00-" + TRACE + b"-" + SPAN,
        b"ff-" + TRACE + b"-" + SPAN + b"-01",
        b"00-" + b"0" * 32 + b"-" + SPAN + b"-01",
        b"00-" + TRACE + b"-" + b"0" * 16 + b"-01",
        b"00-" + TRACE.upper() + b"-" + SPAN + b"-01",
        b"00-" + TRACE + b"-" + SPAN + b"-01-more",
        b"01-" + TRACE + b"-" + SPAN + b"-01more",
        b"00-" + TRACE[:-1] + b"--" + SPAN[:-1] + b"0-01",
        b"00-" + TRACE[:-1] + b"g-" + SPAN + b"-01",
    ],
)
def test_an_invalid_trace_is_ignored(value: bytes) -> None:
    assert trace_of(value) is None


def test_a_tracestate_that_is_too_long_is_dropped() -> None:
    assert trace_state_of({b"tracestate": b"a=1,b=2"}) == b"a=1,b=2"
    assert trace_state_of({b"tracestate": b",".join([b"a=1"] * 32)}) != b""
    assert trace_state_of({b"tracestate": b",".join([b"a=1"] * 33)}) == b""
    assert trace_state_of({b"tracestate": b"a=" + b"1" * 512}) != b""
    assert trace_state_of({b"tracestate": b"a=" + b"1" * 2000}) == b""
    assert trace_state_of({b"tracestate": b"a=\xe9"}) == b""
    assert trace_state_of({b"tracestate": b"a=\x1b[1m"}) == b""
