"""Writes the recorded exchanges: clients call a real Triton through proxies.

The one for HTTP is here, and that for gRPC is a script, since it needs the clients' environment.
"""

import base64
import gzip
import http.client
import json
import subprocess
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.clients.environments import SCRIPTS, Environments, calls_of
from tests.clients.perf import MODES, WORK

LENGTH = "Inference-Header-Content-Length"
_KEPT = ("content-type", "content-encoding", LENGTH.lower())
_OF_CONNECTION = ("connection", "transfer-encoding", "keep-alive", "host")

FOLDER = Path(__file__).parents[1] / "service/parts/open_inference/recorded"
_CALLS = {
    "tritonclient": "tritonclient_calls.py",
    "by_hand": "raw_calls.py",
    "kserve": "kserve_calls.py",
}
_KINDS = {"tritonclient": ("http", "grpc"), "by_hand": ("http",), "kserve": ("v2", "grpc")}
_RECORD = {"CLIENTS_RECORD": "yes"}
_FEW = ("--request-count", "4", "--concurrency-range", "2")


def record(environments: Environments, folder: Path, ports: tuple[int, int]) -> None:
    """Write the files of exchanges anew.

    Args:
        environments: Those of the clients.
        folder: A place for the input of perf_analyzer.
        ports: Those of a Triton that has just started, for HTTP and gRPC.
    """
    python = environments.clients()
    for name, script in _CALLS.items():
        for kind in _KINDS[name]:
            with _recorded(name, python, kind, ports) as address:
                calls_of(python, script, kind, address, **_RECORD)
    program, variables = environments.perf_analyzer()
    parts = folder / "parts.json"
    parts.write_text(json.dumps({"data": [{"n": [3]}]}))
    for kind, work, mode in (
        ("http", WORK["scores"], "HTTP, sync"),
        ("grpc", WORK["texts"], "gRPC, async"),
        ("grpc", ("-m", "counts", "--input-data", str(parts)), "gRPC, a stream"),
    ):
        with _recorded("perf_analyzer_" + work[1], python, kind, ports) as address:
            command = [str(program), "-u", address, *work, *MODES[mode], *_FEW]
            subprocess.run(command, env=variables, stdout=subprocess.DEVNULL, check=True)


@contextmanager
def _recorded(name: str, python: Path, kind: str, ports: tuple[int, int]) -> Iterator[str]:
    """Write the calls to an address to a file; yield the address."""
    if kind != "grpc":
        with recorder(ports[0]) as (port, exchanges):
            yield f"127.0.0.1:{port}"
        unique = dict.fromkeys(json.dumps(each) for each in exchanges)
        (FOLDER / f"{name}_http.jsonl").write_text("".join(line + "\n" for line in unique))
        return
    file = FOLDER / f"{name}_grpc.jsonl"
    command = [str(python), str(SCRIPTS / "grpc_recorder.py"), f"127.0.0.1:{ports[1]}", str(file)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as proxy:
        assert proxy.stdout is not None
        yield f"127.0.0.1:{int(proxy.stdout.readline())}"


@contextmanager
def recorder(port: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Pass calls on to a port; yield the proxy's port, and the list of exchanges."""
    exchanges: list[dict[str, Any]] = []

    class Passing(_RecordingHandler):
        target = port
        found = exchanges

    server = ThreadingHTTPServer(("127.0.0.1", 0), Passing)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1], exchanges
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _RecordingHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    target: int
    found: list[dict[str, Any]]

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        sent = {
            name.lower(): value
            for name, value in self.headers.items()
            if name.lower() not in _OF_CONNECTION
        }
        call = sent.pop("x-call", f"{self.command} {self.path}")
        found: dict[str, Any] = {
            "call": call,
            "method": self.command,
            "path": self.path,
            "headers": {name: each for name, each in sent.items() if name != "content-length"},
            "body": written(body),
            "status": None,  # if Triton hangs up
            "answer": {},
        }
        self.found.append(found)
        connection = http.client.HTTPConnection("127.0.0.1", self.target, timeout=60)
        try:
            connection.request(self.command, self.path, body, sent)
            response = connection.getresponse()
            answer = response.read()
        except OSError:
            self.close_connection = True
            return
        finally:
            connection.close()
        found |= {"status": response.status, "answer": seen(response.headers, answer)}
        self.send_response(response.status)
        for name, value in response.headers.items():
            if name.lower() in _KEPT:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST = _pass_on  # noqa: N815  # names of the base class

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def written(body: bytes) -> dict[str, str]:
    """Return a body as {"text": ...} or {"base64": ...}; empty for none."""
    if not body:
        return {}
    try:
        text = body.decode("ascii")
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(body).decode()}
    if text.isprintable():
        return {"text": text}
    return {"base64": base64.b64encode(body).decode()}


def sent_body(body: Mapping[str, str]) -> bytes:
    """Return the bytes that `written` has written."""
    return body["text"].encode() if "text" in body else base64.b64decode(body.get("base64", ""))


def seen(headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    """Return the parts of an answer that can be compared.

    Returns:
        "encoding" and "has_length" (the header's length is sent) as they are; the body as "json",
        with what follows it as "binary" in base64, or as "text".
    """
    names = {name.lower(): value for name, value in headers.items()}
    encoding = names.get("content-encoding", "")
    length = names.get(LENGTH.lower())
    if encoding == "gzip":
        body = gzip.decompress(body)
    elif encoding == "deflate":
        body = zlib.decompress(body)
    found: dict[str, Any] = {"encoding": encoding, "has_length": length is not None}
    start = len(body) if length is None else int(length)
    try:
        found["json"] = json.loads(body[:start]) if body[:start] else None
    except ValueError:
        found["text"] = body[:start].decode(errors="replace")
    if body[start:]:
        found["binary"] = base64.b64encode(body[start:]).decode()
    return found
