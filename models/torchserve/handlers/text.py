"""TorchServe's handlers for texts, by a vocabulary in the archive. Worker processes only."""

import re
import string
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from inferpool.models.errors import CheckpointError, InputError, SourceError
from inferpool.models.files.checkpoint import first_line
from inferpool.models.torchserve.handlers.base import BaseHandler
from inferpool.models.torchserve.handlers.util import ENTITY, map_class_to_label

_TAG_OR_ENTITY = re.compile(r"<[^>\n]*(>?)|" + ENTITY.pattern)
"""A tag without its end matches too, or each "<" in a text of them would read on to its end."""

_ENDINGS = {
    "'d": ("would", "he i it she that there they we you"),
    "'ll": ("will", "he how i it she they we what who you"),
    "'m": ("am", "i"),
    "'re": ("are", "they we what you"),
    "'s": ("is", "he how it she that there what when where who why"),
    "'ve": (
        "have",
        "could i might must should so they to we what when where who why will would you",
    ),
    "n't": (
        "not",
        "are could did does do had has have is may might must need ought should was were would",
    ),
}
"""Words before an ending, with the word that it stands for."""
_CONTRACTIONS = {
    f"{word}{ending}": f"{word} {full}"
    for ending, (full, words) in _ENDINGS.items()
    for word in words.split()
} | {
    "ain't": "is not",
    "can't": "cannot",
    "'cause": "because",
    "how'd": "how did",
    "let's": "let us",
    "ma'am": "madam",
    "o'clock": "of the clock",
    "sha'n't": "shall not",
    "shan't": "shall not",
    "so's": "so as",
    "where'd": "where did",
    "won't": "will not",
    "y'all": "you all",
}
"""Those that TorchServe 0.12 finds in a text in small letters; vocabularies were made with them."""
_CONTRACTION = re.compile(
    "|".join(
        f"{first}(?:{'|'.join(each[1:] for each in found)})"
        for first, found in groupby(sorted(_CONTRACTIONS), key=itemgetter(0))
    ),
    re.IGNORECASE | re.ASCII,
)
"""By first letters, which is four times as fast as one after the other."""
_SPACED = str.maketrans({each: f" {each} " for each in "'.,()!?"} | {";": " ", ":": " "})


def get_tokenizer(tokenizer: str | None, language: str = "en") -> Callable[[str], list[str]]:
    """Return a function that splits a text into words.

    Args:
        tokenizer: None to split at spaces; "basic_english" for small letters, with punctuation as
            words of its own.
        language: "en".
    """
    if tokenizer is None:
        return str.split
    if tokenizer != "basic_english" or language != "en":
        raise ValueError(f"there is no tokenizer {tokenizer!r} for {language!r}")
    return _basic_english


def ngrams_iterator(token_list: Sequence[str], ngrams: int) -> Iterator[str]:
    """Yield words, then each two that follow each other, and so on up to a number of them."""
    yield from token_list
    for num in range(2, ngrams + 1):
        for first in range(len(token_list) - num + 1):
            yield " ".join(token_list[first : first + num])


class TextHandler(BaseHandler):
    """Loads a vocabulary beside the network, and cleans texts up."""

    def __init__(self) -> None:
        super().__init__()
        self.source_vocab: Any = None
        self.tokenizer = get_tokenizer("basic_english")
        self.input_text = None

    def initialize(self, context: Any) -> None:
        """Load the network, and the vocabulary that `source_vocab.pt` holds.

        Raises:
            SourceError: The archive has no such file.
            CheckpointError: It holds something other than words and numbers.
        """
        super().initialize(context)
        self.initialized = False
        folder = str(context.system_properties.get("model_dir"))
        named = self.manifest["model"].get("sourceVocab")  # of archives before TorchServe 0.2
        path = str(Path(folder, named)) if named else self.get_source_vocab_path(context)
        try:
            self.source_vocab = torch.load(path, weights_only=True)
        except Exception as error:  # a damaged file makes torch.load raise almost anything
            raise CheckpointError(
                f"{path} cannot be read without running code of its own ({first_line(error)}): "
                "save a dict of words and numbers; torchtext's Vocab has it as get_stoi()"
            ) from error
        if not isinstance(self.source_vocab, Mapping):
            kind = type(self.source_vocab).__name__
            raise CheckpointError(f"{path} holds a {kind}, not a dict of words and numbers")
        self.initialized = True

    def get_source_vocab_path(self, ctx: Any) -> str:
        """Return the path of the vocabulary.

        Raises:
            SourceError: The archive has none.
        """
        path = Path(str(ctx.system_properties.get("model_dir")), "source_vocab.pt")
        if not path.is_file():
            raise SourceError(
                "the archive has no source_vocab.pt, which this handler needs: add it with "
                "--extra-files"
            )
        return str(path)

    def get_word_token(self, input_tokens: Sequence[str]) -> list[str]:
        """Return words without the mark that byte-pair encoding gives those after a space."""
        return [token.replace("Ġ", "") for token in input_tokens]

    def _remove_html_tags(self, text: str) -> str:
        return _TAG_OR_ENTITY.sub(_without_markup, text)

    def _expand_contractions(self, text: str) -> str:
        return _CONTRACTION.sub(_expanded, text).replace("'", "")

    def _remove_accented_characters(self, text: str) -> str:
        return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()

    def _remove_punctuation(self, text: str) -> str:
        return text.translate(str.maketrans("", "", string.punctuation))

    def _remove_puncutation(self, text: str) -> str:
        return self._remove_punctuation(text)  # misspelt in older TorchServe

    def _tokenize(self, text: str) -> list[str]:
        return self.tokenizer(text)


class NgramClassifier(TextHandler):
    """Answers with the probability of each class of a text: `{name: probability}`.

    Its network takes numbers of words and pairs of words, and offsets, as `nn.EmbeddingBag` does.
    """

    ngrams = 2

    def preprocess(self, data: Any) -> Any:
        """Return the numbers of the first text's words and pairs, [words], and its words.

        Raises:
            InputError: It is no text, or the vocabulary lacks a word of it.
        """
        text = data[0].get("data") or data[0].get("body")
        try:
            text = text.decode("utf-8") if isinstance(text, bytes | bytearray) else text
        except UnicodeDecodeError as error:
            raise InputError(f"the text is no UTF-8: {error}") from error
        if not isinstance(text, str):
            raise InputError(f"the input is a text, not {type(text).__name__}")
        text = self._expand_contractions(self._remove_html_tags(text).lower())
        text = self._remove_punctuation(self._remove_accented_characters(text))
        words = self._tokenize(text)
        try:
            numbers = [self.source_vocab[each] for each in ngrams_iterator(words, self.ngrams)]
        except KeyError as error:
            raise InputError(f"the vocabulary lacks {error}") from error
        return torch.as_tensor(numbers, device=self.device), words

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the network with a text's numbers, and 0 as the offset of its only text."""
        numbers, _ = data
        return super().inference(numbers, torch.as_tensor([0], device=self.device))

    def postprocess(self, data: Any) -> list[Any]:
        """Return the names and probabilities of all classes."""
        return map_class_to_label(torch.softmax(data, dim=1).tolist(), self.mapping)

    def handle(self, data: Any, context: Any) -> list[Any]:
        """Answer a batch, one text after another: TorchServe's own answers batches of one."""
        if len(data) == 1 or type(self).preprocess is not NgramClassifier.preprocess:
            return super().handle(data, context)
        return [
            answer for row in data for answer in super(NgramClassifier, self).handle([row], context)
        ]


TextClassifier = NgramClassifier
"""The name that users' handlers import, and that a model of texts has here too."""


def _basic_english(text: str) -> list[str]:
    text = text.lower().replace('"', "").replace("<br />", " ")
    return text.translate(_SPACED).split()


def _without_markup(found: re.Match[str]) -> str:
    is_tag = found[1] or found[0].startswith("&")
    return "" if is_tag else ENTITY.sub("", found[0])


def _expanded(found: re.Match[str]) -> str:
    """Return the full words, with the first letter as it was."""
    return found[0][0] + _CONTRACTIONS[found[0].lower()][1:]
