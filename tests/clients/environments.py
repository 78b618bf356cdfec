"""Makes the environments that clients and Triton run in, by uv, and starts scripts in them."""

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"
_PYTRITON = "nvidia-pytriton==0.7.0"
_LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}
"""Libraries that perf_analyzer asks for, by their files in the package of pytriton."""
CLIENTS = ("tritonclient[http,grpc]==2.73.0", "kserve==0.21.0", "ml_dtypes")
_SCRIPT_S = 300.0


@dataclass(frozen=True)
class ClientCall:
    """One call of a client, and its answer."""

    call: str
    status: str
    answer: Any
    text: str = ""
    """Text of the client's error."""

    @property
    def values(self) -> dict[str, Any]:
        """The answer as it is compared."""
        return {"status": self.status, "answer": self.answer}


class Environments:
    """Virtual environments in one folder; each is made once, and used again."""

    def __init__(self, folder: Path, python: str) -> None:
        self._folder, self._python = folder, python

    def clients(self) -> Path:
        """Return the interpreter that has tritonclient and kserve."""
        return self.made("clients", CLIENTS)

    def triton(self, python: str) -> Path:
        """Return the interpreter that has pytriton, made from one that it runs with."""
        return self.made("triton", (_PYTRITON,), python=python)

    def perf_analyzer(self) -> tuple[Path, dict[str, str]]:
        """Return the program perf_analyzer, and the variables that it needs.

        It is that of an older tritonclient: later ones need a newer libc than Debian 12 has.
        """
        packages = ("--no-deps", "tritonclient==2.50.0", _PYTRITON)
        home = self.made("perf_analyzer", packages).parent.parent
        libraries = home / "perf_libraries"
        libraries.mkdir(exist_ok=True)
        (bundled,) = home.glob("lib/python*/site-packages/nvidia_pytriton.libs")
        for name, pattern in _LIBRARIES.items():
            link = libraries / name
            link.unlink(missing_ok=True)
            link.symlink_to(next(bundled.glob(pattern)))
        return home / "bin/perf_analyzer", {"LD_LIBRARY_PATH": str(libraries)}

    def made(self, name: str, packages: Sequence[str], python: str = "") -> Path:
        """Return the interpreter of an environment with these packages."""
        home = self._folder / name
        interpreter, mark = home / "bin/python", home / "packages.json"
        if not mark.exists() or json.loads(mark.read_text()) != [*packages]:
            _run(
                "uv",
                "venv",
                "--no-config",
                "--quiet",
                "--clear",
                "--python",
                python or self._python,
                str(home),
            )
            _run(
                "uv",
                "pip",
                "install",
                "--no-config",
                "--quiet",
                "--python",
                str(interpreter),
                *packages,
            )
            mark.write_text(json.dumps(packages))
        return interpreter


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def calls_of(
    python: Path, script: str, kind: str, address: str, **variables: str
) -> list[ClientCall]:
    """Run a script of calls; return them in their order.

    Raises:
        RuntimeError: The script itself has failed; the text is what it wrote.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), str(SCRIPTS / script), kind, address],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=_SCRIPT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{script} {kind} has failed:\n{done.stderr[-2000:]}")
    return [_call(json.loads(line)) for line in done.stdout.splitlines()]


def _call(line: dict[str, Any]) -> ClientCall:
    error = line["error"]
    if error is None:
        answer = line["answer"]
        has_status = isinstance(answer, dict) and isinstance(answer.get("status"), int)
        status = str(answer["status"]) if has_status else "200"
        return ClientCall(line["call"], status, answer)
    status = str(error["status"]).rpartition(".")[2]
    status = error["type"] if status == "None" else status
    return ClientCall(line["call"], status, None, str(error.get("text", "")))
