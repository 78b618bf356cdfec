"""The user's terminal: draws the screen and reads keys."""

import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from functools import partial

from rich.console import Console, Group
from rich.live import Live

from .screen import ScreenSize, screen_lines
from .state import View

_MAX_READ = 1024
_NEXT = (b"j", b"\t", b"\x1b[C", b"\x1b[B", b"\x1bOC", b"\x1bOB")
_PREVIOUS = (b"k", b"\x1b[Z", b"\x1b[D", b"\x1b[A", b"\x1bOD", b"\x1bOA")


class LiveTerminal:
    """Shows a view until the user quits. Used in the event loop."""

    def __init__(self, console: Console, view: View) -> None:
        self.view = view
        self._console = console
        self._changed = asyncio.Event()
        self._is_over = False
        self._signum = 0
        self._live = Live(
            console=console, screen=True, auto_refresh=False, vertical_overflow="crop"
        )
        self._on_key: dict[bytes, Callable[[], object]] = {
            b"q": self.leave,
            b"Q": self.leave,
            b"p": view.pause,
            b" ": view.pause,
            b"?": view.toggle_help,
            b"h": view.toggle_help,
            **dict.fromkeys(_NEXT, partial(view.step, 1)),
            **dict.fromkeys(_PREVIOUS, partial(view.step, -1)),
        }

    async def run(self) -> int:
        """Draw changes until the user quits; return the signal that ended it, or 0."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGWINCH, self.draw)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(signum, self._end, signum)
        with _keys(self._pressed), self._live:
            while not self._is_over:
                self._changed.clear()
                self._live.update(self._picture(), refresh=True)
                await self._changed.wait()
        return self._signum

    def leave(self) -> None:
        """End `run`."""
        self._is_over = True
        self._changed.set()

    def draw(self) -> None:
        """Draw the view again."""
        self._changed.set()

    def _picture(self) -> Group:
        options = self._console.options
        width, height = self._console.size
        on = ScreenSize(width=width, height=height, is_plain=options.ascii_only)
        return Group(*screen_lines(self.view, on))

    def _pressed(self, keys: bytes) -> None:
        for key in _split(keys):
            if key in self._on_key:
                self._on_key[key]()
            elif key.isdigit():
                self.view.choose(int(key) - 1)
        self.draw()

    def _end(self, signum: int) -> None:
        self._signum = signum
        self.leave()


@contextlib.contextmanager
def _keys(pressed: Callable[[bytes], None]) -> Iterator[None]:
    """Report keys as they are pressed, without echo, if stdin is a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    loop = asyncio.get_running_loop()
    stdin = sys.stdin.fileno()

    def read() -> None:
        try:
            keys = os.read(stdin, _MAX_READ)
        except OSError:
            keys = b""
        if not keys:  # the terminal is gone
            loop.remove_reader(stdin)
            keys = b"q"
        pressed(keys)

    before = termios.tcgetattr(stdin)
    tty.setcbreak(stdin)
    loop.add_reader(stdin, read)
    try:
        yield
    finally:
        loop.remove_reader(stdin)
        with contextlib.suppress(termios.error):
            termios.tcsetattr(stdin, termios.TCSADRAIN, before)


def _split(keys: bytes) -> Iterator[bytes]:
    """Yield each key; an arrow key is three bytes."""
    at = 0
    while at < len(keys):
        length = 3 if keys[at : at + 2] in (b"\x1b[", b"\x1bO") else 1
        yield keys[at : at + length]
        at += length
