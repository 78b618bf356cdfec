"""The calls that TorchServe's clients make, and the bad ones: of each address, in their order."""

import base64
import gzip
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

import inferpool

PHOTOS = Path(inferpool.__path__[0]) / "models/vision/photos"
_BOUNDARY = "a-boundary-of-the-tests"
_FORM = {"Content-Type": f"multipart/form-data; boundary={_BOUNDARY}"}
_JSON = {"Content-Type": "application/json"}
_FIELDS = {"Content-Type": "application/x-www-form-urlencoded"}
Part = str | dict[str, str]
"""A text, {"photo": name of a file}, {"drawn": mode of Pillow} or {"base64": bytes}."""


@dataclass(frozen=True, kw_only=True)
class RecordedCall:
    """A request to one of TorchServe's three addresses."""

    call: str
    """Its name, which no other call has."""
    method: str = "POST"
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Sequence[Part] = ()
    server: str = "inference"
    """Or "management", or "metrics"."""
    copies: int = 1
    """How many of them are sent at the same time."""

    @property
    def sent(self) -> bytes:
        """The bytes of the body."""
        return b"".join(_bytes_of(part) for part in self.body)


def _bytes_of(part: Part) -> bytes:
    if isinstance(part, str):
        return part.encode()
    if "photo" in part:
        return (PHOTOS / part["photo"]).read_bytes()
    if "drawn" in part:
        return drawn(part["drawn"])
    return base64.b64decode(part["base64"])


def drawn(mode: str) -> bytes:
    """Return a PNG of a mode of Pillow, with a slope of colours."""
    picture = Image.new("RGB", (320, 260))
    picture.putdata([(x * 3 % 256, y % 256, (x + y) % 256) for y in range(260) for x in range(320)])
    with io.BytesIO() as file:
        picture.convert(mode).save(file, "PNG")
        return file.getvalue()


def _form(*parts: tuple[str, Part, str]) -> list[Part]:
    """Return the body of a form; a part is its name, its value, and further headers."""
    body: list[Part] = []
    for name, value, more in parts:
        file = '; filename="a.bin"' if more or not isinstance(value, str) else ""
        head = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n'
        body += [f"{head}{more}\r\n" if more else f"{head}\r\n", value, "\r\n"]
    return [*body, f"--{_BOUNDARY}--\r\n"]


def _base64(data: bytes) -> Part:
    return {"base64": base64.b64encode(data).decode()}


def inference_calls() -> Iterator[RecordedCall]:
    """Yield the calls to the address of predictions."""
    yield from _pictures()
    yield from _words_and_numbers()
    yield from _paths()
    yield from _what_a_handler_gets()
    yield from _what_a_handler_answers()
    yield from _configured()
    yield from _refused()


def _pictures() -> Iterator[RecordedCall]:
    for photo in sorted(each.stem for each in PHOTOS.glob("*.jpg")):
        yield RecordedCall(
            call=f"curl -T {photo}",
            method="PUT",
            path="/predictions/classes",
            body=[{"photo": f"{photo}.jpg"}],
        )
    chelsea: Part = {"photo": "chelsea.jpg"}
    for name in ("data", "body"):
        yield RecordedCall(
            call=f"a form with {name}",
            path="/predictions/classes",
            headers=_FORM,
            body=_form((name, chelsea, "Content-Type: image/jpeg\r\n")),
        )
    yield RecordedCall(
        call="a form with another name",
        path="/predictions/classes",
        headers=_FORM,
        body=_form(("picture", chelsea, "Content-Type: image/jpeg\r\n")),
    )
    for kind in ("application/octet-stream", "image/jpeg", "application/x-www-form-urlencoded"):
        yield RecordedCall(
            call=f"a picture as {kind}",
            path="/predictions/classes",
            headers={"Content-Type": kind},
            body=[chelsea],
        )
    for mode in ("RGB", "RGBA", "L", "P", "CMYK"):
        if mode != "CMYK":  # PNG has none
            yield RecordedCall(
                call=f"a drawing, {mode}", path="/predictions/classes", body=[{"drawn": mode}]
            )
    encoded = base64.b64encode((PHOTOS / "coffee.jpg").read_bytes()).decode()
    yield RecordedCall(
        call="a picture in JSON",
        path="/predictions/classes",
        headers=_JSON,
        body=[json.dumps({"data": encoded})],
    )
    yield RecordedCall(
        call="a picture as a JSON string", path="/predictions/classes", headers=_JSON,
        body=[json.dumps(encoded)],
    )  # fmt: skip
    yield RecordedCall(
        call="pixels in JSON",
        path="/predictions/classes",
        headers=_JSON,
        body=[json.dumps([[[0.5] * 64] * 64] * 3)],
    )
    for photo in ("astronaut", "coffee"):
        yield RecordedCall(
            call=f"TorchScript, {photo}",
            method="PUT",
            path="/predictions/classes_script",
            body=[{"photo": f"{photo}.jpg"}],
        )
    for photo in ("astronaut", "rocket", "clock"):
        yield RecordedCall(
            call=f"boxes, {photo}", method="PUT", path="/predictions/boxes",
            body=[{"photo": f"{photo}.jpg"}],
        )  # fmt: skip
    yield RecordedCall(
        call="segments, astronaut", method="PUT", path="/predictions/segments",
        body=[{"photo": "astronaut.jpg"}],
    )  # fmt: skip
    bad: Mapping[str, Sequence[Part]] = {
        "no picture": ["this is no picture"],
        "half a picture": [_base64((PHOTOS / "chelsea.jpg").read_bytes()[:9000])],
        "an empty body": [],
    }
    for call, body in bad.items():
        yield RecordedCall(call=call, path="/predictions/classes", body=body)


def _words_and_numbers() -> Iterator[RecordedCall]:
    texts = ("the team wins", "Find a <b>café</b> on a new planet!", "unknown words", "", "don't")
    for text in texts:
        yield RecordedCall(call=f"words: {text}", path="/predictions/words", body=[text])
    yield RecordedCall(
        call="words, text/plain",
        path="/predictions/words",
        headers={"Content-Type": "text/plain; charset=utf-8"},
        body=["sell shares of the bank"],
    )
    yield RecordedCall(
        call="words, a form", path="/predictions/words", headers=_FIELDS,
        body=["data=sell+shares+of+the+bank"],
    )  # fmt: skip
    four = json.dumps({"numbers": [1, 2.5, -3, 4]})
    yield RecordedCall(
        call="numbers, JSON", path="/predictions/numbers", headers=_JSON, body=[four]
    )
    yield RecordedCall(call="numbers, bytes", path="/predictions/numbers", body=[four])
    yield RecordedCall(
        call="numbers, a form", path="/predictions/numbers", headers=_FORM,
        body=_form(("data", four, "Content-Type: application/json\r\n")),
    )  # fmt: skip
    for call, text in {
        "too few numbers": '{"numbers": [1, 2]}',
        "numbers of another key": '{"values": [1, 2, 3, 4]}',
        "numbers that are words": '{"numbers": ["a", 2, 3, 4]}',
        "no JSON": "{",
        "a list": "[1, 2, 3, 4]",
        "null": "null",
    }.items():
        yield RecordedCall(call=call, path="/predictions/numbers", headers=_JSON, body=[text])


def _paths() -> Iterator[RecordedCall]:
    text: list[Part] = ["hello"]
    for path in (
        "/predictions/plain",
        "/predictions/plain/1.0",
        "/predictions/plain/2.0",
        "/predictions/plain/1.0/a/b",
        "/predictions/plain/",
        "/predictions/plain?x=1&y=two",
        "/plain/predict",
        "/plain/2.0/predict",
        "/plain/predict?x=1&x=2",
        "/invocations?model_name=plain",
        "/models/plain/invoke",
        "/v1/models/plain:predict",
        "/predictions/plain/3.0",
        "/predictions/plain/latest",
        "/predictions/absent",
        "/predictions/absent/1.0",
        "/predictions/",
        "/predictions",
        "/predictions/a%2Fb",
        "/predictions/%70lain",
        "/absent/predict",
        "/plain/3.0/predict",
        "/invocations",
        "/invocations?model_name=absent",
        "/invocations?model_name=",
        "/models/absent/invoke",
        "/models/plain/other",
        "/ping/predict",
        "/predictions/predict",
        "/other",
        "/a/b/c/d",
        "/plain/predict/2.0",
    ):
        yield RecordedCall(call=f"POST {path}", path=path, body=text)
    yield RecordedCall(
        call="a form that names the model", path="/invocations", headers=_FORM,
        body=_form(("model_name", "plain", ""), ("data", "hello", "")),
    )  # fmt: skip
    for method in ("GET", "PUT", "DELETE", "PATCH", "HEAD"):
        yield RecordedCall(
            call=f"{method} of a prediction", method=method, path="/predictions/plain",
            body=text if method in ("PUT", "PATCH") else [],
        )  # fmt: skip
    yield RecordedCall(call="OPTIONS of a prediction", method="OPTIONS", path="/predictions/plain")
    for method in ("GET", "POST", "PUT", "DELETE", "HEAD"):
        yield RecordedCall(call=f"{method} /ping", method=method, path="/ping")
    yield RecordedCall(call="the root", method="GET", path="/")
    yield RecordedCall(call="OPTIONS of the root", method="OPTIONS", path="/")
    yield RecordedCall(call="the description", method="GET", path="/api-description")
    for path in ("/ping/", "/ping/more", "/other", "/models", "/models/plain", "/metrics"):
        yield RecordedCall(call=f"GET {path}", method="GET", path=path)
    yield RecordedCall(call="POST /models", path="/models?url=plain.mar")
    yield RecordedCall(call="KServe's v1 readiness", method="GET", path="/v1/models/plain")
    yield RecordedCall(call="an explanation", path="/explanations/plain", body=text)
    yield RecordedCall(call="an explanation of nobody", path="/explanations/absent", body=text)
    yield RecordedCall(call="a workflow", path="/wfpredict/flow", body=text)
    yield RecordedCall(call="twice a slash", path="//predictions/plain", body=text)


def _what_a_handler_gets() -> Iterator[RecordedCall]:
    for kind in (
        "application/json",
        "application/json; charset=utf-8",
        "APPLICATION/JSON",
        "application/problem+json",
        "application/jsonlines",
        "text/plain",
        "text/csv",
        "TEXT/plain",
        "application/octet-stream",
        "application/xml",
        "image/png",
        "nonsense",
        "",
    ):
        yield RecordedCall(
            call=f"handed over as {kind or 'an empty type'}", path="/predictions/plain",
            headers={"Content-Type": kind}, body=['{"a": [1, "é"]}'],
        )  # fmt: skip
    yield RecordedCall(
        call="a packed body", path="/predictions/plain", headers={"Content-Encoding": "gzip"},
        body=[_base64(gzip.compress(b"hello", mtime=0))],
    )  # fmt: skip
    yield RecordedCall(
        call="a body in chunks", path="/predictions/plain",
        headers={"Transfer-Encoding": "chunked"},
        body=["3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"],
    )  # fmt: skip
    for text in ("[1, 2]", '"a text"', "7", "null", "NaN", "{", "", '{"a": 1, "a": 2}'):
        yield RecordedCall(
            call=f"JSON {text or 'of nothing'}", path="/predictions/plain", headers=_JSON,
            body=[text],
        )  # fmt: skip
    yield RecordedCall(call="no body", path="/predictions/plain")
    yield RecordedCall(call="bytes", path="/predictions/plain", body=[_base64(bytes(range(256)))])
    yield RecordedCall(
        call="text that is no UTF-8", path="/predictions/plain",
        headers={"Content-Type": "text/plain"}, body=[_base64(b"caf\xe9")],
    )  # fmt: skip
    yield RecordedCall(
        call="headers for the handler", path="/predictions/plain",
        headers={"X-Of-The-Test": "Yes", "Content-Type": "text/plain"}, body=["hello"],
    )  # fmt: skip
    yield RecordedCall(
        call="a form of several parts", path="/predictions/plain", headers=_FORM,
        body=_form(
            ("first", "a value with an é", ""),
            ("second", '{"a": 1}', "Content-Type: application/json\r\n"),
            ("third", {"base64": "AAH/"}, "Content-Type: application/octet-stream\r\n"),
            ("fourth", "text", "Content-Type: text/plain\r\n"),
            ("first", "again", ""),
            ("fifth", "", ""),
        ),
    )  # fmt: skip
    yield RecordedCall(call="an empty form", path="/predictions/plain", headers=_FORM, body=_form())
    yield RecordedCall(
        call="a form cut short", path="/predictions/plain", headers=_FORM,
        body=_form(("first", "value", ""))[:-2],
    )  # fmt: skip
    yield RecordedCall(
        call="a form without a boundary", path="/predictions/plain",
        headers={"Content-Type": "multipart/form-data"}, body=_form(("first", "value", "")),
    )  # fmt: skip
    yield RecordedCall(
        call="a form's part without a name", path="/predictions/plain", headers=_FORM,
        body=[f"--{_BOUNDARY}\r\nContent-Type: text/plain\r\n\r\nx\r\n--{_BOUNDARY}--\r\n"],
    )  # fmt: skip
    for text in ("first=a+value&second=%C3%A9&first=again&third=&fourth", "", "%zz=1", "just text"):
        yield RecordedCall(
            call=f"fields {text or 'of nothing'}", path="/predictions/plain", headers=_FIELDS,
            body=[text],
        )  # fmt: skip
    yield RecordedCall(
        call="PUT of fields", method="PUT", path="/predictions/plain", headers=_FIELDS,
        body=["first=value"],
    )  # fmt: skip
    yield RecordedCall(
        call="PUT of a form", method="PUT", path="/predictions/plain", headers=_FORM,
        body=_form(("first", "value", "")),
    )  # fmt: skip


def _what_a_handler_answers() -> Iterator[RecordedCall]:
    for wish in (
        *("text", "bytes", "bytearray", "number", "null", "true", "list", "deep", "empty"),
        *("empty_dict", "nan", "object", "raise", "predict", "predict_400", "memory", "cuda"),
        *("short", "no list", "nothing"),
    ):
        yield RecordedCall(
            call=f"answers {wish}", path="/predictions/plain", headers=_FIELDS, body=[f"do={wish}"]
        )
    yield RecordedCall(call="pieces", path="/predictions/pieces", body=["hello"])
    yield RecordedCall(
        call="pieces, JSON", path="/predictions/pieces", headers=_JSON, body=['"hi"']
    )
    yield RecordedCall(call="pieces that fail", path="/predictions/pieces", body=["fail"])


def _configured() -> Iterator[RecordedCall]:
    asked: Mapping[str, Mapping[str, object]] = {
        "nothing special": {},
        "a status": {"status": 404, "reason": "not here"},
        "a status alone": {"status": 503},
        "another success": {"status": 201, "reason": "made"},
        "no content": {"status": 204},
        "an odd status": {"status": 299, "reason": "odd"},
        "a status of a server's fault": {"status": 500, "reason": "a fault", "text": "its body"},
        "headers": {"headers": {"X-Of-The-Handler": "yes", "Cache-Control": "no-store"}},
        "a content type": {"content_type": "text/csv", "text": "1,2\n"},
        "a content type of JSON": {"content_type": "application/json"},
        "a content type as a header": {"headers": {"Content-Type": "text/html"}, "text": "<p>"},
        "a plain text": {"text": "just a text"},
    }
    for call, body in asked.items():
        yield RecordedCall(
            call=f"handler sets {call}", path="/predictions/configured", headers=_JSON,
            body=[json.dumps(body)],
        )  # fmt: skip
    yield RecordedCall(
        call="four at once", path="/predictions/configured", headers=_JSON, body=["{}"], copies=4
    )


def _refused() -> Iterator[RecordedCall]:
    yield RecordedCall(
        call="too large a body", path="/predictions/plain", body=["x" * (MAX_REQUEST_BYTES + 1)]
    )
    yield RecordedCall(
        call="the largest body", path="/predictions/plain", body=["x" * MAX_REQUEST_BYTES]
    )
    yield RecordedCall(
        call="too large a form", path="/predictions/plain", headers=_FORM,
        body=_form(("data", "x" * (MAX_REQUEST_BYTES + 1), "")),
    )  # fmt: skip


MAX_REQUEST_BYTES = 200_000
"""The setting `max_request_size` of the servers that are asked."""


def management_calls() -> Iterator[RecordedCall]:
    """Yield the calls to the address of management; some change models."""
    numbers: Counter[str] = Counter()
    for method, path in (
        ("GET", "/models"),
        ("GET", "/models/"),
        ("GET", "/models?limit=3"),
        ("GET", "/models?limit=3&next_page_token=3"),
        ("GET", "/models?limit=0"),
        ("GET", "/models?limit=-1"),
        ("GET", "/models?limit=many"),
        ("GET", "/models?limit=3&next_page_token=99"),
        ("GET", "/models?next_page_token=-4"),
        ("GET", "/models/plain"),
        ("GET", "/models/plain/1.0"),
        ("GET", "/models/plain/2.0"),
        ("GET", "/models/plain/all"),
        ("GET", "/models/plain/3.0"),
        ("GET", "/models/configured"),
        ("GET", "/models/classes"),
        ("GET", "/models/classes?customized=true"),
        ("GET", "/models/plain?customized=true"),
        ("GET", "/models/absent"),
        ("GET", "/models/absent/all"),
        ("GET", "/models/absent?customized=true"),
        ("OPTIONS", "/models/plain"),
        ("OPTIONS", "/models/absent"),
        ("OPTIONS", "/models"),
        ("OPTIONS", "/"),
        ("GET", "/api-description"),
        ("GET", "/ping"),
        ("GET", "/other"),
        ("GET", "/"),
        ("GET", "/metrics"),
        ("GET", "/v1/models/plain"),
        ("PUT", "/models"),
        ("DELETE", "/models"),
        ("POST", "/models/plain"),
        ("PATCH", "/models/plain"),
        ("POST", "/predictions/plain"),
        ("PUT", "/models/boxes?min_worker=2&synchronous=true"),
        ("GET", "/models/boxes"),
        ("PUT", "/models/boxes?min_worker=1&max_worker=1"),
        ("PUT", "/models/boxes/1.0?min_worker=1&synchronous=true"),
        ("PUT", "/models/boxes/9.0?min_worker=1&synchronous=true"),
        ("PUT", "/models/boxes"),
        ("PUT", "/models/boxes?min_worker=3&max_worker=1"),
        ("PUT", "/models/boxes?min_worker=-1"),
        ("PUT", "/models/boxes?min_worker=many"),
        ("PUT", "/models/absent?min_worker=1"),
        ("PUT", "/models/absent?min_worker=1&synchronous=true"),
        ("PUT", "/models/plain/2.0/set-default"),
        ("GET", "/models/plain"),
        ("PUT", "/models/plain/1.0/set-default"),
        ("PUT", "/models/plain/9.0/set-default"),
        ("PUT", "/models/absent/1.0/set-default"),
        ("GET", "/models/plain/1.0/set-default"),
        ("POST", "/models"),
        ("POST", "/models?url="),
        ("POST", "/models?url=absent.mar"),
        ("POST", "/models?url=../outside.mar"),
        ("POST", "/models?url=/etc/passwd"),
        ("POST", "/models?url=%2e%2e%2foutside.mar"),
        ("POST", "/models?url=http://127.0.0.1:9/x.mar"),
        ("POST", "/models?url=file:///etc/passwd"),
        ("POST", "/models?url=broken.mar"),
        ("POST", "/models?url=plain.mar"),
        ("POST", "/models?url=plain_2.mar&initial_workers=1&synchronous=true"),
        ("POST", "/models?url=later.mar"),
        ("POST", "/models?url=later.mar"),
        ("GET", "/models/later"),
        ("PUT", "/models/later?min_worker=1&synchronous=true"),
        ("GET", "/models/later"),
        ("PUT", "/models/later?min_worker=0&synchronous=true"),
        ("DELETE", "/models/later/9.0"),
        ("DELETE", "/models/later"),
        ("DELETE", "/models/later"),
        ("GET", "/models/later"),
        ("POST", "/models?url=later.mar&initial_workers=1&synchronous=true"),
        ("DELETE", "/models/later/1.0"),
        ("POST", "/models?url=later.mar&initial_workers=1"),
        ("DELETE", "/models/later"),
        (
            "POST",
            "/models?url=later.mar&model_name=renamed&batch_size=3&max_batch_delay=20"
            "&initial_workers=1&synchronous=true&response_timeout=30",
        ),
        ("GET", "/models/renamed"),
        ("DELETE", "/models/renamed"),
        ("POST", "/models?url=later.mar&model_name=a%20b"),
        ("POST", "/models?url=later.mar&model_name=predict"),
        ("DELETE", "/models/predict"),
        ("POST", "/models?url=later.mar&batch_size=many"),
        ("POST", "/models?url=later.mar&initial_workers=-1&synchronous=true"),
        ("DELETE", "/models/later"),
        ("POST", "/models?url=raises.mar&initial_workers=1&synchronous=true"),
        ("DELETE", "/models/raises"),
        ("DELETE", "/models/absent"),
        ("DELETE", "/models/plain/1.0"),
        ("DELETE", "/models/plain/2.0"),
        ("GET", "/models/plain/all"),
        ("GET", "/models"),
    ):
        call = f"{method} {path}"
        numbers[call] += 1
        if numbers[call] > 1:
            call += f", {numbers[call]}"
        yield RecordedCall(call=call, method=method, path=path, server="management")
    yield RecordedCall(
        call="register by JSON", path="/models", headers=_JSON, server="management",
        body=['{"url": "later.mar", "initial_workers": 1, "synchronous": true}'],
    )  # fmt: skip
    yield RecordedCall(
        call="register by bad JSON", path="/models", headers=_JSON, server="management", body=["{"]
    )
    yield RecordedCall(
        call="unregister it", method="DELETE", path="/models/later", server="management"
    )


def metrics_calls() -> Iterator[RecordedCall]:
    """Yield the calls to the address of metrics."""
    for method, path in (
        ("GET", "/metrics"),
        ("GET", "/metrics?name[]=ts_inference_requests_total"),
        ("GET", "/metrics?name[]=absent"),
        ("POST", "/metrics"),
        ("GET", "/metrics/"),
        ("GET", "/other"),
        ("GET", "/"),
        ("GET", "/models"),
        ("GET", "/ping"),
    ):
        yield RecordedCall(call=f"{method} {path}", method=method, path=path, server="metrics")
