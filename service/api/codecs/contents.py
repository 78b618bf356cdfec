"""Answers of models that return `Content`: which form a client gets, and how it is sent.

Imported once a model has such answers. `choose_with_content` is asked when the head of a call has
come, and knows the types that the model has; `encode_with_content` knows the content itself.
"""

import base64
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from inferpool.service.api.codecs.answers import (
    MEDIA_TYPES,
    AnswerFormat,
    Outcome,
    encode,
    qualities_in,
)
from inferpool.service.api.errors import Answer, Headers, problem
from inferpool.service.errors import NotAcceptableError
from inferpool.service.queue.instance import Result
from inferpool.workers.shared.messages import ContentBlob

_JSON = b"application/json"
_SANDBOX = (b"content-security-policy", b"sandbox")
_HARMLESS = ("audio/", "video/", "application/")
"""Beginnings of types that no browser shows as a page of this origin, but for XML."""
_RASTER_NAMES = (
    *("apng", "avif", "bmp", "gif", "heic", "heif", "jp2", "jpeg", "jxl", "png", "tiff", "webp"),
    *("x-icon", "vnd.microsoft.icon"),
)
_RASTER = frozenset(f"image/{each}" for each in _RASTER_NAMES)
"""Pictures that can hold no script."""


class _Qualities(NamedTuple):
    """How much a client likes the forms of an answer, by its `Accept` header."""

    ranges: dict[bytes, float]

    def of(self, media_type: bytes) -> float:
        """Return the quality of a type: that of the most exact range which it is in."""
        kind = media_type.partition(b"/")[0] + b"/*"
        return next(
            (self.ranges[each] for each in (media_type, kind, b"*/*") if each in self.ranges), 0.0
        )

    def prefer_content(self, types: Sequence[bytes]) -> bool:
        """Return whether content of one of some types is preferred over JSON.

        At the same quality JSON is preferred where it is named.
        """
        best, json = max(map(self.of, types), default=0.0), self.of(_JSON)
        return best > json or (best == json > 0.0 and _JSON not in self.ranges)


def choose_with_content(accept: bytes, media_types: Sequence[str] | None) -> AnswerFormat:
    """Return the form that an `Accept` header asks for of a model that returns content.

    "content" prefers content over JSON; "json" is also given content, if JSON is no better.

    Args:
        accept: The header.
        media_types: Types that the model has; None if they are not known yet.

    Raises:
        NotAcceptableError: It allows none of the forms that there are.
    """
    likes = _Qualities(qualities_in(accept))
    content = [each.encode() for each in media_types or ()]
    best_tensors = max(MEDIA_TYPES, key=lambda each: likes.of(each) * (each != _JSON))
    tensors = likes.of(best_tensors) if best_tensors != _JSON else 0.0
    rendered = max(map(likes.of, (_JSON, *content)))
    if tensors > rendered:
        return MEDIA_TYPES[best_tensors]
    json = likes.of(_JSON)
    if json and json == rendered:
        return "json"
    if rendered or media_types is None:
        return "content"
    raise _refusal(accept, [each.decode() for each in (*content, *MEDIA_TYPES)])


def check_several(accept: bytes) -> None:
    """Check that a call with several instances, which prefers content, allows JSON.

    Raises:
        NotAcceptableError: It does not.
    """
    if not _Qualities(qualities_in(accept)).of(_JSON):
        raise NotAcceptableError(
            f"Accept: {accept[:80].decode('latin-1')} does not allow application/json, in which "
            "several instances are answered: send one instance a call"
        )


def encode_with_content(
    outcomes: Sequence[Outcome],
    *,
    accept: bytes | None,
    is_batch: bool,
    envelope: bool,
    is_exposed: bool,
    request_id: str,
    path: str,
) -> Answer:
    """Render the outcomes of one call, some of which are content or must be.

    Args:
        outcomes: Those of its instances, in order.
        accept: Its `Accept` header.
        is_batch: Its instances came as a list.
        envelope: JSON stands in the list of `predictions`.
        is_exposed: A page of another origin may read the answer, and so its headers.
        request_id: For problems.
        path: For problems.
    """
    likes = _Qualities(qualities_in(accept or b"*/*"))
    (first, *others) = outcomes
    if not others and isinstance(first, Result) and isinstance(first.value, ContentBlob):
        blob = first.value
        bare = _bare(blob.media_type)
        if likes.prefer_content([bare.encode("latin-1")]):
            return _as_it_is(blob, bare, is_exposed=is_exposed)
        given = f"{bare}, application/json"
    else:
        given = "application/json"
    is_any = any(isinstance(each, Result) for each in outcomes)
    if is_any and accept is not None and not likes.of(_JSON):
        return problem(_refusal(accept, [given]), request_id, path)
    shown = [
        Result(json_of(each.value), each.timing)
        if isinstance(each, Result) and isinstance(each.value, ContentBlob)
        else each
        for each in outcomes
    ]
    return encode(
        "json",
        shown,
        is_batch=is_batch,
        envelope=envelope,
        output=None,
        request_id=request_id,
        path=path,
    )


def json_of(value: object) -> bytes:
    """Return an answer as JSON: content becomes an object with its base64."""
    if isinstance(value, bytes):
        return value
    assert isinstance(value, ContentBlob), "tensors came where JSON was asked for"
    media_type = msgspec.json.encode(value.media_type)
    return b'{"b64":"%b","media_type":%b}' % (base64.b64encode(value.buffer), media_type)


def is_raster(media_type: str) -> bool:
    """Return whether a media type is that of a picture that can hold no script."""
    return _bare(media_type) in _RASTER


def _as_it_is(blob: ContentBlob, bare: str, *, is_exposed: bool) -> Answer:
    data = bytes(blob.buffer)
    headers: Headers = [
        (b"content-type", blob.media_type.encode("latin-1")),
        (b"content-length", b"%d" % len(data)),
    ]
    if bare not in _RASTER and (not bare.startswith(_HARMLESS) or bare.endswith("xml")):
        headers.append(_SANDBOX)
    own = [(name.lower().encode(), value.encode("latin-1")) for name, value in blob.headers.items()]
    if own and is_exposed:
        headers.append((b"access-control-expose-headers", b", ".join(name for name, _ in own)))
    return 200, [*headers, *own], data


def _bare(media_type: str) -> str:
    return media_type.partition(";")[0].strip().lower()


def _refusal(accept: bytes, given: Sequence[str]) -> NotAcceptableError:
    return NotAcceptableError(
        f"Accept: {accept[:80].decode('latin-1')} allows none of {', '.join(given)}"
    )
