"""Hostile inputs of TorchServe's protocol and its management, and of the platforms' containers."""

import gzip
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.inputs import HostileInput, RequestMaker
from tests.fuzz.mutate import mutate

_HANDLER = '''
"""Says what it was given, so that no request is wrong."""


def said(value):
    return f"{type(value).__name__} {len(value) if hasattr(value, '__len__') else value}"


class Handler:
    def initialize(self, context):
        self.context = context

    def handle(self, data, context):
        answers = []
        for place, parts in enumerate(data):
            about = {str(name)[:50]: said(value) for name, value in list(parts.items())[:20]}
            context.get_request_header(place, "content-type")
            body = parts.get("body")
            if isinstance(body, dict) and body.get("raise") is True:
                raise ValueError("told so")
            answers.append(about if len(about) != 1 else [str(about), str(about).encode()][place % 2])
        return answers
'''  # noqa: E501
"""The code of the archive `parts`. It raises for `{"raise": true}` alone."""
TOLD = "ValueError: told so"
"""The text of its error in the log."""
_MODELS = ("parts",) * 10 + ("decoder", "echo", "echo", "grid", "nobody", "")
_ODD_NAMES = (
    *("%00", "%2e%2e", "..", "a%2Fb", "parts%20", "%ff", "\u00fc", "n" * 300, "parts.mar", "-"),
    *("*", "parts/", "//", "predict", "models", "health", "parts?", "%70arts", "parts@1.0"),
)
_VERSIONS = ("",) * 8 + ("/1.0", "/2.0", "/1", "/x", "/%00", "/1.0/", "/1.0/x", "/" + "9" * 300)
_BOUNDARY = "0123456789abcdef"
_FIELDS = (
    *('name="data"; filename="a.jpg"', 'name="data"', 'name="body"', 'name="body"; filename="b"'),
    *('name=""', 'filename="c"', "", 'name="a"; filename=""', "name=\"d\"; filename*=utf-8''%e2"),
    *('name="data"; filename="../../x"', 'name="\\"', "name=data", 'name="' + "n" * 300 + '"'),
)
_PART_TYPES = ("", "", "image/jpeg", "application/json", "text/plain; charset=x", "a" * 300)
_CONTENT_TYPES = (
    *("application/json",) * 8,
    *("application/octet-stream", "image/jpeg", "text/plain", "text/plain; charset=utf-16", ""),
    *("application/json; charset=latin-1", "application/x-npy", "APPLICATION/JSON", "x/y", "json"),
    *("application/x-www-form-urlencoded", "multipart/form-data", ";;;", "text/csv"),
)
_JUNK = (None, 0, -1, 2**63, 1.5, "", "x", [], {}, [[]], True, [[1], 2], 10**30, {"a": 1}, "\ud800")
_VALUES: Sequence[Any] = (
    *({"n": 1}, {"raise": True}, {"instances": [[[[0.5] * 4] * 3] * 2]}, [1, 2], "text"),
    *({"data": "x"}, {"instances": ["a", "b"]}, 3, {"inputs": [1]}, {"b64": "AAAA"}),
    *_JUNK,
)
_URLS = (
    *("nothing.mar", "../parts.mar", "/etc/passwd", "http://127.0.0.1:9/x.mar", "%2e%2e%2fx", ""),
    *("file:///etc/passwd", "s3://a/b.mar", ".", "link.mar", "a" * 3000, "parts%00.mar"),
    *("parts.mar/../parts.mar", "\\\\host\\x.mar", "broken.mar", "folder", "parts.mar"),
)
_ACCEPTED = (
    *("application/json", "text/csv", "application/jsonlines", "application/x-npy", "*/*"),
    *("image/png", "text/csv;q=0", ",", "application/json, text/csv", "x"),
)
_METHODS = (b"POST",) * 16 + (b"PUT",) * 5 + (b"GET", b"OPTIONS", b"HEAD", b"DELETE", b"PATCH")
_MOSTLY_POST = (b"POST",) * 60 + (b"PUT", b"GET", b"OPTIONS", b"HEAD", b"DELETE", b"PATCH")
_OTHER_PATHS = (
    *("/ping", "/api-description", "/", "/explanations/parts", "/explanations/parts/1.0"),
    *("/wfpredict/x", "/predictions", "/predictions/", "/predictions//", "/parts", "/v1/models"),
    *("/models", "/models/parts", "/models/parts/all", "/models/parts/1.0/set-default"),
    *("/predictions/parts/1.0/2/3", "/parts/predict/", "/parts/predict/1.0", "/invocations/parts"),
    *("/ping/x", "/metrics", "/predictions/\r", "/models/parts/invoke/1.0", "/models//invoke"),
)


ADMIN = "admin-0123456789"
"""The admin key of the service, which registration needs."""
VERTEX_PREDICT = "/v1/endpoints/1/deployedModels/2:predict"
VERTEX_HEALTH = "/v1/endpoints/1/deployedModels/2"


class ServerMaker(RequestMaker):
    """Makes one input, by its own stream of random numbers."""

    def prediction(self, number: int) -> bytes:
        """Return a call of a model by TorchServe's paths."""
        name = self.choice(_MODELS) if self.random() < 0.93 else self.choice(_ODD_NAMES)
        version = self.choice(_VERSIONS)
        path = self.choice(
            (f"/predictions/{name}{version}",) * 8
            + (f"/{name}/predict", f"/models/{name}/invoke", f"/models/{name}{version}/invoke")
            + (f"/invocations?model_name={name}", "/invocations")
        )
        if self.random() < 0.05:
            path = self.choice(_OTHER_PATHS)
        if self.random() < 0.08:
            more = self.choice(("a=1", "data=%ff", "body=x", "a=1&" * 200, "=", "&&", "customized"))
            path += ("&" if "?" in path else "?") + more
        content_type, body = self._body()
        return self._sent(number, self.choice(_METHODS), path, content_type, body)

    def management(self, number: int) -> bytes:
        """Return a call of TorchServe's management API that changes little for the next one."""
        name = self.choice(("parts",) * 8 + ("echo", "nobody", "", *_ODD_NAMES))
        version = self.choice(_VERSIONS)
        url = self.choice(_URLS)
        junk = self.choice(("1", "0", "-1", "x", "", "99999999999999999999", "1.5", "%00", "1e3"))
        keys = ("initial_workers", "batch_size", "max_batch_delay", "response_timeout", "x", "url")
        more = f"&{self.choice(keys)}={junk}" if self.random() < 0.5 else ""
        absent = self.choice(("nobody", "", "%00", "..", "a%2Fb", "n" * 300))
        bad = self.choice(("0", "-1", "x", "1.5", "%00", "1e3", "99999999999999999999"))
        method, path = self.choice(
            (
                (b"GET", "/models"), (b"GET", f"/models?limit={junk}&next_page_token={junk}"),
                (b"GET", f"/models/{name}{version}"), (b"GET", f"/models/{name}?customized={junk}"),
                (b"POST", f"/models?url={url}{more}"), (b"POST", "/models"), (b"POST", "/models?"),
                (b"PUT", f"/models/{name}?min_worker={bad}"), (b"OPTIONS", "/"),
                (b"PUT", f"/models/{absent}{version}?min_worker={junk}&max_worker={bad}{more}"),
                (b"PUT", f"/models/{absent}{version}/set-default"), (b"PUT", "/models"),
                (b"DELETE", f"/models/nobody{version}"), (b"DELETE", "/models/"),
                (b"PATCH", "/models"), (b"GET", "/api-description"), (b"GET", "/"),
                (b"GET", "/ping"), (b"GET", "/token?type=inference"), (b"POST", "/workflows?url=x"),
                (b"POST", "/predictions/parts"), (b"GET", "/metrics"), (b"GET", "/health"),
            )
        )  # fmt: skip
        content_type, body = self._body() if self.random() < 0.2 else ("", b"")
        lines = [f"authorization: Bearer {ADMIN}"] if self.random() < 0.4 else []
        whole = self._sent(number, method, path, content_type, body, *lines)
        host = self.choice((b"127.0.0.1",) * 9 + (b"evil.example", b"localhost", b""))
        return whole.replace(b"host: fuzz", b"host: " + host, 1)

    def invocation(self, number: int) -> bytes:
        """Return a call of `/invocations` as SageMaker makes it, or nearly."""
        path = self.choice(("/invocations",) * 14 + ("/ping", "/models", "/models/parts/invoke"))
        if self.random() < 0.04:
            path = self.choice(_OTHER_PATHS)
        content_type, body = self._body()
        if self.random() < 0.4:
            content_type, body = self._lines()
        names = (
            "",
            "",
            "",
            "grid",
            "echo",
            "echo.tar.gz",
            "nobody",
            "../x",
            "%00",
            "\xff",
            "a" * 300,
        )
        lines = []
        if target := self.choice(names):
            lines.append(f"x-amzn-sagemaker-target-model: {target}")
        if self.random() < 0.2:
            attributes = self.choice(("a=b", "tfs-model-name=x", "\xff", "a" * 1100, "", "a\tb"))
            lines.append(f"x-amzn-sagemaker-custom-attributes: {attributes}")
        if self.random() < 0.4:
            accepted = self.choice(_ACCEPTED)
            lines.append(f"accept: {accepted}")
        return self._sent(number, self.choice(_MOSTLY_POST), path, content_type, body, *lines)

    def vertex(self, number: int) -> bytes:
        """Return a call of the routes that Vertex AI names."""
        path = self.choice(
            (VERTEX_PREDICT,) * 14
            + (VERTEX_HEALTH, VERTEX_PREDICT + "/", VERTEX_HEALTH + ":explain", "/v1/endpoints")
            + (VERTEX_PREDICT.replace(":", "%3A"), VERTEX_PREDICT + "?a=%ff", "/v1/models/echo")
        )
        content_type, body = self._body()
        if self.random() < 0.6:
            content_type, body = "application/json", self.json_text()
            if self.random() < 0.3:
                body = mutate(self, body, [body])
        return self._sent(number, self.choice(_MOSTLY_POST), path, content_type, body)

    def _sent(
        self, number: int, method: bytes, path: str, content_type: str, body: bytes, *lines: str
    ) -> bytes:
        more = list(lines)
        if self.random() < 0.05:
            squeezed = self.choice(("gzip", "gzip", "br", "identity", "deflate"))
            more.append(f"content-encoding: {squeezed}")
            body = gzip.compress(body) if squeezed == "gzip" else body
        if self.random() < 0.05:
            more.append(
                self.choice(("prefer: respond-async", "x-model-version: 1", "authorization: x"))
            )
        if self.random() < 0.02:
            more += [f"x-{place}: {'y' * 90}" for place in range(self.choice((60, 90)))]
        safe = path.replace("\r", "%0d").encode("utf-8").decode("latin-1")
        whole = self.framed(number, safe, content_type, body, *more)
        if not content_type:
            whole = whole.replace(b"content-type: \r\n", b"", 1)
        return whole.replace(b"POST", method, 1)

    def _body(self) -> tuple[str, bytes]:
        """Return a content type, and a body that fits it or does not."""
        choice = self.random()
        if choice < 0.3:
            body = self._form()
            if self.random() < 0.3:
                body = mutate(self, body, [body])
            boundary = self.choice((_BOUNDARY,) * 12 + ("", "x", '"', "a" * 300))
            return f"multipart/form-data; boundary={boundary}", body
        if choice < 0.4:
            text = self.choice(
                ("data=1&body=%7B%7D", "a=%ff&a=2&=&&", "", "data", "a=1&" * 2000, "%", "+=+", "\0")
            )
            return "application/x-www-form-urlencoded", text.encode()
        content_type = self.choice(_CONTENT_TYPES)
        if choice < 0.75:
            value = self.choice(_VALUES)
            body = json.dumps(value, ensure_ascii=self.random() < 0.5).encode("utf-8", "replace")
            if self.random() < 0.2:
                deep = b"[" * self.choice((50, 200, 20_000))
                body = self.choice((deep, deep + b"]" * len(deep), b'{"a":1e999}', b"-", b"NaN"))
            return content_type, mutate(self, body, [body]) if self.random() < 0.2 else body
        if choice < 0.85:
            return content_type, self.image()
        return content_type, self.randbytes(self.choice((0, 0, 1, 12, 96, 5000)))

    def _lines(self) -> tuple[str, bytes]:
        """Return rows of CSV or lines of JSON."""
        if self.random() < 0.5:
            cells = ("1", "2.5", "", "x", '"a,b"', '"', "nan", "1e999", "-", "\u00fc", "\0", "inf")
            rows = (
                ",".join(self.choices(cells, k=self.choice((1, 3, 3, 24, 200))))
                for _ in range(self.choice((0, 1, 2, 5, 300)))
            )
            text = self.choice(("\n", "\r\n", "\r")).join(rows)
            return self.choice(("text/csv", "text/csv; header=present", "text/CSV")), text.encode(
                "utf-8", "replace"
            )
        num = self.choice((0, 1, 2, 5, 300))
        lines = [json.dumps(self.choice((*_JUNK, [1.0] * 3, {"x": [1, 2, 3]}))) for _ in range(num)]
        body = self.choice(("\n", "\r\n", "\n\n")).join(lines).encode("utf-8", "replace")
        if self.random() < 0.3:
            body = mutate(self, body, [body])
        return self.choice(("application/jsonlines", "application/x-jsonlines")), body

    def _form(self) -> bytes:
        parts: list[bytes] = []
        for _ in range(self.choice((0, 1, 1, 1, 2, 3, 70, 400))):
            head = f"content-disposition: form-data; {self.choice(_FIELDS)}"
            if part_type := self.choice(_PART_TYPES):
                head += f"\r\ncontent-type: {part_type}"
            if self.random() < 0.01:
                head += "\r\nx: " + "y" * 20_000
            content = b"3"
            if len(parts) < 3:
                content = self.choice((self.image(), b'{"a": 1}', b"", b"text", b"\xff\xfe\0"))
            parts.append(f"--{_BOUNDARY}\r\n{head}\r\n\r\n".encode("latin-1") + content + b"\r\n")
        return b"".join(parts) + f"--{_BOUNDARY}--\r\n".encode()


def make_server_input(protocol: str, seed: int, number: int) -> HostileInput:
    """Return the input of a number for a protocol of `SERVER_INPUTS`."""
    data = _CALLS[protocol](ServerMaker(f"{protocol}-{seed}-{number}"), number)
    return HostileInput(number=number, kind=protocol, data=data, is_framed=True)


_CALLS: Mapping[str, Callable[[ServerMaker, int], bytes]] = {
    "torchserve": ServerMaker.prediction,
    "management": ServerMaker.management,
    "sagemaker": ServerMaker.invocation,
    "vertex": ServerMaker.vertex,
}
SERVER_INPUTS: Mapping[str, Callable[[int, int], HostileInput]] = {
    protocol: partial(make_server_input, protocol) for protocol in _CALLS
}
"""The maker of inputs for a protocol that settings turn on for the whole service."""


# Services


def torchserve_settings(folder: Path, ports: Sequence[int]) -> dict[str, object]:
    """Write a model store and `config.properties`; return the settings that serve them.

    The ports are those of inference, management and metrics.
    """
    store = folder / "model_store"
    store.mkdir()
    model = {"modelName": "parts", "modelVersion": "1.0", "handler": "handler.py"}
    with zipfile.ZipFile(store / "parts.mar", "w") as archive:
        manifest = {"runtime": "python", "model": model, "archiverVersion": "0.12.0"}
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        archive.writestr("handler.py", _HANDLER)
    (store / "broken.mar").write_bytes(b"PK\3\4 no archive")
    (store / "folder").mkdir()
    (store / "link.mar").symlink_to("/etc/passwd")
    names = ("inference_address", "management_address", "metrics_address")
    addresses = [f"{name}=http://127.0.0.1:{port}" for name, port in zip(names, ports, strict=True)]
    lines = [*addresses, f"model_store={store}", "load_models=parts.mar", "model_api_enabled=true"]
    file = folder / "config.properties"
    file.write_text("\n".join([*lines, "default_workers_per_model=1", ""]))
    return {"torchserve": str(file)}


# Answers


def server_complaint(input: HostileInput, status: int, body: bytes) -> str:
    """Return what is wrong with the form of an error; empty if nothing is, or nobody knows."""
    path = input.data.partition(b" ")[2].partition(b" ")[0].partition(b"?")[0]
    is_head = input.data.startswith((b"HEAD", b"OPTIONS"))
    if input.kind not in SERVER_INPUTS or status < 400 or is_head:
        return ""
    of_torchserve = (b"/predictions/", b"/invocations", b"/ping", b"/models")
    is_torchserve = input.kind in ("torchserve", "management") and path.startswith(of_torchserve)
    of_others = {"sagemaker": b"/invocations", "vertex": VERTEX_PREDICT.encode()}
    if not is_torchserve and path != of_others.get(input.kind):
        return ""
    if b"this is not valid HTTP" in body:
        return ""  # nobody knows its path
    try:
        value = json.loads(body)
    except ValueError:
        return "and no JSON"
    if is_torchserve or input.kind == "sagemaker":
        is_right = isinstance(value, dict) and value.get("code") == status
        texts = [value.get("type"), value.get("message")] if is_right else []
        is_right = is_right and all(isinstance(each, str) and each for each in texts)
        return "" if is_right else "and no `code`, `type` and `message`"
    error = value.get("error") if isinstance(value, dict) else None
    return "" if isinstance(error, str) and error else "and no text `error`"


def is_told_to_fail(input: HostileInput, status: int, body: bytes) -> bool:
    """Return whether an answer of 5xx is what a request has asked for, or what there is not."""
    if input.kind not in SERVER_INPUTS:
        return False
    if status == 503:
        is_late = b"the deadline cannot be met" in body and b"x-timeout-ms" in input.data
        return is_late or (b"Prediction failed" in body and b'"raise": true' in _plain(input.data))
    return status == 501  # what is plainly not there, such as explanations


def _plain(data: bytes) -> bytes:
    head, _, body = data.partition(b"\r\n\r\n")
    if b"chunked" in head:
        body = b"".join(body.split(b"\r\n")[1::2])
    try:
        return gzip.decompress(body) if b"content-encoding: gzip" in head else body
    except (OSError, EOFError):
        return body
