"""Texts to ids of tokens and back, beside what transformers makes of the same files."""

import random

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from inferpool.models.errors import InputError, ModelError
from inferpool.models.text.encoder import packaged_folder
from inferpool.models.text.options import CLASSIFIER, ENCODER, options_of
from inferpool.models.text.prose import PROSE
from inferpool.models.text.tokenizer import Token, Tokenizer

FILE = packaged_folder() / "tokenizer.json"
SHORT, LONG = "Who is Alice?", PROSE


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(FILE, max_tokens=32)


@pytest.fixture(scope="module")
def reference():
    return PreTrainedTokenizerFast(tokenizer_file=str(FILE), pad_token="[PAD]")


def test_texts_are_cut_at_the_wanted_end_as_by_transformers(tokenizer, reference):
    for side in ("right", "left"):
        reference.truncation_side = side
        for text in (SHORT, LONG, "", "x" * 900, "née Ünal " * 40):
            wanted = reference(text, truncation=True, max_length=32)["input_ids"]
            assert tokenizer.single(text, side=side).ids == wanted


def test_tokens_that_are_cut_off_the_beginning_are_counted(tokenizer):
    text = "a " * 40  # and two special tokens
    assert tokenizer.single(text, side="left").num_cut_left == 10
    assert tokenizer.single(text).num_cut_left == 0
    assert tokenizer.single("a", side="left").num_cut_left == 0
    with pytest.raises(ModelError, match="adds 2 tokens to a text, so that none of its own fit"):
        Tokenizer(FILE, max_tokens=2)


def test_pairs_are_cut_as_by_transformers(tokenizer, reference):
    texts = ("", SHORT, LONG, " ".join(LONG.split()[:20]))
    for side in ("right", "left"):
        reference.truncation_side = side
        for first in texts:
            for second in texts[1:]:  # transformers takes an empty one for none
                wanted = reference(
                    first, second, truncation=True, max_length=32, return_token_type_ids=True
                )
                found = tokenizer.pair(first, second, side=side)
                assert found.ids == wanted["input_ids"]
                assert found.types == wanted["token_type_ids"]


def test_what_must_not_be_cut_is_refused(tokenizer):
    with pytest.raises(InputError, match="the text has more than 32 tokens"):
        tokenizer.single(LONG, truncates=False)
    with pytest.raises(InputError, match="the pair of texts has more than 32 tokens"):
        tokenizer.pair(SHORT, LONG, truncates=False)
    with pytest.raises(InputError, match="the list of ids has more than 32 tokens"):
        tokenizer.taken([5] * 33, truncates=False)


def test_ids_are_taken_as_they_are_if_they_are_of_the_vocabulary(tokenizer):
    assert tokenizer.taken([101, 5, 102]) == [101, 5, 102]
    assert tokenizer.taken(range(40)) == [*range(32)]
    assert tokenizer.taken(range(40), side="left") == [*range(8, 40)]
    for ids in ([5, 30522], [-1]):
        with pytest.raises(InputError, match=r"0 to 30521.*check_embedding_ctx_length=False"):
            tokenizer.taken(ids)
    with pytest.raises(InputError, match="the list of ids is empty"):
        tokenizer.taken([])


def test_tokens_have_their_places_in_the_text_in_characters(tokenizer):
    assert tokenizer.tokens("Né 😀 a") == [
        Token(101, "[CLS]", True, None, None),
        Token(11265, "Né", False, 0, 2),
        Token(100, "😀", False, 3, 4),
        Token(1037, "a", False, 5, 6),
        Token(102, "[SEP]", True, None, None),
    ]
    assert [each.text for each in tokenizer.tokens("a", "bc", adds=False)] == ["a", "bc"]
    assert len(tokenizer.tokens(LONG)) > 32


def test_ids_are_decoded_with_or_without_special_tokens(tokenizer):
    ids = tokenizer.single(SHORT).ids
    assert tokenizer.decoded(ids) == "who is alice?"
    assert tokenizer.decoded(ids, skips=False) == "[CLS] who is alice? [SEP]"


def test_a_token_that_the_network_does_not_know_is_refused_by_name():
    tokenizer = Tokenizer(FILE, max_tokens=32, vocab_size=3000)
    assert tokenizer.single("the").ids
    with pytest.raises(InputError, match="the token 'daisy' is unknown to the network"):
        tokenizer.single("daisy")


def test_parameters_are_read_by_name():
    assert options_of({}, ENCODER).truncate
    options = options_of({"as": "base64", "dimensions": 8, "truncation_direction": "left"}, ENCODER)
    assert (options.form, options.dimensions, options.truncation_direction) == (
        "base64",
        8,
        "left",
    )


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"top_k": 1}, "parameter 'top_k' is unknown: this model takes 'truncate', "),
        ({"truncate": 0}, "parameter 'truncate' must be true or false, not 0"),
        ({"as": "hex"}, '\'as\' must be "floats", "base64" or "tokens", not \'hex\''),
        ({"dimensions": 0}, "'dimensions' must be a whole number from 1 on, not 0"),
        ({"dimensions": True}, "'dimensions' must be a whole number from 1 on, not True"),
        ({"truncation_direction": []}, 'must be "right" or "left"'),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(parameters, said):
    with pytest.raises(InputError) as error:
        options_of(parameters, ENCODER)
    assert said in str(error.value)
    assert options_of({"top_k": 1}, CLASSIFIER).top_k == 1


PIECES = ["hello", "unbelievably", " ", "  ", "\n", "東", "京", ".", "!?", "é", "e\u0301", "'s"]


@pytest.mark.parametrize("num_pieces", [20, 300, 3000])
def test_ends_of_long_texts_have_the_tokens_of_the_whole(tokenizer, reference, num_pieces):
    drawn = random.Random(num_pieces)
    texts = ["".join(drawn.choices([*PIECES, "x" * 30], k=num_pieces)) for _ in range(20)]
    for side in ("right", "left"):
        reference.truncation_side = side
        wanted = reference(texts, truncation=True, max_length=32)["input_ids"]
        assert [tokenizer.single(text, side=side).ids for text in texts] == wanted


@pytest.mark.parametrize("piece", ["東京", "a\n", ".", "word "])
def test_most_of_a_long_text_is_never_read(tokenizer, piece, monkeypatch):
    read = []
    library = tokenizers.Tokenizer.from_file(str(FILE))

    class Counting:
        def encode(self, text, **options):
            read.append(len(text))
            return library.encode(text, **options)

        def post_process(self, *encodings):
            return encodings[0]

    monkeypatch.setattr(tokenizer, "_tokenizer", Counting())
    for side in ("right", "left"):
        assert len(tokenizer.single(piece * 500_000, side=side).ids) == 30
        tokenizer.pair(piece * 500_000, SHORT, side=side)
    assert max(read) <= 32 * 64


def test_of_many_spaces_no_more_than_a_million_is_read(tokenizer):
    single = tokenizer.single
    assert single(" " * 200_000 + SHORT) == single(SHORT)
    assert single(" " * 1_100_000 + SHORT) == single("")
    assert single(" " * 1_100_000 + SHORT, side="left") == single(SHORT)
    with pytest.raises(InputError, match="the text has more than 1048576 characters"):
        single(" " * 1_100_000 + SHORT, truncates=False)
