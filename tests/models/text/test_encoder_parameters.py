"""Parameters of calls to an encoder, and the forms of its answers."""

import base64
import json
import struct

import pytest
import torch
from torch.nn import functional

from inferpool.models.errors import Answered, InputError, ModelError
from inferpool.models.sources.registry import build
from inferpool.models.spec import TensorSpec
from inferpool.models.text.encoder import SentenceEncoder, packaged_folder
from tests.models.items import answers, bytes_item, json_item, loaded
from tests.models.text.recorded import FILE, write_folder

TEXT = "How do I get there?"
IDS = [101, 2129, 2079, 1045, 2131, 2045, 1029, 102]


class Labels(SentenceEncoder):
    """A model that makes something else of the vectors."""

    def __init__(self, folder):
        super().__init__(folder)
        self.outputs = [TensorSpec(name="scores", dtype="float32", shape=(-1, 3))]


@pytest.fixture(scope="module")
def model():
    return loaded(build("minilm_l6", "DEFAULT", {}))


@pytest.fixture(scope="module")
def raw_model(tmp_path_factory):
    """An encoder that does not normalise, with three prompts."""
    folder = write_folder(tmp_path_factory.mktemp("raw"), json.loads(FILE.read_text())["dense"])
    return loaded(build(f"encoder:{folder}", "DEFAULT", {}))


def answer(model, value=TEXT, **parameters):
    return answers(model, [json_item(value, **parameters)])[0]


def test_ids_of_tokens_are_taken_as_they_are(model):
    assert answer(model, {"ids": IDS}) == pytest.approx(answer(model), abs=1e-6)
    assert answer(model, {"ids": IDS[1:-1]}) != pytest.approx(answer(model), abs=1e-3)
    long = {"ids": [101, *[2129] * 600, 102]}
    assert answer(model, long, count=True)[0] == 256
    right, left = (
        answer(model, {"ids": [2129] * 200 + [2079] * 200}, truncation_direction=side)
        for side in ("right", "left")
    )
    assert right == pytest.approx(answer(model, {"ids": [2129] * 200 + [2079] * 56}), abs=1e-6)
    assert left == pytest.approx(answer(model, {"ids": [2129] * 56 + [2079] * 200}), abs=1e-6)


@pytest.mark.parametrize(
    ("value", "parameters", "said"),
    [
        ({"ids": [101, 30522]}, {}, r"id 30522 is outside .* vocabulary, 0 to 30521: .*LangChain"),
        ({"ids": [-1]}, {}, "check_embedding_ctx_length=False"),
        ({"ids": []}, {}, "the list of ids is empty"),
        ({"ids": [1.5]}, {}, r"instance.ids\[0\]: expected a whole number"),
        ({"ids": [101] * 300}, {"truncate": False}, "has more than 256 tokens"),
        ({"ids": [101], "text": "a"}, {}, "'ids' is unknown: expected 'text'"),
        ('"\\ud800"', {}, "instance: "),
        (TEXT, {"dimensions": 385}, "'dimensions' must be from 1 to 384, not 385"),
        (TEXT, {"dimensions": 0}, "'dimensions' must be a whole number from 1 on"),
        (TEXT, {"as": "hex"}, "'as' must be"),
        (TEXT, {"prompt_name": "query"}, "parameter 'prompt_name' is 'query', and the .*: none"),
        (TEXT, {"raw_scores": True}, "'raw_scores' is unknown"),
        (TEXT, {"tokenizer": "decode"}, 'an instance must be like {"ids"'),
        ({"ids": IDS}, {"tokenizer": "tokenize"}, "must be a text, and not ids"),
        ("a" * 300_000, {"tokenizer": "tokenize"}, "at most 262144 characters"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(model, value, parameters, said):
    text = value.encode() if isinstance(value, str) and value[:1] == '"' else value
    with pytest.raises(InputError, match=said):
        model.preprocess(json_item(text, **parameters))


def test_vectors_are_cut_and_made_of_length_one_again(model, raw_model):
    whole = torch.tensor(answer(model))
    cut = torch.tensor(answer(model, dimensions=64))
    torch.testing.assert_close(cut, functional.normalize(whole[:64], dim=0))
    raw = torch.tensor(answer(raw_model))
    assert raw.norm() != pytest.approx(1, abs=1e-3)
    torch.testing.assert_close(
        torch.tensor(answer(raw_model, dimensions=3)), functional.normalize(raw[:3], dim=0)
    )
    assert answer(raw_model, dimensions=3, normalize=False) == pytest.approx(raw[:3].tolist())


def test_a_call_may_say_whether_vectors_have_length_one(model, raw_model):
    raw = torch.tensor(answer(model, normalize=False))
    assert raw.norm() > 2
    torch.testing.assert_close(functional.normalize(raw, dim=0), torch.tensor(answer(model)))
    assert torch.tensor(answer(raw_model, normalize=True)).norm() == pytest.approx(1)
    assert answer(model, normalize=True) == pytest.approx(answer(model))


def test_base64_has_float32_in_little_endian(model):
    num_tokens, text = answer(model, **{"as": "base64", "count": True, "dimensions": 16})
    assert num_tokens == 8
    data = base64.b64decode(text, validate=True)
    assert struct.unpack("<16f", data) == pytest.approx(answer(model, dimensions=16))


def test_each_token_has_a_vector_if_a_call_wants_them(model, tmp_path):
    texts = [TEXT, "a b c d e f g h", TEXT]
    items = [
        json_item(text, **{"as": "tokens", "count": given})
        for text, given in zip(texts, (False, False, True), strict=True)
    ]
    first, second, (num_tokens, third) = answers(model, items)
    assert (len(first), len(second), num_tokens, len(third)) == (8, 10, 8, 8)
    torch.testing.assert_close(torch.tensor(first), torch.tensor(third))
    mean = functional.normalize(torch.tensor(first).mean(0), dim=0)
    torch.testing.assert_close(mean, torch.tensor(answer(model)), atol=1e-6, rtol=0)
    assert answer(model, **{"as": "tokens", "dimensions": 4, "normalize": True})[2] == (
        pytest.approx(functional.normalize(torch.tensor(first[2][:4]), dim=0).tolist(), abs=1e-6)
    )
    folder = write_folder(tmp_path, json.loads(FILE.read_text())["joined"])  # 48 features, of 8
    joined = loaded(build(f"encoder:{folder}", "DEFAULT", {}))
    wide = json_item(TEXT, dimensions=9, **{"as": "tokens"})
    with pytest.raises(InputError, match="'dimensions' must be from 1 to 8, not 9"):
        joined.preprocess(wide)
    pooled, each = (model.preprocess(json_item(TEXT, **given)) for given in ({}, {"as": "tokens"}))
    assert model.bucket(pooled) != model.bucket(each)


def test_calls_of_all_forms_share_a_batch(model):
    given = [{}, {"as": "base64"}, {"dimensions": 2}, {"count": True}, {"normalize": False}]
    whole, text, cut, (num_tokens, counted), raw = answers(
        model, [json_item(TEXT, **each) for each in given]
    )
    assert len(base64.b64decode(text)) == 4 * 384
    assert (len(cut), num_tokens, len(raw)) == (2, 8, 384)
    assert counted == whole


def test_a_prompt_is_chosen_by_its_name(raw_model):
    assert answer(raw_model, "search query: a", prompt_name="document") == pytest.approx(
        answer(raw_model, "a")
    )
    assert answer(raw_model, "a", prompt_name="passage") != pytest.approx(
        answer(raw_model, "a"), abs=1e-3
    )


def test_the_tokenizer_answers_alone(model):
    with pytest.raises(Answered) as found:
        model.preprocess(json_item("Größe x", tokenizer="tokenize"))
    start, first, *_, end = found.value.value
    assert start == {"id": 101, "text": "[CLS]", "special": True, "start": None, "stop": None}
    assert (first["text"], first["start"], first["stop"]) == ("Gr", 0, 2)
    assert end["text"] == "[SEP]"
    with pytest.raises(Answered) as found:
        model.preprocess(json_item("a", tokenizer="tokenize", add_special_tokens=False))
    assert [each["text"] for each in found.value.value] == ["a"]
    for skips, said in ((True, "how do i get there?"), (False, f"[CLS] {TEXT.lower()} [SEP]")):
        with pytest.raises(Answered) as found:
            model.preprocess(json_item({"ids": IDS}, tokenizer="decode", skip_special_tokens=skips))
        assert found.value.value == said


def test_what_is_skipped_of_a_text_is_what_the_cut_leaves_of_its_prompt(tmp_path):
    case = json.loads(FILE.read_text())["no prompt"]
    folder = f"encoder:{write_folder(tmp_path, case)}"
    options = {"pooling": "mean", "max_tokens": 12}
    model, small = (loaded(build(folder, "DEFAULT", {**options, "max_tokens": n})) for n in (12, 4))
    given = {"prompt_name": "query", "truncation_direction": "left"}  # "search query: "
    # With [CLS], four tokens are skipped.
    for num_words, num_skipped in ((3, 4), (7, 4), (8, 3), (10, 1), (11, 0), (30, 0)):
        text = "a " * num_words
        each = torch.tensor(answer(model, text, **given, **{"as": "tokens"}))
        wanted = functional.normalize(each[num_skipped:].mean(0), dim=0)
        torch.testing.assert_close(torch.tensor(answer(model, text, **given)), wanted)
    with pytest.raises(InputError, match="begins with a prompt of 4 tokens, and is cut to 4"):
        small.preprocess(json_item("a", prompt_name="query"))


def test_no_text_is_a_text_too(model):
    assert answer(model, "", count=True)[0] == 2
    assert answer(model, "") == pytest.approx(answer(model, {"ids": [101, 102]}), abs=1e-6)
    assert answers(model, [bytes_item(b"")])[0] == pytest.approx(answer(model, ""))


def test_facts_about_texts_are_there_once_it_is_loaded(model, raw_model):
    facts = model.text
    assert (facts.task, facts.max_tokens, facts.vocab_size) == ("embedding", 256, 30522)
    assert (facts.num_dimensions, facts.pooling) == (384, "mean")
    assert (raw_model.text.num_dimensions, raw_model.text.pooling) == (5, "cls")
    assert loaded(Labels(packaged_folder())).text is None


def test_the_pooling_may_be_chosen(model):
    last = loaded(build(f"encoder:{packaged_folder()}", "DEFAULT", {"pooling": "last"}))
    each = torch.tensor(answer(model, **{"as": "tokens"}))
    torch.testing.assert_close(
        torch.tensor(answer(last)), functional.normalize(each[-1], dim=0), atol=1e-6, rtol=0
    )
    with pytest.raises(ModelError, match="pooling must be one of mean, cls, max, last"):
        build(f"encoder:{packaged_folder()}", "DEFAULT", {"pooling": "median"})
    with pytest.raises(ModelError, match="normalize must be true or false, not 'no'"):
        build("minilm_l6", "DEFAULT", {"normalize": "no"})
