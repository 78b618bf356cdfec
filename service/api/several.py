"""Submits several instances of one call. Runs in the event loop.

A protocol may read more of them than `max_instances_per_request`, or need the answers of all. Then
what finds no room waits outside of the queue: each is submitted once one before it is done, so that
one call never fills the queue.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING

from inferpool.models.attached import attached
from inferpool.service.api.codecs.body import Payload
from inferpool.service.api.errors import INTERNAL_MESSAGE
from inferpool.service.api.exchange import Exchange, ModelEntry, give_up, new_steps, put_into
from inferpool.service.errors import InternalError, OverloadedError, ServiceError, UnavailableError

if TYPE_CHECKING:
    from inferpool.service.queue.instance import Result

logger = logging.getLogger(__name__)

_FEW = 8
"""After some were refused, one more is in flight with each that is done while there are fewer, and
then with each eighth: a try without room counts as a rejected instance."""


def submit_several(exchange: Exchange, entry: ModelEntry, payloads: Sequence[Payload]) -> None:
    """Submit instances; one that is refused becomes an error in its place."""
    call, at_once = exchange.call, exchange.predict.limits.max_instances
    if call.chosen == "content":
        attached("content of several")(call.headers[b"accept"])
    call.num_instances = len(payloads)
    if call.protocol is not None and call.protocol.submits_in_turn:
        exchange.count()  # its body is kept meanwhile
        if exchange.slot is not None:  # the payloads are of a copy, in the loop's memory
            exchange.slot.close()
            exchange.slot = None
        if not exchange.response_complete:
            _Rest(exchange, entry, payloads, at_once).submit(at_once)
        return
    for payload in payloads:
        try:
            call.outcomes.append(_submit(exchange, entry, payload))
        except ServiceError as error:
            call.outcomes.append(error)
    exchange.let_go()
    done = _all_done([each for each in call.outcomes if not isinstance(each, ServiceError)])
    done.add_done_callback(exchange.on_done)


class _Rest:
    """The instances of a call that have not been submitted, or were refused for want of room.

    If one fails, those that wait are not tried, and have its error. If the version leaves for
    another one, that gets all of them: an answer is of one version.
    """

    def __init__(
        self, exchange: Exchange, entry: ModelEntry, payloads: Sequence[Payload], at_once: int
    ) -> None:
        self._exchange = exchange
        self._entry = entry
        self._at_once = at_once
        self._payloads = payloads
        self._waiting = deque(enumerate(payloads))
        self._num_in_flight = 0
        self._num_done = 0
        self._is_over = False

    def submit(self, most: int) -> None:
        """Submit as many as `most`, as long as there is room for them."""
        outcomes = self._exchange.call.outcomes
        while self._waiting and most:
            index, payload = self._waiting[0]
            try:
                future = _submit(self._exchange, self._entry, payload)
            except OverloadedError as error:
                if not self._num_in_flight:
                    self._end(error)
                break  # one that is in flight makes room
            except ServiceError as error:
                self._end(error)
                break
            self._waiting.popleft()
            outcomes[index : index + 1] = [future]
            self._num_in_flight += 1
            future.add_done_callback(partial(self._on_one_done, index, payload))
            most -= 1
        if not self._waiting and not self._num_in_flight and not self._is_over:
            self._exchange.let_go()
            self._exchange.on_done(None)

    def _on_one_done(self, index: int, payload: Payload, future: "asyncio.Future[Result]") -> None:
        self._num_in_flight -= 1
        if self._exchange.response_complete or self._is_over:
            self._waiting.clear()
            return
        error = None if future.cancelled() else future.exception()
        if isinstance(error, OverloadedError) and self._num_in_flight:
            # A front end learns so late that there was no room; the next one that is done makes it.
            self._waiting.appendleft((index, payload))
            return
        self._num_done += 1
        is_more = self._num_in_flight < _FEW or not self._num_done % _FEW
        try:
            if isinstance(error, ServiceError):
                self._end(error)
            self.submit(min(1 + is_more, self._at_once - self._num_in_flight))
        except Exception:
            logger.exception("a call failed", extra=self._exchange.call.log_ids())
            self._exchange.fail(InternalError(INTERNAL_MESSAGE))

    def _end(self, error: ServiceError) -> None:
        """Give those that wait an error, or begin the call anew if another version serves now."""
        exchange, call = self._exchange, self._exchange.call
        now = exchange.predict.find_now(call) if isinstance(error, UnavailableError) else None
        if now is not None and now is not self._entry:
            self._is_over = True
            self._waiting.clear()
            give_up(call.outcomes)
            call.outcomes.clear()
            call.choose(now)
            _Rest(exchange, now, self._payloads, self._at_once).submit(self._at_once)
        for index, _ in self._waiting:
            call.outcomes[index : index + 1] = [error]
        self._waiting.clear()


def _submit(exchange: Exchange, entry: ModelEntry, payload: Payload) -> "asyncio.Future[Result]":
    ref, steps = copy(exchange.call.ref), new_steps(exchange.call)
    try:
        return entry.submit(ref, put_into(ref, payload), steps)
    except ServiceError as error:
        if steps is not None:
            steps.code, steps.message = error.code, error.message
        raise


def _all_done(futures: Sequence["asyncio.Future[Result]"]) -> "asyncio.Future[None]":
    """Return a future that is done with the last of several; it keeps no results."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    left = len(futures)
    if not left:
        done.set_result(None)

    def count_down(_: object) -> None:
        nonlocal left
        left -= 1
        if not left and not done.done():
            done.set_result(None)

    for future in futures:
        future.add_done_callback(count_down)
    return done
