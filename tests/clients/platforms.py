"""The command `python -m tests.clients.platforms`: calls to the servers of SageMaker and Vertex AI
themselves, and the same calls to the service beside them.

SageMaker's is multi-model-server with the toolkit sagemaker-inference, and needs Java; Vertex AI's
is the one for custom prediction routines in google-cloud-aiplatform.
"""

import argparse
import contextlib
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.clients.environments import Environments
from tests.ports import free_port

SAGEMAKER = ("sagemaker-inference==1.10.1", "multi-model-server==1.1.11", "setuptools<81")
VERTEX = ("google-cloud-aiplatform[prediction]==2.7.0", "setuptools<81")
_START_S, _STOP_S, _CALL_S = 240.0, 60.0, 60.0
ROUTE = "/v1/endpoints/1/deployedModels/2"
JSON = "application/json"
_INFERENCE = "def model_fn(folder): return None\ndef predict_fn(data, model): return data\n"
_PREDICTOR = """
from google.cloud.aiplatform.prediction.predictor import Predictor
class Echo(Predictor):
    def load(self, artifacts_uri): pass
    def predict(self, instances): return {"predictions": instances["instances"]}
"""
_BAD_INPUT = "a body that cannot be read is 500 there, and 4xx here"


@dataclass(frozen=True)
class PlatformCall:
    """A call, and why the answers to it differ, if that is meant."""

    name: str
    path: str
    body: bytes = b""
    type: str = ""
    accept: str = ""
    method: str = "POST"
    meant: str = ""
    only_status: bool = False


@dataclass
class Shown:
    """An answer, as far as it is compared."""

    status: int
    type: str
    body: bytes = field(repr=False)

    @property
    def value(self) -> object:
        """The body as JSON, as rows, or as text."""
        text = self.body.decode(errors="replace")
        if self.type.startswith("text/csv"):
            return [[_number(cell) for cell in row] for row in csv.reader(text.splitlines())]
        try:
            value = json.loads(text)
        except ValueError:
            return text
        is_error = self.status >= 400 and isinstance(value, dict)
        return {"type": value["type"]} if is_error and "type" in value else value


def _number(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text


def invocations() -> list[PlatformCall]:
    """Return calls to an endpoint of SageMaker with one model."""
    path, rows = "/invocations", b"1,2\n3.5,4\n"
    return [
        PlatformCall("ping", "/ping", method="GET", only_status=True),
        PlatformCall("json rows", path, b"[[1,2],[3,4]]", JSON),
        PlatformCall("json row", path, b"[1,2,3]", JSON),
        PlatformCall("json object", path, b'{"a": 1}', JSON),
        PlatformCall("json number", path, b"7", JSON),
        PlatformCall("json rows as csv", path, b"[[1,2],[3.5,4]]", JSON, "text/csv"),
        PlatformCall("json row as csv", path, b"[1,2,3]", JSON, "text/csv"),
        PlatformCall("csv", path, rows, "text/csv"),
        PlatformCall("csv as csv", path, rows, "text/csv", "text/csv"),
        PlatformCall(
            "csv with one row", path, b"1,2\n", "text/csv", meant="numpy drops the dimension"
        ),
        PlatformCall("csv with any", path, rows, "text/csv", "*/*"),
        PlatformCall("broken json", path, b"{", JSON, meant=_BAD_INPUT),
        PlatformCall("unknown type", path, b"a", "text/foo", meant=_BAD_INPUT),
        PlatformCall("unknown accept", path, b"[1]", JSON, "text/html", meant=_BAD_INPUT),
        PlatformCall("no such path", "/nothing", b"1", JSON, only_status=True),
    ]


def models(folder: Path) -> list[PlatformCall]:
    """Return calls to an endpoint of SageMaker with several models."""

    def load(name: str, url: object) -> bytes:
        return json.dumps({"model_name": name, "url": str(url)}).encode()

    a, b = (folder / name / "model" for name in "ab")
    return [
        PlatformCall("ping", "/ping", method="GET", only_status=True),
        PlatformCall("list none", "/models", method="GET"),
        PlatformCall("not loaded", "/models/a", method="GET"),
        PlatformCall("invoke not loaded", "/models/a/invoke", b"[[1.5]]", JSON),
        PlatformCall("load", "/models", load("a", a), JSON),
        PlatformCall("load again", "/models", load("a", a), JSON),
        PlatformCall("load the second", "/models", load("b", b), JSON),
        PlatformCall("load what is not there", "/models", load("c", folder / "c/model"), JSON),
        PlatformCall("load without url", "/models", b'{"model_name": "c"}', JSON),
        PlatformCall("load no JSON", "/models", b"{", JSON, meant=_BAD_INPUT),
        PlatformCall("invoke", "/models/a/invoke", b"[[1.5,2.5]]", JSON),
        PlatformCall("list", "/models", method="GET"),
        PlatformCall("first page", "/models?limit=1", method="GET"),
        PlatformCall(
            "last page",
            "/models?limit=1&next_page_token=1",
            method="GET",
            meant="there a token follows the last page too",
        ),
        PlatformCall(
            "show", "/models/a", method="GET", meant="it shows its workers too, not in the contract"
        ),
        PlatformCall("unload", "/models/a", method="DELETE"),
        PlatformCall("unload again", "/models/a", method="DELETE"),
        PlatformCall("show unloaded", "/models/a", method="GET"),
        PlatformCall("other method", "/models/a", method="PATCH"),
    ]


def vertex() -> list[PlatformCall]:
    """Return calls as Vertex AI makes them."""
    path, error = f"{ROUTE}:predict", "errors are {detail} there, and {error} here"
    unread = "there only application/json is read, with this very name"
    return [
        PlatformCall("health", ROUTE, method="GET", only_status=True),
        PlatformCall("instances", path, b'{"instances": [1, [2], "a"]}', JSON),
        PlatformCall("parameters", path, b'{"instances": [{"b": 1}], "parameters": {}}', JSON),
        PlatformCall("charset", path, b'{"instances": [1]}', f"{JSON}; charset=utf-8"),
        PlatformCall("any answer", path, b'{"instances": [1]}', JSON, "*/*"),
        PlatformCall("broken JSON", path, b'{"instances":', JSON, meant=error, only_status=True),
        PlatformCall("no instances", path, b'{"x": 1}', JSON, meant=_BAD_INPUT),
        PlatformCall("raw text", path, b"abc", "text/plain", meant=unread),
        PlatformCall("no type", path, b'{"instances": [1]}', meant=unread),
        PlatformCall("no such path", "/none", method="GET", only_status=True),
    ]


def asked(port: int, call: PlatformCall) -> Shown:
    """Make a call."""
    headers = {"content-type": call.type, "accept": call.accept or "*/*"}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{call.path}",
        data=call.body or None,
        method=call.method,
        headers={name: value for name, value in headers.items() if value},
    )
    try:
        with urllib.request.urlopen(request, timeout=_CALL_S) as answer:
            return Shown(answer.status, answer.headers.get("content-type", ""), answer.read())
    except urllib.error.HTTPError as error:
        return Shown(error.code, error.headers.get("content-type", ""), error.read())


def say(line: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def compare(title: str, calls: Sequence[PlatformCall], theirs: int, ours: int) -> int:
    """Print how each answer differs; return the number of those that must not."""
    wrong, counts = 0, {"equal": 0, "documented": 0, "different": 0}
    for call in calls:
        there, here = asked(theirs, call), asked(ours, call)
        is_equal = there.status == here.status
        is_equal = is_equal and (call.only_status or there.value == here.value)
        said = "equal" if is_equal else "documented" if call.meant else "different"
        counts[said] += 1
        if said != "equal":
            wrong += said == "different"
            say(f"{title}: {call.name}: {said} {call.meant}")
            say(f"    there {there.status} {there.type} {str(there.value)[:200]!r}")
            say(f"    here  {here.status} {here.type} {str(here.value)[:200]!r}")
    say(f"{title}: {counts}")
    return wrong


@contextmanager
def process(
    command: Sequence[str], folder: Path, variables: Mapping[str, str], port: int, health: str
) -> Iterator[int]:
    """Run a server until the block ends; yield its port once it is healthy."""
    log = folder / f"{port}.log"
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "TMPDIR": str(folder)}
    with log.open("wb") as file:
        server = subprocess.Popen(
            command,
            cwd=folder,
            env=environment | variables,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + _START_S
        while server.poll() is None and time.monotonic() < until:
            with contextlib.suppress(OSError):
                if asked(port, PlatformCall("", health, method="GET")).status == 200:
                    break
            time.sleep(0.3)
        else:
            raise RuntimeError(f"{command[0]} is not ready:\n{log.read_text()[-3000:]}")
        yield port
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(_STOP_S)


def inferpool(
    folder: Path, variables: Mapping[str, str], port: int, health: str, *model: str
) -> AbstractContextManager[int]:
    """Run the service as a platform does."""
    command = [sys.executable, "-m", "inferpool", "serve", *model]
    variables = {**variables, "PYTHONPATH": os.getcwd()}
    return process(command, folder, variables, port, health)


def mms(
    python: Path, folder: Path, port: int, code: Path, model: Path | None = None
) -> AbstractContextManager[int]:
    """Run multi-model-server with the toolkit and this code of models, with one model or none."""
    place = folder / f"mms-{port}"
    place.mkdir()
    config = place / "config"
    handler = "sagemaker_inference.default_handler_service:handle"
    config.write_text(
        "decode_input_request=false\nmodel_store=/\ndefault_workers_per_model=1\n"
        f"inference_address=http://127.0.0.1:{port}\nmanagement_address=http://127.0.0.1:{port}\n"
        f"default_service_handler={handler}\n"
    )
    command = [str(python.parent / "multi-model-server"), "--start", "--foreground"]
    command += ["--model-store", "/", "--mms-config", str(config)]
    command += [] if model is None else ["--models", f"model={model}"]
    variables = {"PATH": f"{python.parent}:{os.environ['PATH']}", "LOG_LOCATION": str(place)}
    variables |= {"METRICS_LOCATION": str(place), "PYTHONPATH": str(code)}
    return process(command, place, variables, port, "/ping")


def write_models(folder: Path) -> None:
    """Write models that both servers can load: a network that returns its input, and its code."""
    network = torch.jit.script(torch.nn.Identity())
    for name in ("model", "models/a/model", "models/b/model"):
        (folder / name / "code").mkdir(parents=True)
        (folder / name / "code" / "inference.py").write_text(_INFERENCE)
        network.save(str(folder / name / "identity.pt"))


def compare_sagemaker(python: Path, folder: Path) -> int:
    """Compare an endpoint with one model, and one with several."""
    if shutil.which("java") is None:
        raise RuntimeError("multi-model-server needs Java, and there is no java on the PATH")
    write_models(folder)
    wrong = 0
    theirs, ours = free_port(), free_port()
    bind = {"SAGEMAKER_BIND_TO_PORT": str(ours), "SAGEMAKER_BASE_DIR": str(folder)}
    with (
        mms(python, folder, theirs, folder / "model/code", folder / "model"),
        inferpool(folder, bind, ours, "/ping", "echo"),
    ):
        wrong += compare("SageMaker", invocations(), theirs, ours)
    theirs, ours = free_port(), free_port()
    bind |= {"SAGEMAKER_BIND_TO_PORT": str(ours), "SAGEMAKER_MULTI_MODEL": "true"}
    with (
        mms(python, folder, theirs, folder / "model/code"),
        inferpool(folder, bind, ours, "/ping"),
    ):
        wrong += compare("SageMaker's models", models(folder / "models"), theirs, ours)
    return wrong


def compare_vertex(python: Path, folder: Path) -> int:
    """Compare an endpoint of Vertex AI."""
    (folder / "predictor.py").write_text(_PREDICTOR)
    theirs, ours = free_port(), free_port()
    routes = {"AIP_HEALTH_ROUTE": ROUTE, "AIP_PREDICT_ROUTE": f"{ROUTE}:predict"}
    variables = routes | {
        "AIP_HTTP_PORT": str(theirs),
        "AIP_STORAGE_URI": "",
        "HANDLER_MODULE": "google.cloud.aiplatform.prediction.handler",
        "HANDLER_CLASS": "PredictionHandler",
        "PREDICTOR_MODULE": "predictor",
        "PREDICTOR_CLASS": "Echo",
        "PYTHONPATH": str(folder),
        "VERTEX_CPR_WEB_CONCURRENCY": "1",
    }
    command = [str(python), "-m", "google.cloud.aiplatform.prediction.model_server"]
    own = routes | {"AIP_HTTP_PORT": str(ours)}
    with (
        process(command, folder, variables, theirs, ROUTE),
        inferpool(folder, own, ours, ROUTE, "echo"),
    ):
        return compare("Vertex AI", vertex(), theirs, ours)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare all, and return 1 if anything differs that must not."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients.platforms", description=__doc__)
    parser.add_argument("--sagemaker", help="an interpreter that has multi-model-server")
    parser.add_argument("--vertex", help="an interpreter that has google-cloud-aiplatform")
    parser.add_argument("--python", default=sys.executable, help="makes those that are not given")
    args = parser.parse_args(argv)
    own = Environments(Path(tempfile.gettempdir()) / "inferpool-platforms", args.python)
    wrong = 0
    for name, packages, run in (
        ("sagemaker", SAGEMAKER, compare_sagemaker),
        ("vertex", VERTEX, compare_vertex),
    ):
        given = getattr(args, name)
        python = Path(given) if given else own.made(name, packages)
        with tempfile.TemporaryDirectory() as folder:
            wrong += run(python, Path(folder))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
