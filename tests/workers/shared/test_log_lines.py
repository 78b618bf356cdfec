"""Text that a model prints becomes lines of the log."""

import io
import logging
import subprocess
import sys

import pytest

from inferpool.workers.inside.own_process import _refuse_breakpoint
from inferpool.workers.shared.log_lines import PrintedLines
from inferpool.workers.shared.messages import LogLine


class Stdout(io.StringIO):
    name = "<stdout>"


def printed(*texts: str) -> list[str]:
    lines: list[LogLine] = []
    stream = PrintedLines(Stdout(), logging.INFO, lines.append)
    for text in texts:
        assert stream.write(text) == len(text)
        stream.flush()
    assert {(line.logger, line.level) for line in lines} <= {("stdout", logging.INFO)}
    return [line.text for line in lines]


@pytest.mark.parametrize(
    ("texts", "lines"),
    [
        (["one\ntwo\n"], ["one", "two"]),
        (["on", "e\n\n \nrest"], ["one"]),
        (["\r10%", "\r20%", "\r100%\n"], ["100%"]),
        (["windows\r\n"], ["windows"]),
        (["\udc80\n"], ["\\udc80"]),
        (["x" * 20_000], ["x" * 8192] * 2),
        (["x" * 10_000 + "\n"], ["x" * 8192, "x" * 1808]),
    ],
)
def test_printed_text_is_sent_line_by_line(texts: list[str], lines: list[str]):
    assert printed(*texts) == lines


def test_line_that_cannot_be_sent_is_printed_after_all():
    def gone(_: LogLine) -> None:
        raise BrokenPipeError

    original = Stdout()
    PrintedLines(original, logging.INFO, gone).write("last words\n")
    assert original.getvalue() == "last words\n"


def test_processes_of_the_models_can_be_given_the_stream():
    stream = PrintedLines(sys.__stdout__, logging.INFO, lambda line: None)
    assert not stream.isatty()
    assert stream.name == "<stdout>"
    stream.reconfigure(line_buffering=True)
    stream.buffer.write(b"")
    subprocess.run(["true"], stdout=stream.fileno(), check=True)


@pytest.mark.slow
def test_process_that_a_model_forks_writes_to_the_stream_and_sends_nothing():
    code = (
        "import logging, os, signal, sys\n"
        "from inferpool.workers.inside import own_process\n"
        "from inferpool.workers.host.local_worker import PrivateQueue\n"
        "from inferpool.workers.shared.worker_queue import WorkerQueue\n"
        "own_process._guard = lambda heartbeat: None\n"
        "queue = PrivateQueue()\n"
        "reader = os.dup(queue.reader.fileno())\n"
        "outbox = WorkerQueue(queue.reader, queue.writer)\n"
        "own_process.set_up(None, outbox)\n"
        "with outbox._put_lock, sys.stdout._writing, sys.stderr._writing:\n"  # other threads do so
        "    if (pid := os.fork()) == 0:\n"
        "        signal.alarm(60)\n"
        "        print('printed')\n"
        "        print('held back', end='')\n"
        "        sys.stdout.flush()\n"
        "        logging.getLogger('model').warning('logged %d', 1)\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(pid, 0)[1] == 0\n"
        "print('sent')\n"
        "assert b'sent' in (data := os.read(reader, 1 << 16)) and len(data) < 100, data\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "printed\nheld back", "logged 1\n")


def test_breakpoint_in_a_worker_says_where_it_works():
    with pytest.raises(RuntimeError, match="inferpool serve MODEL --debug"):
        _refuse_breakpoint()
