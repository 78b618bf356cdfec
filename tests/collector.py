"""An OpenTelemetry collector for tests: takes traces by OTLP over HTTP, and keeps them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class FakeCollector:
    """The spans and requests that have come so far."""

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        """The status that it answers."""
        self.headers: dict[str, str] = {}
        """The headers of the last request."""
        self.resources: list[dict[str, str | int]] = []
        self.spans: list[Span] = []
        self.num_asked = 0
        self.may_answer = threading.Event()
        self.may_answer.set()

    def of_trace(self, trace_id: str) -> list[Span]:
        return [span for span in self.spans if span.trace_id.hex() == trace_id]

    def take(self, path: str, headers: dict[str, str], body: bytes) -> int:
        assert path == "/v1/traces"
        self.num_asked += 1
        self.headers = headers
        if self.status == 200:
            told = ExportTraceServiceRequest()
            told.ParseFromString(body)
            for of_process in told.resource_spans:
                self.resources.append(attributes(of_process.resource.attributes))
                for of_scope in of_process.scope_spans:
                    self.spans += of_scope.spans
        return self.status


def attributes(pairs: "Iterator[KeyValue]") -> dict[str, str | int]:
    def plain(value: AnyValue) -> str | int:
        return value.int_value if value.HasField("int_value") else value.string_value

    return {pair.key: plain(pair.value) for pair in pairs}


@contextmanager
def collecting() -> Iterator[FakeCollector]:
    collector = FakeCollector()

    class CollectorHandler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status = collector.take(self.path, headers, body)
            collector.may_answer.wait(600)
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), CollectorHandler)
    server.daemon_threads = True
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        collector.may_answer.set()
        server.shutdown()
        server.server_close()
        thread.join(60)
