import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def outputs(code: str, exit_code: int = 0) -> tuple[str, str]:
    code = (
        "import os, signal, inferpool.service.telemetry.logs;"
        f"from inferpool.service.telemetry import raw_output\n{code}"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == exit_code, done.stderr
    return done.stdout, done.stderr


def logged(before: str, after: str = "") -> list[dict[str, str]]:
    """Return the log of a process that writes before there is one, and afterwards."""
    stdout, stderr = outputs(
        f"""
raw = raw_output.RawOutput.take()
{before}
logs = inferpool.service.telemetry.logs.configure("json", stream=raw.stderr)
raw.start()
{after}
raw.close()
logs.close()
"""
    )
    assert stdout == ""
    return [json.loads(line) for line in stderr.splitlines()]


def test_output_from_before_the_log_is_passed_on():
    code = "raw = raw_output.RawOutput.take(); print('a'); os.write(2, b'b'); raw.close()"
    assert outputs(f"{code}; raw.close(); print('c')") == ("a\nc\n", "b")


def test_a_line_of_any_length_and_the_last_without_an_end_are_logged():
    both = 'os.system("echo from another process; printf the-end >&2")'
    *pieces, rest, last = logged('os.write(1, b"x" * 20_000)', both)
    assert [each["message"] for each in pieces] == ["x" * 8192] * 2
    assert rest["message"] == "x" * (20_000 - 2 * 8192) + "from another process"
    assert (last["logger"], last["message"]) == ("stderr", "the-end")


def test_a_long_line_that_comes_at_once_is_divided_as_well():
    pieces = logged('os.write(1, b"x" * 20_000 + b"\\n")')
    assert [len(each["message"]) for each in pieces] == [8192, 8192, 20_000 - 2 * 8192]


FLOOD = """
for _ in range(3000):
    os.write(2, b"x" * 999 + b"\\n")
"""
"""Writes 3 MB before there is a log, of which 1 MiB is held."""


def test_output_from_before_the_log_blocks_nobody_and_what_does_not_fit_is_counted():
    messages = [each["message"] for each in logged(FLOOD, 'os.write(2, b"later\\n")')]
    *held, loss, later = messages
    assert set(held[:-1]) == {"x" * 999}
    assert len("\n".join(held)) == 1 << 20
    assert (
        loss == f"{3_000_000 - (1 << 20)} bytes more were dropped: they came before there was a log"
    )
    assert later == "later"


def test_output_without_a_log_is_passed_on_as_far_as_it_fits_and_is_read():
    flood = f"raw = raw_output.RawOutput.take()\n{FLOOD}"
    _, stderr = outputs(f"{flood}\nraw.close(pass_on_s=60)")
    *held, loss = stderr.splitlines()
    assert len("\n".join(held)) == 1 << 20
    assert "bytes more were dropped" in loss
    code = (
        "import os\nfrom inferpool.service.telemetry import raw_output\n"
        f"{flood}\nraw.close()\nos._exit(7)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE) as unread:
        assert unread.wait(300) == 7


@pytest.mark.parametrize("begin", ["", "raw.start()"])
def test_it_is_closed_though_another_process_writes_without_end(begin: str):
    code = f"""
import logging, subprocess
raw = raw_output.RawOutput.take()
numbers = []
class Counting(logging.Handler):
    def emit(self, record):
        numbers[-1:] = [numbers[-1] + 1] if numbers else []
logging.getLogger().addHandler(Counting())
{begin}
endless = subprocess.Popen(["yes"], stderr=2, stdout=2)
numbers.append(0)
raw.close()
endless.kill()
print(numbers[0])
"""
    num_lines = int(outputs(code)[0])
    assert num_lines <= 3 * (1 << 20) // len("y\n")  # a pipe of each stream, and some


def test_the_traceback_of_a_crash_goes_to_the_original_stderr():
    code = "raw = raw_output.RawOutput.take(); raw.start(); os.kill(os.getpid(), signal.SIGSEGV)"
    _, stderr = outputs(code, -signal.SIGSEGV)
    assert "Fatal Python error: Segmentation fault" in stderr
