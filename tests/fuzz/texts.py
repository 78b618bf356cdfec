"""Hostile inputs of the protocols of texts: OpenAI's, Cohere's, ours for classes, and TEI's."""

import gzip
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tests.fuzz.infer import InferMaker
from tests.fuzz.inputs import HostileInput
from tests.fuzz.mutate import mutate

_ALPHABET = "abc xyz.,!?'\"\\\n\t0\u00fc\u4e2d\U0001f600\0\u202e"
_MODELS = ("encoder", "reranker", "classifier", "echo", "nobody", "", "*", None, 3, "a" * 300)
_JUNK = (None, 0, -1, 2**63, 1.5, "", "x", [], {}, [[]], True, [[1], 2], 10**30, {"a": 1}, [None])
_TRUTHS = (True, False, None, 1, "true", "yes", [])
_COMMON: Mapping[str, Sequence[Any]] = {
    "truncate": _TRUTHS, "normalize": _TRUTHS, "user": ("me", "", 3, None), "x": (1,),
    "truncation_direction": ("left", "right", "Left", "Right", "up", 1, None),
    "prompt_name": ("query", "", None, 3), "dimensions": (1, 2, 8, 16, 17, 0, -1, 2**40, "3", 1.0),
}  # fmt: skip
_FIELDS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "embeddings": _COMMON | {"encoding_format": ("float", "base64", "base64", "int8", 1, None)},
    "rerank": {
        "top_n": (1, 2, 3, 10_000, 0, -1, "2", None, 2**70), "return_documents": _TRUTHS,
        "max_chunks_per_doc": (1, 10, -1), "max_tokens_per_doc": (4096, 0, -1, "x"),
        "rank_fields": (["text"], ["title", "text"], ["none"], [], [1], "text"),
        "truncate": _TRUTHS, "raw_scores": _TRUTHS, "x": (1,),
    },
    "classify": {
        "top_k": (1, 2, 3, 0, -1, 2**40, "2", None), "raw_scores": _TRUTHS, "truncate": _TRUTHS,
        "examples": ([], [{"text": "a", "label": "b"}], 1), "user": ("me",), "x": (1,),
    },
    "tei": _COMMON | {
        "raw_scores": _TRUTHS, "return_text": _TRUTHS, "add_special_tokens": _TRUTHS,
        "skip_special_tokens": _TRUTHS, "parameters": ({}, {"truncate": True}, {"x": 1}, 3, None),
    },
}  # fmt: skip
"""Members besides the texts that a body may have, with values that fit and others."""
_TEI_CALLS = (
    *("embed", "embed", "embed_all", "embed_sparse", "similarity", "rerank", "predict", "tokenize"),
    *("decode", "info", "nothing"),
)
_PATHS = {
    "embeddings": ("/v1/embeddings",),
    "rerank": ("/v1/rerank", "/v2/rerank"),
    "classify": ("/v1/classify",),
}
_OTHER_PATHS = {
    "embeddings": ("/v1/models", "/v1/models/encoder", "/v1/models/%00", "/v1/embeddings/encoder"),
    "rerank": ("/v1/rerank/", "/v2/rerank/reranker", "/v2/reranks", "/v1/chat/completions"),
    "classify": ("/v1/classify/classifier", "/v1/models/classifier:classify", "/v1/classify?a=%ff"),
    "tei": ("/info", "/tei/encoder/info", "/tei/info", "/tei//embed", "/tei/a/b/embed", "/metrics"),
}
TEXT_PROTOCOLS = tuple(_FIELDS)


def make_text_input(protocol: str, seed: int, number: int) -> HostileInput:
    """Return the input of a number for one of the `TEXT_PROTOCOLS`."""
    maker = TextsMaker(f"{protocol}-{seed}-{number}")
    data = maker.text_call(protocol, number)
    return HostileInput(number=number, kind=f"texts-{protocol}", data=data, is_framed=True)


class TextsMaker(InferMaker):
    """Makes one input, by its own stream of random numbers."""

    def text_call(self, protocol: str, number: int) -> bytes:
        """Return a whole request that is right or nearly."""
        if self.random() < 0.06:
            return self._other_call(protocol, number)
        call = ""
        if protocol == "tei":
            call = self.choice(_TEI_CALLS)
            model = self.choice(("encoder", "reranker", "classifier", "echo", "nobody", "%00", ""))
            below = f"/tei/{model}/{call}"
            path = self.choice((f"/{call}", f"/{call}", "/", below, below, below))
            document = self._tei_document(call)
        else:
            path = self.choice(_PATHS[protocol])
            document = getattr(self, f"_{protocol}_document")()
            if self.random() < 0.95:
                own = {"embeddings": "encoder", "rerank": "reranker", "classify": "classifier"}
                is_right = self.random() < 0.9
                document["model"] = own[protocol] if is_right else self.choice(_MODELS)
        fields = _FIELDS[protocol]
        for name in self.sample(list(fields), self.choice((0, 0, 1, 2))):
            document[name] = self.choice(fields[name])
        if self.random() < 0.2 and document:
            self.damage(document)
        if self.random() < 0.02:
            document = self.choice(_JUNK)
        body = self._body(document)
        lines = []
        if self.random() < 0.04:
            encoding = self.choice(("gzip", "br", "identity", "deflate"))
            lines.append(f"content-encoding: {encoding}")
            body = gzip.compress(body) if encoding == "gzip" else body
        elif self.random() < 0.04:
            lines.append(self.choice(("prefer: respond-async", "x-model-version: 1", "x-a: b")))
        content_type = self.choice(("application/json",) * 4 + ("text/plain", "x/y", "image/png"))
        return self.framed(number, path, content_type, body, *lines)

    def _other_call(self, protocol: str, number: int) -> bytes:
        path = self.choice(_OTHER_PATHS[protocol] + _PATHS.get(protocol, ("/embed", "/rerank")))
        body = self.choice((b"", b"{}", b"[]", b"{", b'{"input":"a"}', b'{"inputs":"a"}'))
        whole = self.framed(number, path, "application/json", body)
        return whole.replace(b"POST", self.choice((b"GET", b"GET", b"PUT", b"DELETE", b"POST")), 1)

    def _body(self, document: object) -> bytes:
        text = json.dumps(document, ensure_ascii=self.random() < 0.5)
        body = text.encode("utf-8", self.choice(("surrogatepass", "replace")))
        if self.random() < 0.03:
            body = b"\xef\xbb\xbf" + body
        if self.random() < 0.02:
            name = self.choice((b"input", b"inputs", b"documents", b"query", b"model"))
            body = b'{"%b":%b' % (name, self.choice((b"[" * 20_000, b'"' * 9, b"1e999}", b"-}")))
        return mutate(self, body, [body]) if self.random() < 0.2 else body

    # Documents

    def _embeddings_document(self) -> dict[str, Any]:
        return {"input": self._texts_or_ids()}

    def _rerank_document(self) -> dict[str, Any]:
        texts = self._texts()
        documents: list[Any] = texts if isinstance(texts, list) else [texts]
        if self.random() < 0.3:
            documents = [
                {self.choice(("text", "text", "title", "image", "")): each} for each in documents
            ]
        return {"query": self._text(), "documents": documents}

    def _classify_document(self) -> dict[str, Any]:
        return {self.choice(("input", "input", "inputs")): self._texts()}

    def _tei_document(self, call: str) -> dict[str, Any]:
        match call:
            case "similarity":
                sentences = self._texts()
                return {"inputs": {"source_sentence": self._text(), "sentences": sentences}}
            case "rerank":
                return {"query": self._text(), "texts": self._texts()}
            case "predict":
                pairs = [[self._text() for _ in range(self.choice((1, 2, 2, 3)))] for _ in "ab"]
                return {"inputs": self.choice((self._text(), pairs, self._texts()))}
            case "decode":
                return {"ids": self._texts_or_ids()}
            case _:
                return {"inputs": self._texts_or_ids()}

    def _texts_or_ids(self) -> Any:
        if self.random() < 0.6:
            return self._texts()
        return self.choice((self._ids(), [self._ids() for _ in range(self.choice((1, 2, 5)))]))

    def _ids(self) -> list[Any]:
        ids: list[Any] = [self.randrange(60) for _ in range(self.choice((0, 1, 3, 9, 40)))]
        if self.random() < 0.2:
            ids.append(self.choice((-1, 2**31, 2**63, 10**30, 1.5, "a", None, True, 100_277, [])))
        return ids

    def _texts(self) -> Any:
        match self.randrange(12):
            case 0:
                return self._text()
            case 1:
                return [self._text(), self.choice(_JUNK)]
            case 2 if self.random() < 0.1:
                return ["a"] * self.choice((257, 1001, 2049, 40_000))
            case 3:
                return self.choice(_JUNK)
            case _:
                return [self._text() for _ in range(self.choice((1, 1, 2, 3, 5)))]

    def _text(self) -> str:
        num = self.choice((1, 1, 5, 20, 20, 20, 60, 400))
        text = "".join(self.choices(_ALPHABET, k=num)) * self.choice((1,) * 60 + (500,))
        return self.choice((text,) * 60 + ("", "\ud800" + text))


# Answers

_ERRORS = {
    b"/v1/embeddings": ("error.message", "error.type", "error.code"),
    b"/v1/rerank": ("message", "detail"),
    b"/v2/rerank": ("message", "detail"),
    b"/v1/classify": ("message", "detail"),
    **{
        start + each.encode(): ("error", "error_type")
        for each in _TEI_CALLS[:-2]
        for start in (b"/", b"/tei/encoder/", b"/tei/nobody/")
    },
}
"""The texts that an error of a path must have."""


def text_complaint(input: HostileInput, status: int, body: bytes) -> str:
    """Return what is wrong with the form of an answer; empty if nothing is, or nobody knows."""
    method, _, rest = input.data.partition(b" ")
    path = rest.partition(b" ")[0]
    if not input.kind.startswith("texts-") or method != b"POST" or path == b"/predict":
        return ""  # such as calls of our own
    try:
        value = json.loads(body)
    except ValueError:
        return "and no JSON"
    if status < 400:
        return ""
    for name in _ERRORS.get(path, ()):
        found = value
        for part in name.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        if not isinstance(found, str) or not found:
            return f"and no text `{name}`"
    return ""
