"""Turns texts into ids of tokens, and back, by the library tokenizers. Worker processes only."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from inferpool.models.errors import InputError, ModelError

Side: TypeAlias = Literal["left", "right"]
"""The end of a text that is cut off if the text is too long."""
_CHARS_PER_TOKEN = 16
"""Characters per token that are tokenized first of a long text: words have four or five."""
_LONGEST_WORD = 1 << 17
"""Characters of a word from which on its tokens may be those of its beginning or end."""
_MOST_CHARS = 1 << 20
"""Characters from which on no more are read, though they have few tokens, as spaces have."""


class Token(msgspec.Struct, frozen=True):
    """One token of a text, with the fields of Text Embeddings Inference's `/tokenize`."""

    id: int
    text: str
    """The part of the text; the name of the token if it is special."""
    special: bool
    start: int | None
    """Characters before it in the text; None for a special token."""
    stop: int | None


class Tokens(msgspec.Struct, frozen=True):
    """Tokens of a text or of a pair, as a network takes them."""

    ids: list[int]
    types: list[int] | None = None
    """For each token of a pair, the text that it belongs to as the tokenizer numbers them."""
    num_cut_left: int = 0
    """Tokens that the text began with and that were cut off, or fewer if they were never made."""


class Tokenizer:
    """A tokenizer.json of the `tokenizers` library. Any number of threads may use it at once.

    Args:
        file: Path of the tokenizer.json.
        max_tokens: Most tokens of a text or a pair, with those that the tokenizer adds.
        vocab_size: Number of tokens that the network knows; None for the tokenizer's own.

    Raises:
        ModelError: The file cannot be read, it adds more than `max_tokens`, or the library is not
            installed.
    """

    def __init__(self, file: Path, *, max_tokens: int, vocab_size: int | None = None) -> None:
        try:
            import tokenizers
        except ImportError:
            raise ModelError(
                "texts need the package tokenizers, which is not installed: "
                "pip install 'inferpool[text]'"
            ) from None
        self._max_tokens = max_tokens
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more precise
            raise ModelError(f"{file} cannot be read: {error}") from error
        self._tokenizer.no_padding()
        # It would be a state that all threads share; and what was cut off could not be counted.
        self._tokenizer.no_truncation()
        self.vocab_size: int = vocab_size or self._tokenizer.get_vocab_size()
        """Ids are from 0 up to less than this."""
        self._num_added = self._tokenizer.num_special_tokens_to_add(False)
        self._num_added_to_pair = self._tokenizer.num_special_tokens_to_add(True)
        if max_tokens <= self._num_added:
            raise ModelError(
                f"{file} adds {self._num_added} tokens to a text, so that none of its own fit: "
                f"max_tokens is {max_tokens}"
            )

    def single(self, text: str, *, truncates: bool = True, side: Side = "right") -> Tokens:
        """Return the tokens of a text.

        Args:
            text: Of any length.
            truncates: Whether to cut a text that is too long.
            side: The end that is cut off.

        Raises:
            InputError: The text is too long, and must not be cut.
        """
        encoding = self._encoded(text, side, truncates)
        num_cut = len(encoding) - self._max_tokens + self._num_added
        if num_cut > 0:
            self._check_may_cut("text", truncates)
            encoding.truncate(len(encoding) - num_cut, 0, side)
        ids = self._known(self._tokenizer.post_process(encoding).ids)
        return Tokens(ids, num_cut_left=max(0, num_cut) if side == "left" else 0)

    def pair(
        self, first: str, second: str, *, truncates: bool = True, side: Side = "right"
    ) -> Tokens:
        """Return the tokens of two texts that a network sees together.

        What is too much is cut off the longer one, and then off both, as transformers does by
        `truncation="longest_first"`.

        Raises:
            InputError: They are too long, and must not be cut.
        """
        most = self._max_tokens
        parts = [self._encoded(each, side, truncates) for each in (first, second)]
        lengths = [len(part) for part in parts]
        if sum(lengths) + self._num_added_to_pair > most:
            self._check_may_cut("pair of texts", truncates)
            for part, length in zip(
                parts, _longest_first(lengths, most - self._num_added_to_pair), strict=True
            ):
                part.truncate(length, 0, side)
        whole = self._tokenizer.post_process(*parts)
        return Tokens(self._known(whole.ids), whole.type_ids)

    def taken(
        self, ids: Sequence[int], *, truncates: bool = True, side: Side = "right"
    ) -> list[int]:
        """Return ids that a client made by itself, cut to the most tokens.

        Raises:
            InputError: There are none or too many, or one is no id of this vocabulary.
        """
        if not ids:
            raise InputError("the list of ids is empty: a text has at least one token")
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.vocab_size:
            wrong = low if low < 0 else high
            raise InputError(
                f"id {wrong} is outside of this model's vocabulary, 0 to {self.vocab_size - 1}: "
                "another tokenizer made it. LangChain's OpenAIEmbeddings sends ids of OpenAI's "
                "vocabulary unless it is made with check_embedding_ctx_length=False"
            )
        if len(ids) <= self._max_tokens:
            return list(ids)
        self._check_may_cut("list of ids", truncates)
        most = self._max_tokens
        return list(ids[:most] if side == "right" else ids[-most:])

    def tokens(self, text: str, second: str | None = None, *, adds: bool = True) -> list[Token]:
        """Return all tokens of a text or a pair; `adds` says whether with the special ones."""
        whole = self._tokenizer.encode(text, second, add_special_tokens=adds)
        texts = {0: text, 1: second or ""}
        return [
            Token(id, name, True, None, None)
            if is_special
            else Token(id, texts[number or 0][start:stop], False, start, stop)
            for id, name, is_special, number, (start, stop) in zip(
                whole.ids,
                whole.tokens,
                whole.special_tokens_mask,
                whole.sequence_ids,
                whole.offsets,
                strict=True,
            )
        ]

    def decoded(self, ids: Sequence[int], *, skips: bool = True) -> str:
        """Return the text of some ids; `skips` says whether to leave out the special ones."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skips)
        return text

    def _encoded(self, text: str, side: Side, truncates: bool) -> Any:
        """Encode a text without special tokens; of a long one, an end with more tokens than fit.

        A word is tokenized alone, so only the word that is cut may have other tokens in the end
        than in the text. What lies beyond is left out, as a megabyte of it takes seconds.

        Raises:
            InputError: Something is left out of an end that fits, and the text must not be cut.
        """
        most = self._max_tokens
        num_chars = most * _CHARS_PER_TOKEN
        while num_chars < len(text):
            end = text[:num_chars] if side == "right" else text[-num_chars:]
            encoding = self._tokenizer.encode(end, add_special_tokens=False)
            if len(encoding) > most:
                words = encoding.word_ids
                past, cut = (most, -1) if side == "right" else (-1 - most, 0)
                if words[past] != words[cut] or num_chars >= _LONGEST_WORD:
                    return encoding
            if num_chars >= _MOST_CHARS:
                if not truncates:
                    raise InputError(f"the text has more than {_MOST_CHARS} characters")
                return encoding
            num_chars = min(num_chars * 4, _MOST_CHARS)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _check_may_cut(self, name: str, truncates: bool) -> None:
        if not truncates:
            raise InputError(f"the {name} has more than {self._max_tokens} tokens")

    def _known(self, ids: list[int]) -> list[int]:
        # The tokenizer's size says little: numbers may be left out among its ids.
        if max(ids, default=0) >= self.vocab_size:
            name = self._tokenizer.id_to_token(max(ids))
            raise InputError(
                f"the token {name!r} is unknown to the network, which knows {self.vocab_size} "
                "tokens, fewer than the tokenizer of its folder"
            )
        return ids


def _longest_first(lengths: Sequence[int], most: int) -> list[int]:
    """Return the lengths that two texts are cut to, so that their sum is `most`."""
    short = min(*lengths, most // 2)
    return [short, most - short] if lengths[0] <= lengths[1] else [most - short, short]
