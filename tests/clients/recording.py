"""A proxy for HTTP that writes down what passes: requests as clients send them, and the answers."""

import base64
import gzip
import http.client
import json
import threading
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LENGTH = "Inference-Header-Content-Length"
_KEPT = ("content-type", "content-encoding", LENGTH.lower())
_OF_CONNECTION = ("connection", "transfer-encoding", "keep-alive", "host")


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
        call = sent.pop("x-call", "")
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
        sent.pop("content-length", None)
        self.found.append(
            {
                "call": call,
                "method": self.command,
                "path": self.path,
                "headers": sent,
                "body": written(body),
                "status": response.status,
                "answer": seen(response.headers, answer),
            }
        )
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
