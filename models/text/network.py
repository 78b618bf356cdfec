"""Finds the network of an encoder's folder: our own BERT, or one of transformers. Workers only.

transformers serves BERT as well, and computes the same numbers. Ours stays, since it is faster and
needs no more than the package tokenizers. With the packaged MiniLM, on one core of a busy host, in
alternating pairs, transformers 5.24 took 1.10 times as long for one text of 16 tokens (1.09 to
1.30) and 1.04 for 8 of 32 (1.01 to 1.10). For texts of 40 tokens in the median (log-normal, sigma
0.9), in the buckets of `base.bucket_of` against ours without padding, it took 1.36 times as long
for 8 (0.79 to 1.90) and 1.27 for 32 (0.88 to 1.52). To import it and load the network took 12 to
17 s, against 0.4 to 1.2 s, and 232 to 278 MiB of memory in a worker, against 95.

Axes: B batch, T tokens, H features.
"""

# ruff: noqa: N803, N806 - tensors carry their axes in their names

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor, nn

from inferpool.models.errors import ModelError
from inferpool.models.files.networks import FolderOptions, NetworkFolder
from inferpool.models.files.reading import read_file
from inferpool.models.text.bert import Bert, BertConfig
from inferpool.models.text.folder import TextFolder

_PAST_PADDING = (
    "roberta",
    "xlm-roberta",
    "xlm-roberta-xl",
    "roberta-prelayernorm",
    "camembert",
    "mpnet",
    "ibert",
    "xmod",
    "longformer",
    "data2vec-text",
)
"""Networks that number places from `pad_token_id + 1` on, by their `model_type`
(`create_position_ids_from_input_ids` in transformers)."""

_SEES_PADDING = ("convbert", "fnet", "nystromformer", "yoso")
"""Networks for which it makes a difference what is at the places of padding, or how many there are:
they convolve, transform, or compare tokens with means or by hashes of all places."""
_UNBOUNDED = 1 << 20
"""Tokens of a text for networks that have no table of places."""
_T5 = ("t5", "mt5", "umt5")
"""Networks whose encoder alone is served, as sentence-transformers does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextNetwork:
    """A network of texts that can be built, and what must be known of it.

    It is called with the ids of tokens and their mask, int64 and bool [B, T]. If it `takes_types`,
    the third argument numbers the text of a pair that each token belongs to, int64 [B, T].
    """

    build: Callable[[], nn.Module]
    weights: str | Path | None
    """The file for `Model.load_network`; None if `build` reads weights by itself."""
    width: int
    """Features of a token."""
    vocab_size: int
    max_tokens: int
    """Places that it has for tokens."""
    pad_id: int
    takes_types: bool = False

    @property
    def usual_max_tokens(self) -> int:
        """Most tokens of a text if the folder says nothing."""
        return 512 if self.max_tokens == _UNBOUNDED else self.max_tokens


def network_of(
    folder: TextFolder, weights: str | None, *, trust_remote_code: bool = False
) -> TextNetwork:
    """Find the network that encodes tokens, float32 [B, T, H].

    Args:
        folder: The folder.
        weights: "DEFAULT" for the folder's, a checkpoint's path, or None for random ones.
        trust_remote_code: Whether code that lies in the folder may run.

    Raises:
        ModelError: The folder has no such network.
    """
    if weights == "DEFAULT" and folder.weights is None:
        raise ModelError(f"{folder.path} has no weights: neither model.safetensors nor an index")
    config = bert_config_of(folder, "BertModel")
    if config is not None:
        return bert_network(config, partial(Bert, config), folder, weights)
    # They are read as tensors alone, as ours are.
    options = FolderOptions(
        weights=weights, trust_remote_code=trust_remote_code, pickled_weights=True
    )
    source = NetworkFolder(folder.root, options)
    facts = source.config
    facts.use_cache = False
    auto_class = "AutoModel"
    if facts.model_type in _T5:
        auto_class = "AutoModelForTextEncoding"
    else:
        check_served(folder.path, facts)
    return with_facts_of(
        facts, lambda: TransformersEncoder(source.build(auto_class, unused=("pooler.",)))
    )


def check_served(path: Path, config: Any) -> None:
    """Check that transformers computes what the folder means, whatever the padding.

    Raises:
        ModelError: It may not, or there is a decoder beside the encoder.
    """
    positions = getattr(config, "position_embedding_type", None)
    if str(positions).startswith("relative_key"):
        raise ModelError(
            f"{path}: its position_embedding_type is {positions!r}, which transformers ignores "
            "since release 5, so that all answers would be wrong"
        )
    if config.model_type in _SEES_PADDING:
        raise ModelError(
            f"{path}: {config.model_type} mixes tokens without a mask for padding, so that "
            "answers for a text would depend on the texts beside it"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{path}: {config.model_type} is an encoder with a decoder, and only encoders "
            "and decoders alone are served"
        )


def with_facts_of(
    config: Any, build: Callable[[], nn.Module], *, takes_types: bool = False
) -> TextNetwork:
    """Describe a network that has a configuration of transformers, and reads its own weights.

    Raises:
        ModelError: The configuration lacks a size.
    """
    for name in ("hidden_size", "vocab_size"):
        if not isinstance(getattr(config, name, None), int):
            raise ModelError(f"the config.json of a {config.model_type} says no {name}")
    pad_id = _pad_id(getattr(config, "pad_token_id", None), config.vocab_size)
    places = getattr(config, "max_position_embeddings", None) or _UNBOUNDED
    if places < 0:  # of XLNet, which counts from each token
        places = _UNBOUNDED
    if config.model_type in _PAST_PADDING:
        places -= pad_id + 1
    return TextNetwork(
        build=build,
        weights=None,
        width=config.hidden_size,
        vocab_size=config.vocab_size,
        max_tokens=places,
        pad_id=pad_id,
        takes_types=takes_types,
    )


class TransformersEncoder(nn.Module):
    """A network of transformers that returns the vectors of tokens alone.

    Args:
        inner: An `AutoModel`.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        if getattr(inner, "pooler", None) is not None:
            inner.pooler = nn.Identity()  # nothing here depends on it
        self.inner = inner

    def forward(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Encode texts padded at their ends, where the mask is False."""
        found = self.inner(input_ids=ids_BT, attention_mask=mask_BT.long())
        states_BTH: Tensor = found.last_hidden_state
        return states_BTH


def bert_network(
    config: BertConfig,
    build: Callable[[], nn.Module],
    folder: TextFolder,
    weights: str | None,
    *,
    takes_types: bool = False,
) -> TextNetwork:
    """Describe a network of ours."""
    return TextNetwork(
        build=build,
        weights=folder.weights if weights == "DEFAULT" else weights,
        width=config.hidden_size,
        vocab_size=config.vocab_size,
        max_tokens=config.max_position_embeddings,
        pad_id=_pad_id(config.pad_token_id, config.vocab_size),
        takes_types=takes_types,
    )


def _pad_id(given: object, vocab_size: int) -> int:
    """Return the id in the places of padding; any will do that the network knows."""
    return given if isinstance(given, int) and 0 <= given < vocab_size else 0


def bert_config_of(folder: TextFolder, architecture: str) -> BertConfig | None:
    """Return the configuration of our own network; None if the folder has another.

    Args:
        folder: The folder.
        architecture: Class of transformers that ours stands for.
    """
    config = folder.config
    if config.model_type != "bert" or config.architectures not in (None, [], [architecture]):
        return None
    path = folder.root / "config.json"
    try:
        found = msgspec.json.decode(read_file(path), type=BertConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return None if found.complaint() else found
