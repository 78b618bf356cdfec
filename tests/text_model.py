"""A model of texts that does what they say, and whose right answers are known."""

import base64
import binascii
import struct
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import torch

from inferpool.models.errors import Answered, InputError
from inferpool.models.item import Features, Item
from inferpool.models.spec import Placement, TensorSpec, TextFacts
from tests.fault_model import ACTS, FaultModel

Task = Literal["embedding", "reranking", "classification"]

WIDTH = 8
VOCAB = 1000
MAX_TOKENS = 16
"""Tokens are words, without any for the start and the end."""
SCORE_UNIT = 1 << 22
"""Scores are numbers of texts divided by this; numbers are smaller."""
LABELS = ("low", "high")
_COMMON = {"truncate", "truncation_direction", "count", "tokenizer", "add_special_tokens"}
_KNOWN = {
    "embedding": _COMMON | {"normalize", "dimensions", "prompt_name", "as", "skip_special_tokens"},
    "reranking": _COMMON | {"raw_scores", "skip_special_tokens"},
    "classification": _COMMON | {"raw_scores", "top_k", "skip_special_tokens"},
}


class TextFaultModel(FaultModel):
    """Takes texts such as "ok 7", "raise 7" or "kill 7"; a text without an act is as "ok".

    An encoder answers with `vector_of(text)`, a reranker with the number as a score for any query,
    and a classifier with both labels, the better first.
    """

    outputs = (TensorSpec(name="vector", dtype="float32", shape=(-1, WIDTH)),)
    example = "ok 1"

    def __init__(self, *, task: Task = "embedding", **options: object) -> None:
        """Choose the task, and the options of `FaultModel`."""
        super().__init__(**options)  # type: ignore[arg-type]  # as they are given
        self._task = task
        self.labels = LABELS if task == "classification" else ()
        if task == "reranking":
            self.example = {"query": "which", "text": "ok 1"}  # type: ignore[assignment]

    def load(self, placement: Placement) -> None:
        super().load(placement)
        self.text = TextFacts(
            task=self._task,
            max_tokens=MAX_TOKENS,
            vocab_size=VOCAB,
            num_dimensions=WIDTH if self._task == "embedding" else 0,
            pooling="mean" if self._task == "embedding" else "",
        )

    def preprocess(self, item: Item) -> Features:
        given = item.parameters
        if unknown := set(given) - _KNOWN[self._task]:
            raise InputError(f"parameter {min(unknown)!r} is unknown")
        text, ids = self._read(item)
        if (how := given.get("tokenizer")) is not None:
            raise Answered(text if how == "decode" else tokens_of(text, ids))
        if len(ids) > MAX_TOKENS:
            if not given.get("truncate", True):
                raise InputError(f"instance: {len(ids)} tokens, and {MAX_TOKENS} are the most")
            ids = ids[:MAX_TOKENS]
        dimensions = given.get("dimensions", WIDTH)
        if not isinstance(dimensions, int) or not 1 <= dimensions <= WIDTH:
            raise InputError(f"parameter 'dimensions' must be from 1 to {WIDTH}")
        act, number = act_of(text)
        if act.endswith("early"):
            self._act(act.removesuffix(" early"))
        facts = torch.tensor([len(text), len(ids)], dtype=torch.float32)
        return {"x": torch.tensor([number, ACTS.index(act)]), "facts": facts}

    def forward(self, batch: Features) -> Features:
        x_BA = batch["x"]
        done = super().forward({"x": x_BA})  # does what the texts say
        rows = len(done["share"])
        vector_BH = torch.zeros(rows, WIDTH - 1 if done["share"].shape[1] == 3 else WIDTH)
        vector_BH[:, 0] = x_BA[:rows, 0]
        vector_BH[:, 1] = batch["facts"][:rows, 0]
        vector_BH[:, 2] = 1.0
        vector_BH += done["share"].sum(1, keepdim=True)
        return {"vector": vector_BH, "_num_tokens": batch["facts"][:rows, 1]}

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        answer = self._answer(outputs, parameters)
        return [int(outputs["_num_tokens"]), answer] if parameters.get("count") else answer

    def warmup(self) -> Sequence[Item]:
        return [Item(kind="json", payload=memoryview(msgspec.json.encode(self.example)))]

    def _read(self, item: Item) -> tuple[str, list[int]]:
        """Return the text with the act in it, and the ids of all tokens."""
        value = item.payload.tobytes().decode() if item.kind == "bytes" else item.json()
        wanted = {"reranking": ({"query", "text"},), "classification": ({"text", "pair"},)}
        if isinstance(value, str) and self._task != "reranking":
            return value, ids_of(value)
        if isinstance(value, dict) and set(value) in (*wanted.get(self._task, ()), {"text"}):
            texts = [value[each] for each in ("query", "pair", "text") if each in value]
            if all(isinstance(each, str) for each in texts):
                return texts[-1], [id for each in texts for id in ids_of(each)]
        if isinstance(value, dict) and set(value) == {"ids"} and isinstance(value["ids"], list):
            for place, id in enumerate(value["ids"]):
                if isinstance(id, bool) or not isinstance(id, int) or id < 0:
                    raise InputError(f"instance.ids[{place}]: expected the id of a token")
                if id >= VOCAB:
                    raise InputError(
                        f"instance.ids[{place}]: {id} is beyond the vocabulary of {VOCAB}; set "
                        "check_embedding_ctx_length=False in LangChain"
                    )
            return " ".join(f"t{id}" for id in value["ids"]), value["ids"]
        raise InputError("instance: expected a text")

    def _answer(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        vector = outputs["vector"]
        number = float(vector[0])
        score = number / SCORE_UNIT
        if self._task == "reranking":
            return number if parameters.get("raw_scores") else score
        if self._task == "classification":
            scores = {"high": score, "low": 1 - score}
            best = sorted(scores, key=lambda label: -scores[label])
            top_k = parameters.get("top_k", len(best))
            assert isinstance(top_k, int)
            return [
                {"label": label, "index": LABELS.index(label), "score": scores[label]}
                for label in best[:top_k]
            ]
        if "dimensions" in parameters:
            vector = vector[: parameters["dimensions"]]  # type: ignore[misc]  # checked before
        if "dimensions" in parameters or parameters.get("normalize"):
            vector = torch.nn.functional.normalize(vector, dim=0)
        form = parameters.get("as", "floats")
        if form == "base64":
            return base64.b64encode(vector.numpy().tobytes()).decode()
        return (
            [vector.tolist()] * int(outputs["_num_tokens"]) if form == "tokens" else vector.tolist()
        )


def vector_of(text: str) -> list[float]:
    """The vector of a text, as an encoder returns it."""
    return [float(act_of(text)[1]), float(len(text)), 1.0, *[0.0] * (WIDTH - 3)]


def floats_of(encoded: str) -> list[float]:
    """The numbers in base64 of float32, as OpenAI's client reads them."""
    data = base64.b64decode(encoded)
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def act_of(text: str) -> tuple[str, int]:
    """The act of a text and its number; others are "ok" with a number of their own."""
    act, _, number = text.rpartition(" ")
    if act in ACTS and number.isdigit():
        return act, int(number) % SCORE_UNIT
    return "ok", binascii.crc32(text.encode()) % SCORE_UNIT


def ids_of(text: str) -> list[int]:
    """The ids of the words of a text."""
    return [binascii.crc32(word.encode()) % VOCAB for word in text.split()]


def tokens_of(text: str, ids: Sequence[int]) -> list[dict[str, object]]:
    """The tokens of a text with their places in it."""
    tokens: list[dict[str, object]] = []
    stop = 0
    for id, word in zip(ids, text.split(), strict=False):
        start = text.index(word, stop)
        stop = start + len(word)
        tokens.append({"id": id, "text": word, "special": False, "start": start, "stop": stop})
    return tokens
