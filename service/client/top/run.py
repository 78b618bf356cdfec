"""Runs `inferpool top`: reads the feed, shows it, and connects again after a loss."""

import asyncio
import contextlib
import os
import sys
from argparse import Namespace
from collections.abc import AsyncGenerator

from rich.console import Console

from ..cli.access import context_of, key_of, url_of
from ..cli.flags import METRICS_KEY_VARIABLE
from ..usage import COMMAND, FlagError
from .feed import EventFeed, FeedError, LostError
from .screen import page_lines
from .state import StateSeen, View, as_json, read_state
from .terminal import LiveTerminal

NO_FEED = 1
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 5.0
_SIGNALLED = 128


def run(args: Namespace) -> int:
    """Show a service until the user quits; return the exit status."""
    url, key = url_of(args.url), key_of(args.key_file, os.environ, METRICS_KEY_VARIABLE)
    try:
        return asyncio.run(_run(EventFeed(url, key, context_of(args)), args))
    except (FeedError, FlagError) as error:
        sys.stderr.write(f"{COMMAND} top: {error}\n")
        return NO_FEED


async def _run(feed: EventFeed, args: Namespace) -> int:
    view = View(feed.place)
    events = feed.events()
    try:
        first = await anext(events, None)  # if this fails, the terminal stays as it is
        if first is None:
            raise LostError(f"{feed.place} ends its feed at once: it shuts down")
        view.take(_read(feed, first))
        if args.json:
            sys.stdout.write(as_json(first) + "\n")
            return 0
        no_color = args.no_color or None  # else the variable NO_COLOR decides
        console = Console(file=sys.stdout, highlight=False, no_color=no_color, markup=False)
        if args.once or not sys.stdout.isatty():
            lines = page_lines(view, console.width, is_plain=console.options.ascii_only)
            for line in lines:
                line.rstrip()
                console.print(line, soft_wrap=True)
            return 0
        return await _show(feed, events, LiveTerminal(console, view))
    finally:
        await events.aclose()
        await feed.close()


async def _show(
    feed: EventFeed, events: AsyncGenerator[bytes, None], terminal: LiveTerminal
) -> int:
    showing = asyncio.create_task(terminal.run(), name="show")
    reading = asyncio.create_task(_follow(feed, events, terminal), name="read the feed")
    await asyncio.wait((showing, reading), return_when=asyncio.FIRST_COMPLETED)
    terminal.leave()
    signum = await showing
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading  # raises the error that ended it
    return _SIGNALLED + signum if signum else 0


async def _follow(
    feed: EventFeed, events: AsyncGenerator[bytes, None], terminal: LiveTerminal
) -> None:
    """Show each event; connect again after each end of the stream."""
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            async with contextlib.aclosing(events):
                async for data in events:
                    terminal.view.take(_read(feed, data))
                    terminal.draw()
                    pause_s = _FIRST_PAUSE_S
            trouble = f"{feed.place} has ended it"
        except LostError as error:
            trouble = str(error)
        terminal.view.trouble = f"Feed lost, connecting again: {trouble}"
        terminal.draw()
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        events = feed.events()


def _read(feed: EventFeed, data: bytes) -> StateSeen:
    try:
        return read_state(data)
    except ValueError as error:
        raise FeedError(f"this version cannot read the feed of {feed.place} ({error})") from error
