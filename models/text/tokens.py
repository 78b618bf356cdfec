"""Texts as the numbers of their tokens, by a tokenizer.json. Runs in worker processes only."""

from pathlib import Path

from inferpool.models.errors import InputError, ModelError

_CHARS_PER_TOKEN = 16
"""Of a long text so many are looked at first: words have four or five."""


class Tokenizer:
    """Reads what the `tokenizers` library writes. Any number of threads may use it at once.

    Args:
        file: The tokenizer.json.
        max_tokens: What longer texts are cut to, with the tokens that stand for start and end.

    Raises:
        ModelError: It cannot be read, or the library is not installed.
    """

    def __init__(self, file: Path, *, max_tokens: int) -> None:
        try:
            import tokenizers
        except ImportError:
            raise ModelError(
                "texts need the package tokenizers, which is not installed: "
                "pip install 'inferpool[text]'"
            ) from None
        self._max_tokens = max_tokens
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more precise
            raise ModelError(f"{file} cannot be read: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_tokens)

    def ids(self, text: str, *, truncates: bool = True) -> list[int]:
        """The numbers of a text's tokens.

        Args:
            text: Of any length.
            truncates: Whether one that is too long is cut.

        Raises:
            InputError: It is too long, and must not be cut.
        """
        # What is cut off need not be looked at: tokens do not reach over spaces.
        start, space, _ = text[: self._max_tokens * _CHARS_PER_TOKEN].rpartition(" ")
        if space and len(text) > self._max_tokens * _CHARS_PER_TOKEN:
            encoding = self._tokenizer.encode(start)
            if encoding.overflowing:
                return self._cut(encoding.ids, truncates)
        encoding = self._tokenizer.encode(text)
        return self._cut(encoding.ids, truncates) if encoding.overflowing else encoding.ids

    def _cut(self, ids: list[int], truncates: bool) -> list[int]:
        if not truncates:
            raise InputError(f"the text has more than {self._max_tokens} tokens")
        return ids
