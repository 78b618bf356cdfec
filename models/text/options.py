"""Reads the parameters of calls to models of texts. Runs in worker processes only."""

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Literal, TypeAlias

import msgspec

from inferpool.models.errors import InputError
from inferpool.models.text.tokenizer import Side

_OF_ALL = (
    "truncate",
    "truncation_direction",
    "count",
    "tokenizer",
    "add_special_tokens",
    "skip_special_tokens",
)
ENCODER = (*_OF_ALL, "normalize", "dimensions", "prompt_name", "as")
"""Names of the parameters of an encoder."""
RERANKER = (*_OF_ALL, "raw_scores")
CLASSIFIER = (*_OF_ALL, "raw_scores", "top_k")
_BOOLEAN = "true or false"
_MEANT = {
    "truncation_direction": '"right" or "left"',
    "tokenizer": '"tokenize" or "decode"',
    "dimensions": "a whole number from 1 on",
    "top_k": "a whole number from 1 on",
    "prompt_name": "a string",
    "as": '"floats", "base64" or "tokens"',
}
"""Values of each parameter that is not true or false."""
_PLACE = re.compile(r"\$\.(\w+)")
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a call; each has the name of its field."""

    truncate: bool = True
    """Cut what is too long; else refuse it."""
    truncation_direction: Side = "right"
    """The end that is cut off."""
    count: bool = False
    """Answer with the number of tokens and the answer."""
    tokenizer: Literal["tokenize", "decode"] | None = None
    """Answer with the tokens of a text, or with the text of ids; the network computes nothing."""
    add_special_tokens: bool = True
    """Show the tokens that the tokenizer adds, too."""
    skip_special_tokens: bool = True
    """Leave them out of a decoded text."""
    normalize: bool | None = None
    """Scale vectors to length 1; None for what the folder says."""
    dimensions: _Count | None = None
    """Numbers that vectors are cut to."""
    prompt_name: str | None = None
    """A prompt of the folder that begins the text."""
    form: Literal["floats", "base64", "tokens"] = msgspec.field(default="floats", name="as")
    """A list of numbers, their bytes in base64, or a list of numbers for each token."""
    raw_scores: bool = False
    """Answer with what the network computed, rather than with probabilities."""
    top_k: _Count | None = None
    """Number of labels to answer with."""


_USUAL = TextOptions()


def options_of(parameters: Mapping[str, object], taken: Collection[str]) -> TextOptions:
    """Read the parameters of a call; `taken` has the names that the model knows.

    Raises:
        InputError: One is unknown, or its value is wrong.
    """
    if not parameters:
        return _USUAL
    for name in parameters:
        if name not in taken:
            known = ", ".join(repr(each) for each in taken)
            raise InputError(f"parameter {name!r} is unknown: this model takes {known}")
    try:
        return msgspec.convert(parameters, TextOptions)
    except msgspec.ValidationError as error:
        place = _PLACE.search(str(error))
        assert place is not None
        name = place[1]
        raise InputError(
            f"parameter {name!r} must be {_MEANT.get(name, _BOOLEAN)}, not {parameters[name]!r}"
        ) from None
