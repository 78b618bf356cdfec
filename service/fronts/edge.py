"""What `/metrics` shows of the bodies and answers that connections hold."""

from collections.abc import Iterator, Sequence

from service.api.budgets import EdgeUse
from service.metrics import Reading


def readings_of(uses: Sequence[EdgeUse]) -> Iterator[Reading]:
    """Add up what the connections of several processes hold."""
    for name, attribute in (
        ("unfinished_bytes", "unfinished_bytes"),
        ("max_unfinished_bytes", "max_unfinished_bytes"),
        ("unread_bytes", "unread_bytes"),
        ("max_unread_bytes", "max_unread_bytes"),
        ("unfinished_refused", "num_refused"),
        ("readers_cut", "num_cut"),
    ):
        yield Reading(name=name, value=sum(getattr(use, attribute) for use in uses))
