"""TorchServe's calls before real workers: two versions of a name, streams, and two front ends."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.running import Running, running, until
from tests.models.torchserve.archives import make_mar
from tests.ports import free_port

KEY = "a-key-for-predictions"
BEARER = {"authorization": f"Bearer {KEY}"}
ECHO = """
def handle(data, context):
    if data is None:
        return None
    answers = []
    for index, row in enumerate(data):
        if row.get("body") == b"raise":
            raise ValueError("as asked")
        if row.get("body") == b"teapot":
            context.set_response_status(418, "Teapot", index)
        parts = {name: [type(value).__name__, len(value)] for name, value in row.items()}
        path = context.get_request_header(index, "url_path")
        answers.append({"version": VERSION, "parts": parts, "path": path})
    return answers
"""
PIECES = """
import time
from pathlib import Path
from ts.handler_utils.utils import send_intermediate_predict_response

def handle(data, context):
    if data is None:
        return None
    (row,) = data
    asked = bytes(row["body"]).decode()
    folder = Path(FOLDER)
    if asked == "wait":
        (folder / "begun").touch()
    context.set_response_content_type(0, "application/x-pieces")
    number = 0
    while asked == "wait" and not (folder / "go").exists() or number < 2:
        send_intermediate_predict_response(
            [b"\\xff%d " % number], context.request_ids, "more", 200, context
        )
        number += 1
        time.sleep(0.02)
        if asked == "fail":
            raise ValueError("as asked")
    return ["last"]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("torchserve")
    return made


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Running]:
    store = folder / "store"
    store.mkdir()
    for version in ("1.0", "2.0"):
        handler = ECHO.replace("VERSION", repr(version))
        make_mar(
            store / f"v{version}.mar", {"handler.py": handler}, name="echo", modelVersion=version
        )
    handler = PIECES.replace("FOLDER", repr(str(folder)))
    make_mar(store / "pieces.mar", {"handler.py": handler}, name="pieces")
    lines = [
        f"model_store={store}",
        "load_models=v1.0.mar,v2.0.mar,pieces.mar",
        "default_workers_per_model=1",
        *(f"{name}_address=http://127.0.0.1:{free_port()}" for name in ("management", "metrics")),
    ]
    config = folder / "config.properties"
    config.write_text("\n".join(lines) + "\n")
    settings = {"torchserve": str(config), "front_ends": 2, "root_path": "/ml"}
    with running(settings=settings, env={"INFERPOOL_PREDICT_KEYS": KEY}) as service:
        until(lambda: service.get("/ping").status_code == 200)
        yield service


@pytest.mark.parametrize(
    ("path", "version", "rest"),
    [
        ("/predictions/echo", "1.0", ""),
        ("/ml/predictions/echo/2.0/a/b", "2.0", "a/b"),
        ("/echo/2.0/predict", "2.0", None),
        ("/models/echo/invoke", "1.0", None),
    ],
)
def test_the_handler_of_a_version_gets_the_body(
    service: Running, path: str, version: str, rest: str | None
) -> None:
    for _ in range(4):  # by each front end
        answer = service.post(path, content=b"\xff" * 70_000, headers=BEARER)
        assert answer.status_code == 200, answer.text
        assert "content-type" not in answer.headers
        expected = {"version": version, "parts": {"body": ["bytearray", 70_000]}, "path": rest}
        assert answer.text == json.dumps(expected, indent=2)


def test_forms_and_fields_and_the_default_name(service: Running) -> None:
    files = {"data": ("a.txt", b"abc", "text/plain"), "more": ("b", b"\xff")}
    answer = service.post("/predictions/echo", files=files, headers=BEARER)
    assert answer.json()["parts"] == {"data": ["str", 3], "more": ["bytearray", 1]}
    answer = service.post("/invocations?model_name=echo&a=bc", content=b"x", headers=BEARER)
    assert answer.json()["parts"] == {
        "model_name": ["bytearray", 4], "a": ["bytearray", 2], "body": ["bytearray", 1],
    }  # fmt: skip
    answer = service.post("/invocations", data={"model_name": "echo"}, headers=BEARER)
    assert answer.json()["parts"] == {"model_name": ["bytearray", 4]}


def test_statuses_of_a_handler_and_of_calls_that_fail(service: Running) -> None:
    answer = service.post("/predictions/echo", content=b"teapot", headers=BEARER)
    assert (answer.status_code, answer.json()["version"]) == (418, "1.0")
    for path, content, headers, status, kind in (
        ("/predictions/echo", b"raise", BEARER, 503, "InternalServerException"),
        ("/predictions/echo/3.0", b"x", BEARER, 404, "ModelVersionNotFoundException"),
        ("/predictions/nobody", b"x", BEARER, 404, "ModelNotFoundException"),
        ("/predictions/echo", b"x", {}, 401, "InvalidKeyException"),
        ("/invocations", b"x", BEARER, 400, "BadRequestException"),
        ("/explanations/echo", b"x", BEARER, 404, "ResourceNotFoundException"),
        ("/predictions", b"x", BEARER, 404, "ResourceNotFoundException"),
    ):
        answer = service.post(path, content=content, headers=headers)
        assert (answer.status_code, answer.json()["type"]) == (status, kind), path
        assert answer.json()["code"] == status


def test_parts_of_a_handler_are_chunks_and_a_failure_cuts_them(service: Running) -> None:
    for _ in range(4):
        answer = service.post("/predictions/pieces", content=b"x", headers=BEARER)
        assert (answer.status_code, answer.content) == (200, b"\xff0 \xff1 last")
        assert answer.headers["content-type"] == "application/x-pieces"
        with pytest.raises(httpx.RemoteProtocolError):
            service.post("/predictions/pieces", content=b"fail", headers=BEARER)


def test_a_client_that_hangs_up_ends_the_handlers_stream(service: Running, folder: Path) -> None:
    url = service.address_of("/predictions/pieces")
    with service.http.stream("POST", url, content=b"wait", headers=BEARER) as answer:
        assert next(answer.iter_raw()).startswith(b"\xff0 ")  # as it comes: the handler goes on
        assert (folder / "begun").exists()
    began = time.monotonic()
    found = service.post("/predictions/pieces", content=b"x", headers=BEARER, timeout=60)
    assert found.content.endswith(b"last")  # the only worker is free again
    assert time.monotonic() - began < 30
    (folder / "go").touch()
