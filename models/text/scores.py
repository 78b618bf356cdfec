"""The base of models that score texts or pairs of texts. Runs in worker processes only.

Axes: B batch, T tokens, K labels.
"""

# ruff: noqa: N803, N806 - tensors carry their axes in their names

import inspect
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from inferpool.models.errors import ModelError
from inferpool.models.files.hugging_face import architectures_of, is_scorer, why_no_task
from inferpool.models.files.networks import FolderOptions, NetworkFolder
from inferpool.models.item import Features
from inferpool.models.spec import TextFacts
from inferpool.models.text.base import TextModel
from inferpool.models.text.folder import read_folder
from inferpool.models.text.network import with_facts_of

_LEAST_TOKENS = 8
"""Tokens that a pair of texts has at the very least: up to four are special."""


class ScoringNetwork(nn.Module):
    """A network of transformers that returns the scores of labels alone.

    Args:
        inner: An `AutoModelForSequenceClassification`.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids_BT: Tensor, mask_BT: Tensor, types_BT: Tensor | None = None) -> Tensor:
        """Score texts padded at their ends, where the mask is False: float32 [B, K]."""
        given = {} if types_BT is None else {"token_type_ids": types_BT}
        found = self.inner(input_ids=ids_BT, attention_mask=mask_BT.long(), **given)
        logits_BK: Tensor = found.logits.float()
        return logits_BK


class TextScorer(TextModel):
    """Base of rerankers and classifiers: a folder with a `*ForSequenceClassification`.

    Args:
        folder: The folder.
        options: What is allowed, and the weights.
        max_tokens: Most tokens of a text or a pair; None for what the folder says.

    Raises:
        ModelError: There is no such network in the folder, or transformers is not installed.
    """

    can_run_ahead = True

    def __init__(
        self, folder: Path, options: FolderOptions, *, max_tokens: int | None = None
    ) -> None:
        files = read_folder(folder)
        if not is_scorer(files.root):
            raise ModelError(why_no_task(files.root))
        self._network_folder = source = NetworkFolder(files.root, options)
        self.config = config = source.config
        if config.is_encoder_decoder:
            raise ModelError(
                f"{folder}: {config.model_type} is an encoder with a decoder, and only encoders "
                "and decoders alone are served"
            )
        config.use_cache = False
        network = with_facts_of(config, self._build_network, takes_types=_takes_types(source))
        if config.pad_token_id is None:  # decoders find a text's last token by it
            config.pad_token_id = network.pad_id
        super().__init__(files, network, max_tokens=max_tokens)
        if self.max_tokens < _LEAST_TOKENS:
            raise ModelError(
                f"max_tokens must be at least {_LEAST_TOKENS} for pairs, not {self.max_tokens}"
            )

    def _build_network(self) -> nn.Module:
        return ScoringNetwork(self._network_folder.build("AutoModelForSequenceClassification"))

    def facts(self, task: Literal["reranking", "classification"]) -> TextFacts:
        """Return what protocols know of this loaded model."""
        return TextFacts(
            task=task, max_tokens=self.max_tokens, vocab_size=self.tokenizer.vocab_size
        )

    def log_found(self, more: str) -> None:
        """Log what was found in the folder."""
        (architecture, *_) = architectures_of(self._folder.root)
        self._network_folder.log_found(architecture, f"{more}; up to {self.max_tokens} tokens")

    def forward(self, batch: Features) -> Features:
        """Compute scores [B, K], and count the tokens."""
        logits_BK, mask_BT = self.computed(batch)
        return {"_logits": logits_BK, "_num_tokens": mask_BT.sum(1)}


def _takes_types(source: NetworkFolder) -> bool:
    """Return whether a network is told which text of a pair a token belongs to.

    transformers asks the tokenizer's class for that (`model_input_names`): the families with one
    type of tokens have an input for it, and never get it.
    """
    if getattr(source.config, "type_vocab_size", 0) < 2:
        return False
    library: Any = source.library
    kind = library.AutoModelForSequenceClassification._model_mapping[type(source.config)]
    return "token_type_ids" in inspect.signature(kind.forward).parameters
