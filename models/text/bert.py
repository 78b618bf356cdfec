"""BERT as an encoder: from the ids of tokens to their vectors. Runs in worker processes only.

Architecture: Devlin et al., 2018, arXiv:1810.04805. The modules have the names of Hugging Face
checkpoints, so that weights load by name.

Axes: B batch, T tokens, H features of a token, N heads, D features of a head.
"""

# ruff: noqa: N803, N806 - tensors carry their axes in their names

from collections.abc import Callable, Mapping
from typing import TypeAlias

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

Where: TypeAlias = "Tensor | list[int]"
"""Tokens that belong together: a mask [B, 1, 1, T], or lengths of texts that lie in one row."""
_ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_new": lambda: nn.GELU(approximate="tanh"),
    "gelu_pytorch_tanh": lambda: nn.GELU(approximate="tanh"),
    "relu": nn.ReLU,
}


class BertConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a BERT's config.json that matter to inference."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    hidden_act: str = "gelu"
    position_embedding_type: str = "absolute"
    is_decoder: bool = False
    pad_token_id: int | None = None

    def complaint(self) -> str:
        """Return why `Bert` cannot be built so; empty if it can."""
        if self.hidden_act not in _ACTIVATIONS:
            known = ", ".join(_ACTIVATIONS)
            return f"its hidden_act is {self.hidden_act!r}; known are {known}"
        if self.position_embedding_type != "absolute":
            return (
                f"its position_embedding_type is {self.position_embedding_type!r}, "
                "and only 'absolute' is known"
            )
        if self.is_decoder:
            return "it is a decoder, and only encoders are known"
        if self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads:
            return (
                f"{self.hidden_size} features do not divide into {self.num_attention_heads} heads"
            )
        return ""


class Bert(nn.Module):
    """Encoder of tokens and their mask, int64 and bool [B, T], to vectors [B, T, H].

    Args:
        config: Sizes; its `complaint()` is empty.
    """

    packs = False
    """Only tokens are computed, and no padding: all texts of a batch lie in one row, and each
    attends to itself. Eight texts of 40 tokens in the median (log-normal, sigma 0.9) took MiniLM
    on one core 0.87 (0.85-0.90 in seven rounds) of the time of buckets, and 0.79 (0.76-0.81) in
    bfloat16. Not for networks that are split or traced, as lengths are no tensors."""

    unused_weights = ("pooler.", "embeddings.position_ids")
    """Weights in checkpoints that only training uses, and the buffer of position numbers."""
    tensor_plan: Mapping[str, str] = {
        "embeddings.word_embeddings": "embedding",
        "embeddings.position_embeddings": "embedding",
        "encoder.layer.*.attention": "attention",
        "encoder.layer.*.intermediate.dense": "column",
        "encoder.layer.*.output.dense": "row",
    }
    """Layers that ranks of a tensor-parallel replica share."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.embeddings = _Embeddings(config)
        self.encoder = _Encoder(config)

    def forward(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Encode texts padded at their ends, where the mask is False."""
        return self.encoded(ids_BT, mask_BT)

    def encoded(self, ids_BT: Tensor, mask_BT: Tensor, types_BT: Tensor | None = None) -> Tensor:
        """Like `forward`; the types, int64 [B, T], number the text of a pair of each token.

        torch.fx can trace no argument of `forward` that may be None.
        """
        if self.packs:
            return self._packed(ids_BT, mask_BT, types_BT)
        x_BTH: Tensor = self.encoder(self.embeddings(ids_BT, types_BT), mask_BT[:, None, None, :])
        return x_BTH

    def _packed(self, ids_BT: Tensor, mask_BT: Tensor, types_BT: Tensor | None) -> Tensor:
        """Encode the same without padding; vectors of padding are zeros."""
        places_1P = mask_BT.nonzero()[None, :, 1]  # P: all tokens of the batch, text by text
        types_1P = None if types_BT is None else types_BT[mask_BT][None]
        embedded_1PH = self.embeddings(ids_BT[mask_BT][None], types_1P, places_1P)
        packed_1PH = self.encoder(embedded_1PH, mask_BT.sum(1).tolist())
        x_BTH: Tensor = packed_1PH.new_zeros(*ids_BT.shape, packed_1PH.shape[2])
        x_BTH[mask_BT] = packed_1PH[0]
        return x_BTH


class _Embeddings(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, width)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, width)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)
        self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps)

    def forward(
        self, ids_BT: Tensor, types_BT: Tensor | None = None, places_1T: Tensor | None = None
    ) -> Tensor:
        first_1T = torch.ones_like(ids_BT[:1])
        types_BT = first_1T - 1 if types_BT is None else types_BT
        # Counted by tensors: a range of a length would be none that torch.fx can trace.
        places_1T = first_1T.cumsum(1) - 1 if places_1T is None else places_1T
        x_BTH = self.word_embeddings(ids_BT) + self.token_type_embeddings(types_BT)
        normed: Tensor = self.LayerNorm(x_BTH + self.position_embeddings(places_1T))
        return normed


class _Encoder(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))

    def forward(self, x_BTH: Tensor, where: Where) -> Tensor:
        for layer in self.layer:
            x_BTH = layer(x_BTH, where)
        return x_BTH


class _Layer(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = _Attention(config)
        self.intermediate = _Intermediate(config)
        self.output = _Output(config.intermediate_size, config)

    def forward(self, x_BTH: Tensor, where: Where) -> Tensor:
        x_BTH = self.attention(x_BTH, where)
        y_BTH: Tensor = self.output(self.intermediate(x_BTH), x_BTH)
        return y_BTH


class _Attention(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.self = _SelfAttention(config)
        self.output = _Output(config.hidden_size, config)

    def forward(self, x_BTH: Tensor, where: Where) -> Tensor:
        y_BTH: Tensor = self.output(self.self(x_BTH, where), x_BTH)
        return y_BTH


class _SelfAttention(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self._head_width = width // config.num_attention_heads

    def forward(self, x_BTH: Tensor, where: Where) -> Tensor:
        q_BNTD, k_BNTD, v_BNTD = (
            # As many heads as there are: a rank of a split network has some of them.
            project(x_BTH).unflatten(-1, (-1, self._head_width)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        attend = functional.scaled_dot_product_attention
        if isinstance(where, list):
            texts = zip(*(x.split(where, 2) for x in (q_BNTD, k_BNTD, v_BNTD)), strict=True)
            y_BNTD = torch.cat([attend(*each) for each in texts], 2)
        else:
            y_BNTD = attend(q_BNTD, k_BNTD, v_BNTD, where)
        return y_BNTD.transpose(1, 2).flatten(2)


class _Intermediate(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = _ACTIVATIONS[config.hidden_act]()

    def forward(self, x_BTH: Tensor) -> Tensor:
        y: Tensor = self.activation(self.dense(x_BTH))
        return y


class _Output(nn.Module):
    def __init__(self, in_features: int, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(in_features, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, y: Tensor, x_BTH: Tensor) -> Tensor:
        normed: Tensor = self.LayerNorm(self.dense(y) + x_BTH)
        return normed
