import hashlib

import pytest

from inferpool.service.settings.draft import read_keys
from inferpool.service.settings.keys import Keys, digest_of, fingerprint_of

A, B = "a" * 16, "b" * 40


def test_keys_stand_on_lines_or_between_commas_beside_comments():
    text = f"# of the shop\n{A}\n\n  # old:\n {B} ,{A},\r\n"
    assert read_keys(text) == Keys(frozenset({digest_of(A.encode()), digest_of(B.encode())}))


@pytest.mark.parametrize("text", ["", "\n", "# none\n", " , "])
def test_there_may_be_no_key(text):
    assert not read_keys(text)


@pytest.mark.parametrize("word", ["short", "x" * 15, "x" * 4097, "é" * 16, "has a space inside it"])
def test_a_bad_key_is_named_by_its_number_alone(word):
    with pytest.raises(ValueError, match="key 2 has") as caught:
        read_keys(f"{A}\n{word}")
    assert word not in str(caught.value)


@pytest.mark.parametrize("word", [f'"{A}"', f"'{A}'"])
def test_quotes_around_a_key_are_not_taken_for_a_part_of_it(word):
    with pytest.raises(ValueError, match="key 1 has quotes around it"):
        read_keys(word)
    assert read_keys(word[1:])


def test_nothing_shows_a_key():
    keys = read_keys(A) | read_keys(B)
    assert len(keys) == 2
    assert str(keys) == "2 hidden"
    assert A not in repr(keys)


def test_a_fingerprint_is_the_beginning_of_what_sha256sum_prints():
    digest = hashlib.sha256(A.encode())
    assert fingerprint_of(digest.digest()) == digest.hexdigest()[:8]
