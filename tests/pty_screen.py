"""Runs `inferpool` on a pseudo-terminal: reads the screen and presses keys."""

import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

_SEQUENCES = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]")
_HOME = b"\x1b[H"
_END = b"\x00"
"""Written after all that the program has written."""


class PtyScreen:
    """Screen on which `rich.live.Live` draws."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", fd: int, theirs: int, before: list[object]
    ) -> None:
        self.process = process
        self.before = before
        """Attributes of the terminal before the program started."""
        self.written = b""
        """All output, with its control sequences."""
        self._fd = fd
        self._theirs = theirs
        """The end that the program has."""

    @property
    def text(self) -> str:
        """The newest picture, as text."""
        picture = _SEQUENCES.sub(b"", self.written.rpartition(_HOME)[2])
        return picture.decode(errors="replace").replace("\r\n", "\n")

    def wait_for(self, text: str, timeout_s: float = 120.0) -> str:
        """Read until a picture has some text; return the picture."""
        end = time.monotonic() + timeout_s
        while text not in self.text:
            assert time.monotonic() < end, f"no {text!r} in {self.text}"
            assert self._read(0.05) or self.process.poll() is None, self.text
        return self.text

    def wait_for_next(self, pattern: str, timeout_s: float = 120.0) -> "re.Match[str]":
        """Read until the output has a pattern; then forget it and all before it."""
        end = time.monotonic() + timeout_s
        while not (match := re.search(pattern, self.text)):
            assert time.monotonic() < end, f"no {pattern!r} in {self.text}"
            assert self._read(0.05) or self.process.poll() is None, self.text
        self.written = self.text[match.end() :].encode()
        return match

    def press(self, keys: str) -> None:
        """Press keys."""
        os.write(self._fd, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        """Change the size of the terminal."""
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def leave(self, timeout_s: float = 120.0) -> int:
        """Read to the end; return the exit status."""
        end = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < end, f"it does not end: {self.text}"
            self._read(0.05)
        os.write(self._theirs, _END)  # the terminal passes on what was written a little later
        while not self.written.endswith(_END):
            assert time.monotonic() < end, f"the terminal keeps its output: {self.text}"
            self._read(0.05)
        self.written = self.written.removesuffix(_END)
        return self.process.returncode

    def attributes(self) -> list[object]:
        """Return the attributes of the terminal now."""
        return list(termios.tcgetattr(self._fd))

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._fd], [], [], timeout_s)[0]:
            return False
        with contextlib.suppress(OSError):  # the other end is closed
            if data := os.read(self._fd, 1 << 16):
                self.written += data
                return True
        return False


@contextlib.contextmanager
def on_terminal(
    *arguments: str,
    columns: int = 80,
    rows: int = 24,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Iterator[PtyScreen]:
    """Run `inferpool` with arguments on a terminal of that size."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environ = {**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8", **(env or {})}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environ.pop(name, None)
    before = termios.tcgetattr(ours)
    process = subprocess.Popen(
        [sys.executable, "-m", "inferpool", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environ,
        cwd=cwd,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    try:
        yield PtyScreen(process, ours, theirs, before)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
        os.close(theirs)
        os.close(ours)
