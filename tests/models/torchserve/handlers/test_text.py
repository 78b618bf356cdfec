"""Words are found in texts as TorchServe 0.12 finds them; its functions gave the results here."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from inferpool.models.errors import CheckpointError, InputError, SourceError
from inferpool.models.torchserve.handlers.text import (
    TextClassifier,
    TextHandler,
    get_tokenizer,
    ngrams_iterator,
)
from tests.models.torchserve.handlers.archives import (
    TEXT_CLASSIFIER,
    TEXTS,
    StillContext,
    write_archive,
)


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("<b>bold</b> &amp; <i\n>", "bold  <i\n>"),
        ("1 < 2 &#39; <a<b>c", "1 c"),
        ("<<<&lt;", "<<<"),
        ("a > b <br", "a > b <br"),
    ],
)
def test_tags_and_entities_go(text: str, cleaned: str):
    assert TextHandler()._remove_html_tags(text) == cleaned


def test_a_text_of_tags_that_never_end_is_read_once():
    assert len(TextHandler()._remove_html_tags("<" * 300_000)) == 300_000  # else some minutes


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("I'd've", "I wouldve"),
        ("SHAN'T sha'n't", "Shall not shall not"),
        ("y'all'd 'cause o'clock", "you alld ecause of the clock"),
        ("she'll he'll've", "she will he willve"),
        ("somehow's kid'd", "somehow is kidd"),
        ("it\u017f it'\u017f", "it\u017f it\u017f"),
    ],
)
def test_contractions_become_words(text: str, expanded: str):
    assert TextHandler()._expand_contractions(text) == expanded


def test_accents_and_punctuation_go():
    handler = TextHandler()
    assert handler._remove_accented_characters("Café \ufb01x ß") == "Cafe fix "
    assert handler._remove_punctuation("a-b, c!") == handler._remove_puncutation("a.b. c") == "ab c"


def test_english_is_split_into_words_and_punctuation():
    split = get_tokenizer("basic_english")
    assert split('You\'re "in"; (now): <br />go!') == [
        "you",
        "'",
        "re",
        "in",
        "(",
        "now",
        ")",
        "go",
        "!",
    ]
    assert get_tokenizer(None)("A  b;") == ["A", "b;"]
    with pytest.raises(ValueError, match="no tokenizer 'spacy'"):
        get_tokenizer("spacy")


def test_words_come_with_those_that_follow():
    assert [*ngrams_iterator(["here", "we", "are"], 2)] == [
        "here",
        "we",
        "are",
        "here we",
        "we are",
    ]
    assert [*ngrams_iterator(["here"], 3)] == ["here"]


def classifier_at(folder: Path, vocabulary: object, **model: str) -> Any:
    archive = write_archive(folder / "texts", "text_classifier", TEXT_CLASSIFIER)
    if vocabulary is not None:
        torch.save(vocabulary, archive / model.get("sourceVocab", "source_vocab.pt"))
    context = StillContext(archive)
    context.manifest["model"] |= model
    handler = TextClassifier()
    handler.initialize(context)
    return lambda rows: handler.handle(rows, context)


def test_a_batch_is_answered_text_by_text(tmp_path: Path):
    ask = classifier_at(tmp_path, {"good": 1, "bad": 2}, sourceVocab="words.pt")
    good, bad = {"data": b"good"}, {"body": "Bad!"}
    assert ask([good, bad]) == [*ask([good]), *ask([bad])]
    assert sum(ask([bad])[0].values()) == pytest.approx(1)


def test_a_word_that_the_vocabulary_lacks_is_an_error(tmp_path: Path):
    ask = classifier_at(tmp_path, {"good": 1})
    with pytest.raises(InputError, match="unknown"):
        ask([{"data": b"unknown"}])
    with pytest.raises(InputError, match="UTF-8"):
        ask([{"data": b"\xff"}])


@pytest.mark.parametrize(
    ("vocabulary", "error", "message"),
    [
        (None, SourceError, "no source_vocab.pt, .*--extra-files"),
        (nn.Linear(1, 1), CheckpointError, "save a dict of words and numbers"),
        (["a"], CheckpointError, "holds a list, not a dict"),
    ],
)
def test_a_vocabulary_is_a_dict(
    vocabulary: object, error: type[Exception], message: str, tmp_path: Path
):
    with pytest.raises(error, match=message):
        classifier_at(tmp_path, vocabulary)


class Upper(TextClassifier):
    """A user's class that prepares whole batches itself."""

    def preprocess(self, data: Any) -> Any:
        return [row["data"].upper() for row in data]

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        return data

    def postprocess(self, data: Any) -> list[Any]:
        return [len(data), *data]


def test_a_users_class_that_prepares_batches_gets_them_whole():
    context: Any = type("Context", (), {})()
    context.metrics = type("Metrics", (), {"add_time": lambda *_: None})()
    context.model_yaml_config, context.get_request_header = {}, lambda *_: None
    rows = [{"data": each} for each in TEXTS]
    assert Upper().handle(rows, context)[0] == len(TEXTS)
