"""The base of models that score texts or pairs of texts. Runs in worker processes only.

BERT is our own network, as for encoders; the others are those of transformers. With 6 layers of 384
features, 32 pairs of 60 tokens in the median (log-normal, sigma 0.7) took transformers 5.24 1.12
times as long as ours without padding (1.06 to 1.16, one core, alternating), in groups of about the
same length, and 3.8 times padded to the longest. Ours is ready without importing transformers.

Axes: B batch, T tokens, H features of a token, K labels.
"""

# ruff: noqa: N803, N806 - tensors carry their axes in their names

import inspect
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from torch import Tensor, nn

from inferpool.models.errors import ModelError
from inferpool.models.files.hugging_face import TEXT_SUFFIX, is_scorer, why_no_task
from inferpool.models.files.networks import FolderOptions, NetworkFolder
from inferpool.models.files.reading import read_file
from inferpool.models.item import Features
from inferpool.models.spec import TextFacts
from inferpool.models.text.base import TextModel
from inferpool.models.text.bert import Bert, BertConfig
from inferpool.models.text.folder import TextFolder, read_folder
from inferpool.models.text.network import (
    TextNetwork,
    bert_config_of,
    bert_network,
    check_served,
    with_facts_of,
)

logger = logging.getLogger(__name__)

_LEAST_TOKENS = 8
"""Tokens that a pair of texts has at the very least: up to four are special."""
_NumLabels: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
"""More would be no classes: their names alone would fill the memory."""


class ScoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of config.json that say what a network's scores mean."""

    id2label: Mapping[int, Any] | None = None
    num_labels: _NumLabels | None = None
    problem_type: str | None = None

    @property
    def labels(self) -> list[str]:
        """Names of the labels; transformers writes none if there are two without names."""
        names = self.id2label
        if names:
            return [str(names[number]) for number in sorted(names)]
        return [f"LABEL_{number}" for number in range(self.num_labels or 2)]


class BertScorer(nn.Module):
    """BERT with a head, as `BertForSequenceClassification`: float32 [B, K].

    Args:
        config: Sizes; its `complaint()` is empty.
        num_labels: K.
    """

    unused_weights = ("bert.embeddings.position_ids",)
    tensor_plan: Mapping[str, str] = {f"bert.{name}": how for name, how in Bert.tensor_plan.items()}

    def __init__(self, config: BertConfig, num_labels: int) -> None:
        super().__init__()
        self.bert = _PooledBert(config)
        self.classifier = nn.Linear(config.hidden_size, num_labels)

    def forward(self, ids_BT: Tensor, mask_BT: Tensor, types_BT: Tensor) -> Tensor:
        """Score texts padded at their ends, where the mask is False."""
        x_BH: Tensor = self.bert.pooler(self.bert.encoded(ids_BT, mask_BT, types_BT)[:, 0])
        logits_BK: Tensor = self.classifier(x_BH)
        return logits_BK.float()


class _PooledBert(Bert):
    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.pooler = _Pooler(config.hidden_size)


class _Pooler(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)

    def forward(self, x_BH: Tensor) -> Tensor:
        y_BH: Tensor = self.dense(x_BH).tanh()
        return y_BH


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
        if options.weights == "DEFAULT" and files.weights is None:
            raise ModelError(f"{folder} has no weights: neither model.safetensors nor an index")
        self.config = _read_config(files.root)
        self._options = options
        self._found = f"Bert{TEXT_SUFFIX}"
        network = self._network_of_ours(files) or self._network_of_transformers(files)
        super().__init__(files, network, max_tokens=max_tokens)
        if self.max_tokens < _LEAST_TOKENS:
            raise ModelError(
                f"max_tokens must be at least {_LEAST_TOKENS} for pairs, not {self.max_tokens}"
            )

    def _network_of_ours(self, files: TextFolder) -> TextNetwork | None:
        config = bert_config_of(files, f"Bert{TEXT_SUFFIX}")
        if config is None or config.type_vocab_size < 2:
            return None
        build = partial(BertScorer, config, len(self.config.labels))
        return bert_network(config, build, files, self._options.weights, takes_types=True)

    def _network_of_transformers(self, files: TextFolder) -> TextNetwork:
        # Pickled weights are read as tensors alone, as ours are.
        source = NetworkFolder(files.root, replace(self._options, pickled_weights=True))
        config = source.config
        check_served(files.path, config)
        if getattr(config, "summary_type", "") == "last":
            raise ModelError(
                f"{files.path}: {config.model_type} reads the last place of a batch, where shorter "
                "texts have padding"
            )
        config.use_cache = False
        if getattr(config, "pad_token_id", None) is None:
            # Decoders find a text's last token by it: so it must be one that ends no text.
            ends = getattr(config, "eos_token_id", None)
            config.pad_token_id = ends if isinstance(ends, int) else config.vocab_size - 1
        auto = f"AutoModel{TEXT_SUFFIX}"
        network = with_facts_of(
            config, lambda: ScoringNetwork(source.build(auto)), takes_types=_takes_types(source)
        )
        name = (config.architectures or [config.model_type])[0]
        self._found = f"{name} of transformers {source.library.__version__}"
        return network

    def facts(self, task: Literal["reranking", "classification"]) -> TextFacts:
        """Return what protocols know of this loaded model."""
        return TextFacts(
            task=task, max_tokens=self.max_tokens, vocab_size=self.tokenizer.vocab_size
        )

    def log_found(self, more: str) -> None:
        """Log what was found in the folder."""
        weights = self._options.weights
        logger.info(
            "%s: %s, with %s; %s; up to %d tokens",
            self._folder.path,
            self._found,
            "the folder's weights" if weights == "DEFAULT" else weights or "random weights",
            more,
            self.max_tokens,
        )

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
    kinds = library.AutoModelForSequenceClassification._model_mapping
    kind = kinds.get(type(source.config), None)  # None: its code lies in the folder
    return kind is None or "token_type_ids" in inspect.signature(kind.forward).parameters


def _read_config(folder: Path) -> ScoreConfig:
    path = folder / "config.json"
    try:
        return msgspec.json.decode(read_file(path), type=ScoreConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
