"""Calls of each protocol but ours, for tests in which they are refused, and its errors' forms."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from inferpool.models.spec import Interface, TextFacts
from inferpool.service.api.optional_calls import CALLS_BY_SETTING
from tests.service.api.fakes import FakeModel, result
from tests.service.api.server import PredictServer, RawAnswer
from tests.service.parts.torchserve.fake_archives import archive


class RefusedProtocol(NamedTuple):
    """A protocol of calls.

    Attributes:
        path: Path of a call.
        body: A body that fits.
        texts: Names of the strings that an error has, the message's first.
        model: Makes the model that is asked, which is named fake.
        setting: The one that turns the protocol on; empty if it is always on.
        wrong_paths: Paths of no model.
        methods: Methods that the path has.
        wrong_methods: Some that it does not have.
        wrong_bodies: Bodies that do not fit.
        unfit: The status for an input that does not fit.
        full: The status while the queue is full.
        has_code: Whether an error repeats its status, as `code`.
    """

    path: str
    body: str
    texts: tuple[str, ...]
    model: Callable[..., FakeModel] = FakeModel
    setting: str = ""
    wrong_paths: tuple[str, ...] = ()
    methods: str = "POST"
    wrong_methods: tuple[str, ...] = ("DELETE", "PATCH", "OPTIONS")
    wrong_bodies: tuple[bytes, ...] = (b"", b"{")
    unfit: int = 400
    full: int = 429
    has_code: bool = False

    def head(self, method: str = "POST", path: str = "") -> bytes:
        return f"{method} {path or self.path} HTTP/1.1\r\nhost: h\r\n".encode()

    def call(self, lines: str = "", path: str = "", body: bytes | None = None) -> bytes:
        body = self.body.encode() if body is None else body
        if self.setting in _TYPED:
            lines += "content-type: application/json\r\n"
        whole = f"{lines}content-length: {len(body)}\r\n\r\n"
        return self.head(path=path) + whole.encode() + body

    def turn_on(self, server: PredictServer) -> None:
        """Have a server answer such calls."""
        table = CALLS_BY_SETTING.get(self.setting, {})
        own = {path or self.path: call for path, call in table.items()}
        server.protocol.predict.optional = [own]

    def check(
        self, answer: RawAnswer, status: int, about: object = "", *, may_retry: bool = True
    ) -> str:
        """Check an error, and return its message."""
        assert answer.status == status, (about, answer)
        texts = []
        for name in self.texts:
            found = answer.json
            for part in name.split("."):
                found = found[part]
            assert isinstance(found, str), (about, answer)
            assert found, (about, answer)
            texts.append(found)
        if self.has_code:
            assert answer.json["code"] == status
        if self.setting != "torchserve":  # the real one names no type either
            assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-request-id"]
        if status in (429, 503) and may_retry:
            assert int(answer.headers["retry-after"]) >= 1
        return texts[0]


def _text_model(task: Any, answer: bytes, **options: Any) -> FakeModel:
    facts = TextFacts(task=task, max_tokens=8, vocab_size=9, num_dimensions=1)
    return FakeModel(lambda _: result(answer), interface=Interface(text=facts), **options)


def _of_kserve(path: str, body: str) -> RefusedProtocol:
    names = ("nobody", "fake/versions/7", "fake/versions/x", "%ff%00", "")
    paths = tuple(path.replace("fake", name) for name in names)
    methods = ("GET", "DELETE", "OPTIONS")
    return RefusedProtocol(path, body, ("error", "code"), wrong_paths=paths, wrong_methods=methods)


def _of_texts(path: str, body: object, **options: Any) -> RefusedProtocol:
    is_tei = not path.startswith("/v")
    return RefusedProtocol(
        path,
        json.dumps(body),
        setting="tei" if is_tei else "",
        wrong_methods=("GET", "DELETE"),
        wrong_bodies=(b"", b"{", b'"\xff"', b"[]", b"{}"),
        unfit=422 if is_tei else 400,
        **options,
    )


def _of_torchserve(path: str, body: str, wrong_path: str) -> RefusedProtocol:
    return RefusedProtocol(
        path,
        body,
        _CODED,
        archive,
        "torchserve",
        wrong_paths=(wrong_path,),
        methods="POST, PUT, GET, PATCH, DELETE",
        wrong_methods=("OPTIONS",),
        wrong_bodies=(),  # a handler gets them as they are
        full=503,
        has_code=True,
    )


_TYPED = frozenset({"torchserve", "sagemaker", "vertex_predict_route"})
"""Settings of protocols in which a type says what a body is."""
_CODED = ("message", "type")
_COHERE = ("message", "detail", "code")
_TEI = ("error", "error_type")
_INSTANCES = '{"instances":["x"]}'
_RANKED = {"model": "fake", "query": "q", "documents": ["a"]}
_embed = partial(_text_model, "embedding", b"[3,[0.5]]")
_rerank = partial(_text_model, "reranking", b"[3,0.5]")
_classify = partial(_text_model, "classification", b'[3,[{"label":"a","index":0,"score":0.5}]]')
PROTOCOLS = {
    "v1": _of_kserve("/v1/models/fake:predict", _INSTANCES),
    "v2": _of_kserve(
        "/v2/models/fake/infer",
        '{"inputs":[{"name":"x","shape":[1],"datatype":"BYTES","data":["x"]}]}',
    ),
    "embeddings": _of_texts(
        "/v1/embeddings",
        {"model": "fake", "input": "a"},
        texts=("error.message", "error.type", "error.code"),
        model=_embed,
    ),
    "rerank": _of_texts("/v1/rerank", _RANKED, texts=_COHERE, model=_rerank),
    "rerank, version 2": _of_texts("/v2/rerank", _RANKED, texts=_COHERE, model=_rerank),
    "classify": _of_texts(
        "/v1/classify", {"model": "fake", "input": "a"}, texts=_COHERE, model=_classify
    ),
    "embed": _of_texts("/embed", {"inputs": "a"}, texts=_TEI, model=_embed),
    "rank by name": _of_texts(
        "/tei/fake/rerank", {"query": "q", "texts": ["a"]}, texts=_TEI, model=_rerank
    ),
    "torchserve": _of_torchserve("/predictions/fake", '{"a":1}', "/predictions/nobody"),
    "its other path": _of_torchserve("/fake/predict", "[1]", "/nobody/predict"),
    "its form for SageMaker": _of_torchserve(
        "/invocations?model_name=fake", '"a"', "/invocations?model_name=nobody"
    ),
    "sagemaker": RefusedProtocol(
        "/invocations", _INSTANCES, _CODED, setting="sagemaker", has_code=True
    ),
    "vertex": RefusedProtocol(
        "/v1/endpoints/1/deployedModels/2:predict",
        _INSTANCES,
        ("error",),
        setting="vertex_predict_route",
    ),
}
