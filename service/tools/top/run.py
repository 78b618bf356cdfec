"""What `inferpool top` does: listen, show, and connect again whenever the service is gone."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator

from inferpool.service.tools.top.feed import EventFeed, FeedError, LostError
from inferpool.service.tools.top.plan import TopPlan
from inferpool.service.tools.top.screen import page_lines
from inferpool.service.tools.top.state import StateSeen, as_json, read_state
from inferpool.service.tools.top.terminal import Terminal, console_of, print_lines
from inferpool.service.tools.top.view import View

NO_FEED = 1
"""The exit status where there is nothing to show."""
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 5.0
_SIGNALLED = 128
"""What shells add to the number of a signal."""


def run(plan: TopPlan) -> int:
    """Show the service until the person leaves; returns the exit status."""
    try:
        if plan.is_json or plan.is_once or not sys.stdout.isatty():
            asyncio.run(_show_once(plan))
            return 0
        return asyncio.run(_show(plan))
    except FeedError as error:
        sys.stderr.write(f"inferpool top: {error}\n")
        return NO_FEED


async def _show_once(plan: TopPlan) -> None:
    feed = EventFeed(plan)
    try:
        async with contextlib.aclosing(feed.events()) as events:
            _print(plan, await _first(plan, events))
    finally:
        await feed.close()


def _print(plan: TopPlan, data: bytes) -> None:
    view = View(plan.place)
    view.take(_read(plan, data))
    if plan.is_json:
        sys.stdout.write(as_json(data) + "\n")
        return
    console = console_of(is_colored=plan.is_colored)
    lines = page_lines(view, console.width, is_plain=console.options.ascii_only)
    print_lines(console, lines)


async def _show(plan: TopPlan) -> int:
    feed = EventFeed(plan)
    view = View(plan.place)
    terminal = Terminal(console_of(is_colored=plan.is_colored), view)
    events = feed.events()
    try:
        view.take(_read(plan, await _first(plan, events)))  # what is wrong now needs no screen
        showing = asyncio.create_task(terminal.run(), name="show")
        listening = asyncio.create_task(_listen(plan, feed, events, terminal), name="listen")
        await asyncio.wait((showing, listening), return_when=asyncio.FIRST_COMPLETED)
        terminal.leave()
        signum = await showing
        if not listening.cancel():
            await listening  # for what ended it
        return _SIGNALLED + signum if signum else 0
    finally:
        await feed.close()


async def _listen(
    plan: TopPlan, feed: EventFeed, events: AsyncGenerator[bytes, None], terminal: Terminal
) -> None:
    """Follow the events, of one connection after another.

    Raises:
        FeedError: There will be none any more.
    """
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            async with contextlib.aclosing(events):
                async for data in events:
                    terminal.view.take(_read(plan, data))
                    terminal.draw()
                    pause_s = _FIRST_PAUSE_S
            trouble = f"{plan.place} has ended it"
        except LostError as error:
            trouble = str(error)
        terminal.view.trouble = f"Feed lost, connecting again: {trouble}"
        terminal.draw()
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        events = feed.events()


async def _first(plan: TopPlan, events: AsyncGenerator[bytes, None]) -> bytes:
    """The first event.

    Raises:
        LostError: There is none.
    """
    async for data in events:
        return data
    raise LostError(f"{plan.place} ends its feed at once: it shuts down")


def _read(plan: TopPlan, data: bytes) -> StateSeen:
    try:
        return read_state(data)
    except ValueError as error:
        raise FeedError(
            f"what {plan.place} tells is not what this version understands ({error})"
        ) from error
