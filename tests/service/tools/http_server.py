"""A server in a thread that answers each GET as a test says."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Respond = Callable[[BaseHTTPRequestHandler], None]


@contextlib.contextmanager
def listening(respond: Respond) -> Iterator[str]:
    """Listen, and yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the name in http.server
            with contextlib.suppress(OSError):  # the client has gone
                respond(self)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def answer(call: BaseHTTPRequestHandler, status: int, body: bytes, kind: str = "text/plain"):
    call.send_response(status)
    call.send_header("Content-Type", kind)
    call.send_header("Content-Length", str(len(body)))
    call.end_headers()
    call.wfile.write(body)
