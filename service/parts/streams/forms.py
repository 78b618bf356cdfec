"""The forms of a stream: server-sent events, JSON lines, or one JSON document at its end.

Events are those of the HTML standard (9.2). A part is JSON that is rendered already.
"""

from functools import lru_cache

from inferpool.service.api.codecs.answers import JSON_TYPE, AnswerFormat, negotiate

EVENTS_TYPE = b"text/event-stream"
LINES_TYPE = b"application/jsonl"
MEDIA_TYPES: dict[bytes, AnswerFormat] = {
    JSON_TYPE: "json",
    EVENTS_TYPE: "events",
    LINES_TYPE: "lines",
    b"application/x-ndjson": "lines",
    b"application/x-jsonlines": "lines",
}
"""In our order of preference."""
_TYPES = {"events": EVENTS_TYPE, "lines": LINES_TYPE}


@lru_cache(maxsize=256)
def choose_form(accept: bytes) -> AnswerFormat:
    """Return the form that an `Accept` header asks for, of a model that streams.

    Raises:
        NotAcceptableError: It allows none of them.
    """
    return negotiate(accept, MEDIA_TYPES)


def head_lines(form: AnswerFormat) -> bytes:
    """Return the header lines of a streamed answer in one of the forms."""
    return (
        b"content-type: %b\r\ncache-control: no-store, no-transform\r\n"
        b"x-accel-buffering: no\r\n" % _TYPES[form]  # else nginx holds parts back
    )


def part_of(form: AnswerFormat, index: int, part: bytes) -> bytes:
    """Render a part of the instance at a place."""
    if b"\n" in part or b"\r" in part:  # as white space, which is no part of the value
        part = part.replace(b"\n", b" ").replace(b"\r", b" ")
    if form == "lines":
        return b'{"instance":%d,"part":%b}\n' % (index, part)
    return b'event: part\ndata: {"instance":%d,"part":%b}\n\n' % (index, part)


def end_of(form: AnswerFormat, index: int, num_parts: int, timing: bytes) -> bytes:
    """Render the end of the instance at a place; JSON lines end without it."""
    if form == "lines":
        return b""
    return b'event: done\ndata: {"instance":%d,"num_parts":%d,"timing":%b}\n\n' % (
        index, num_parts, timing,
    )  # fmt: skip


def error_of(form: AnswerFormat, index: int, num_parts: int, problem: bytes) -> bytes:
    """Render the error that an instance ends with; `problem` is its document."""
    document = b'{"index":%d,"parts_sent":%d,%b' % (index, num_parts, problem[1:])
    if form == "lines":
        return b'{"instance":%d,"error":%b}\n' % (index, document)
    return b"event: error\ndata: %b\n\n" % document
