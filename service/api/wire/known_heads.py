"""Heads of calls that were seen before, so that the same bytes are not parsed and checked again.

A client sends the same head with every call of a connection, and a load balancer much the same.
What is remembered went through the parser and was checked; what it depends on (keys,
limits, models) does not change while the service runs. Used by the event loop alone.
"""

from typing import NamedTuple

from inferpool.service.api.call import Call

_START, _END = b"POST ", b"\r\n\r\n"
_MAX_HEAD_BYTES = 2048
_MAX_HEADS = 512
_OF_ONE_CALL = (b"x-request-id", b"traceparent", b"tracestate", b"expect", b"transfer-encoding")
"""A head with one of these will not come again, or needs more than to be known."""


class KnownHead(NamedTuple):
    """A head, as the call that it began, and how many bytes of body follow it."""

    head: bytes
    call: Call
    num_body_bytes: int


class KnownHeads:
    """A bounded number of them."""

    def __init__(self) -> None:
        self._heads: dict[bytes, KnownHead] = {}

    def find(self, data: bytes, last: KnownHead | None) -> tuple[KnownHead | None, int]:
        """Look for the head of a request.

        Args:
            data: What has arrived, beginning where a request begins.
            last: The head that this connection sent last, if it is known.

        Returns:
            The head, if it is known and nothing follows the body that may have come with it; and
            the length of the head, which is 3 where it has no end yet.
        """
        if last is not None and data.startswith(last.head):
            known: KnownHead | None = last
            length = len(last.head)
        else:
            length = data.find(_END, 0, _MAX_HEAD_BYTES) + len(_END)
            known = self._heads.get(data[:length])
        if known is None or len(data) > length + known.num_body_bytes:
            return None, length
        return known, length

    def remember(self, head: bytes, call: Call) -> None:
        """Keep the head of a call that was checked and not submitted, if it may come again."""
        num_body_bytes = call.headers.get(b"content-length")
        if num_body_bytes is None or not head.endswith(_END):
            return
        if not head.startswith(_START):
            return  # the parser skips empty lines before a request, and so may have seen another
        if any(name in call.headers for name in _OF_ONE_CALL):
            return
        if len(self._heads) >= _MAX_HEADS:
            self._heads.clear()
        call = call.__copy__()  # type: ignore[attr-defined]  # its stubs lack it
        self._heads[head] = KnownHead(head, call, int(num_body_bytes))
