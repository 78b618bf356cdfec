import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def outputs(code: str, exit_code: int = 0) -> tuple[str, str]:
    code = (
        "import os, signal, inferpool.service.telemetry.logs;"
        f"from inferpool.service.telemetry import raw_output\n{code}"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == exit_code, done.stderr
    return done.stdout, done.stderr


def test_output_from_before_the_log_is_passed_on():
    code = "raw = raw_output.RawOutput.take(); print('a'); os.write(2, b'b'); raw.close()"
    assert outputs(f"{code}; raw.close(); print('c')") == ("a\nc\n", "b")


def test_a_line_of_any_length_and_the_last_without_an_end_are_logged():
    stdout, stderr = outputs(
        """
raw = raw_output.RawOutput.take()
logs = inferpool.service.telemetry.logs.configure("json", stream=raw.stderr)
os.write(1, b"x" * 20_000)
raw.start()
os.system("echo from another process; printf the-end >&2")
raw.close()
logs.close()
"""
    )
    assert stdout == ""
    lines = stderr.splitlines()
    assert [line.count("x" * 100) > 0 for line in lines] == [True, True, True, False]
    assert '"logger": "stderr", "message": "the-end"' in lines[3]
    assert lines[2].endswith('from another process"}')


def test_the_traceback_of_a_crash_goes_to_the_original_stderr():
    code = "raw = raw_output.RawOutput.take(); raw.start(); os.kill(os.getpid(), signal.SIGSEGV)"
    _, stderr = outputs(code, -signal.SIGSEGV)
    assert "Fatal Python error: Segmentation fault" in stderr
