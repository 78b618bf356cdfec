"""Networks of transformers that score texts, beside what transformers itself computes."""

import json
import logging
import shutil

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from inferpool.models.errors import Answered, InputError, ModelError, SourceError
from inferpool.models.files.networks import FolderOptions
from inferpool.models.sources.registry import build
from inferpool.models.text.classifier import TextClassifier
from inferpool.models.text.encoder import packaged_folder
from inferpool.models.text.prose import PROSE
from inferpool.models.text.reranker import Reranker
from inferpool.models.text.scores import BertScorer, ScoreConfig
from tests.models.items import answers, bytes_item, json_item, loaded, run

pytest.importorskip("transformers")
from tests.models.text.scorers import FAMILIES, logits_of, write_scorer

QUERY = "Who is Alice?"
TEXTS = ("a rabbit", PROSE, "", "She is a girl that fell down a very deep well, née Liddell")
NAMES = {"id2label": {0: "cat", 1: "dog", 2: "eel"}}


def pairs(**parameters):
    return [json_item({"query": QUERY, "text": text}, **parameters) for text in TEXTS]


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    folder = write_scorer(tmp_path_factory.mktemp("scorers") / "rank", num_labels=1)
    return folder, loaded(build(str(folder), "DEFAULT", {}))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = write_scorer(tmp_path_factory.mktemp("scorers") / "labels", **NAMES)
    return folder, loaded(build(str(folder), "DEFAULT", {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_scores_pairs_as_transformers_does(tmp_path, family):
    folder = write_scorer(tmp_path / family, family, num_labels=1)
    model = loaded(build(f"reranker:{folder}", "DEFAULT", {}))
    wanted = [logits_of(folder, QUERY, text or " ").item() for text in TEXTS]
    assert max(wanted) - min(wanted) > 0.05  # they depend on the text
    together = answers(model, pairs(raw_scores=True))
    alone = [answers(model, [item])[0] for item in pairs(raw_scores=True)]
    assert together == pytest.approx(wanted, abs=1e-5)
    assert alone == pytest.approx(wanted, abs=1e-5)
    assert isinstance(model.network, BertScorer) == (family == "Bert")


def test_a_decoder_scores_the_last_token_of_each_text(tmp_path):
    folder = write_scorer(tmp_path / "qwen", "Qwen3", num_labels=1)
    texts = ("a rabbit", PROSE, "It rains.")
    items = [json_item({"query": QUERY, "text": text}, raw_scores=True) for text in texts]
    wanted = [logits_of(folder, QUERY, text).item() for text in texts]
    assert answers(loaded(build(str(folder), "DEFAULT", {})), items) == pytest.approx(
        wanted, abs=1e-5
    )


def test_a_network_that_reads_the_last_place_of_a_batch_is_refused(tmp_path):
    folder = write_scorer(tmp_path / "one", num_labels=1)
    config = {"model_type": "xlnet", "architectures": ["XLNetForSequenceClassification"]}
    (folder / "config.json").write_text(json.dumps(config | {"id2label": {"0": "x"}}))
    with pytest.raises(ModelError, match="xlnet reads the last place of a batch"):
        build(str(folder), "DEFAULT", {})


def test_a_reranker_answers_with_a_number_from_0_to_1(reranker, caplog):
    folder, model = reranker
    raw = answers(model, pairs(raw_scores=True))
    scores = answers(model, pairs())
    assert scores == pytest.approx(torch.tensor(raw).sigmoid().tolist())
    assert all(0 < each < 1 for each in scores)
    counted = answers(model, pairs(count=True))
    assert [score for _, score in counted] == scores
    assert [num for num, _ in counted] == [9, 64, 7, 22]
    assert run(model, pairs())["score"].shape == (4,)
    assert model.text.task == "reranking"
    assert (model.text.max_tokens, model.text.vocab_size) == (64, 30522)
    with caplog.at_level(logging.INFO):
        loaded(build(str(folder), "DEFAULT", {"max_tokens": 32}))
    assert (
        "BertForSequenceClassification, with the folder's weights; one label, so a reranker of "
        "pairs of query and text; up to 32 tokens"
    ) in caplog.text


def test_activations_that_a_folder_names_make_no_difference(reranker, tmp_path):
    folder, model = reranker
    config = json.loads((folder / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config["sentence_transformers"] = {"activation_fn": "torch.nn.modules.linear.Identity"}
    (other / "config.json").write_text(json.dumps(config))
    found = loaded(build(f"reranker:{other}", "DEFAULT", {}))
    assert answers(found, pairs()) == answers(model, pairs())


CODE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

class Config(PretrainedConfig):
    model_type = "counting"

class Network(PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.post_init()

    def forward(self, input_ids, attention_mask, token_type_ids):
        counted = (token_type_ids * attention_mask).sum(1, keepdim=True)
        return SequenceClassifierOutput(logits=self.scale * counted)
"""


def test_a_network_of_code_in_the_folder_hears_which_text_a_token_is_of(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "c"))
    shutil.copy(packaged_folder() / "tokenizer.json", tmp_path)
    (tmp_path / "counting.py").write_text(CODE)
    save_file({"scale": torch.ones(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    auto = {"AutoConfig": "counting.Config"}
    auto["AutoModelForSequenceClassification"] = "counting.Network"
    sizes = {"hidden_size": 4, "vocab_size": 30522, "type_vocab_size": 2, "pad_token_id": 0}
    names = {"model_type": "counting", "architectures": ["CountingForSequenceClassification"]}
    config = {**names, **sizes, "auto_map": auto, "id2label": {"0": "x"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = loaded(build(f"reranker:{tmp_path}", "DEFAULT", {"trust_remote_code": True}))
    item = json_item({"query": "who is", "text": "a girl"}, raw_scores=True)
    assert answers(model, [item]) == [3.0]  # a girl [SEP]


@pytest.mark.parametrize(
    ("value", "parameters", "said"),
    [
        ("text", {}, "instance: expected an object with 'query' and 'text'"),
        ({"query": "a"}, {}, "'text' missing: expected 'query' and 'text'"),
        ({"query": "a", "text": 3}, {}, r"instance\.text: expected a string, found the number 3"),
        ({"query": "a", "text": "b", "c": 1}, {}, "input 'c' is unknown"),
        ({"query": "a", "text": PROSE}, {"truncate": False}, "the pair of texts has more than 64"),
        ({"query": "a", "text": "b"}, {"top_k": 1}, "parameter 'top_k' is unknown"),
        ({"query": "a", "text": "b"}, {"as": "floats"}, "parameter 'as' is unknown"),
    ],
)
def test_what_is_no_pair_is_refused_with_its_place(reranker, value, parameters, said):
    with pytest.raises(InputError, match=said):
        reranker[1].preprocess(json_item(value, **parameters))
    with pytest.raises(InputError, match="takes two texts, as JSON, not bytes"):
        reranker[1].preprocess(bytes_item(b"text"))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"pair": "a"}, "'text' missing: expected 'text' and 'pair'"),
        ({"ids": [1], "text": "a"}, "input 'ids' is unknown: expected 'text'"),
        ({"ids": [1], "text": "a", "pair": "b"}, "'ids' is unknown: expected 'text' and 'pair'"),
        ({"texts": "a"}, "input 'texts' is unknown: expected 'text'"),
    ],
)
def test_an_instance_is_compared_with_the_form_that_it_resembles(classifier, value, said):
    with pytest.raises(InputError, match=said):
        classifier[1].preprocess(json_item(value))


def test_pairs_are_cut_at_the_wanted_end(reranker):
    folder, model = reranker
    first = logits_of(folder, QUERY, PROSE[:300]).item()
    last = logits_of(folder, QUERY, PROSE[-300:]).item()
    (right,) = answers(model, pairs(raw_scores=True)[1:2])
    (left,) = answers(model, pairs(raw_scores=True, truncation_direction="left")[1:2])
    assert (right, left) != pytest.approx((first, last), abs=1e-3)  # more than 64 tokens each
    assert right != pytest.approx(left, abs=1e-3)


def test_a_classifier_answers_with_its_best_labels(classifier, caplog):
    folder, model = classifier
    texts = [text or " " for text in TEXTS]
    wanted = [logits_of(folder, text).softmax(-1) for text in texts]
    found = answers(model, [json_item(text) for text in texts])
    for answer, probabilities in zip(found, wanted, strict=True):
        assert len(answer) == 3
        scores = [each["score"] for each in answer]
        assert scores == sorted(scores, reverse=True)
        for each in answer:
            assert each["label"] == ("cat", "dog", "eel")[each["index"]]
            assert each["score"] == pytest.approx(probabilities[each["index"]].item(), abs=1e-5)
    ((num, answer),) = answers(model, [json_item(texts[3], top_k=1, count=True)])
    assert (num, [each["label"] for each in answer]) == (17, [found[3][0]["label"]])
    (raw,) = answers(model, [json_item(texts[3], raw_scores=True)])
    logits = logits_of(folder, texts[3])
    assert [each["score"] for each in raw] == pytest.approx(logits.sort().values.tolist()[::-1])
    assert model.labels == ["cat", "dog", "eel"]
    assert model.text.task == "classification"
    assert not model.text.is_multi_label
    with caplog.at_level(logging.INFO):
        loaded(build(f"transformers:{folder}", "DEFAULT", {}))
    assert "3 labels: cat, dog, eel; up to 64 tokens" in caplog.text


def test_labels_are_in_order_though_their_probabilities_are_rounded_to_the_same(classifier):
    _, model = classifier
    logits = {"_logits": torch.tensor([[-200.0, -150.0, 9.0]]), "_num_tokens": torch.tensor([3])}
    (found,) = model.render_batch(model.postprocess(logits), [{"raw_scores": True}])
    assert [each["score"] for each in found] == [9.0, -150.0, -200.0]


def test_a_classifier_takes_pairs_ids_and_bytes(classifier):
    folder, model = classifier
    wanted = logits_of(folder, "a cat", "a dog").softmax(-1)
    (found,) = answers(model, [json_item({"text": "a cat", "pair": "a dog"})])
    assert found[0]["score"] == pytest.approx(wanted.max().item(), abs=1e-5)
    text, raw, ids = answers(
        model,
        [json_item({"text": "hello"}), bytes_item(b"hello"), json_item({"ids": [101, 7592, 102]})],
    )
    assert text == raw == ids


def test_labels_that_exclude_each_other_or_not_are_told_apart(tmp_path):
    folder = write_scorer(tmp_path / "many", problem_type="multi_label_classification", **NAMES)
    model = loaded(build(str(folder), "DEFAULT", {}))
    (found,) = answers(model, [json_item("a cat")])
    logits = logits_of(folder, "a cat")
    assert {each["index"]: each["score"] for each in found} == pytest.approx(
        dict(enumerate(logits.sigmoid().tolist())), abs=1e-5
    )
    assert model.text.is_multi_label


def test_one_label_is_a_classifier_if_the_source_says_so(reranker, tmp_path):
    folder, _ = reranker
    logit = logits_of(folder, "a cat").item()
    (found,) = answers(loaded(build(f"transformers:{folder}", "DEFAULT", {})), [json_item("a cat")])
    assert found[0]["score"] == pytest.approx(1 / (1 + 2.718281828**-logit), abs=1e-5)
    number = write_scorer(tmp_path / "number", num_labels=1, problem_type="regression")
    options = FolderOptions(weights="DEFAULT", trust_remote_code=False, pickled_weights=False)
    (found,) = answers(loaded(TextClassifier(number, options)), [json_item("a cat")])
    assert found[0]["score"] == pytest.approx(logits_of(number, "a cat").item(), abs=1e-5)


@pytest.mark.parametrize(
    ("config", "labels"),
    [
        ({}, ["LABEL_0", "LABEL_1"]),
        ({"num_labels": 3}, ["LABEL_0", "LABEL_1", "LABEL_2"]),
        ({"id2label": {"10": 5, "2": "b", "1": "a"}}, ["a", "b", "5"]),
    ],
)
def test_labels_are_named_as_config_json_says(config, labels):
    assert msgspec.convert(config, ScoreConfig, strict=False).labels == labels


def test_more_labels_than_there_are_cannot_be_wanted(classifier):
    with pytest.raises(InputError, match="'top_k' must be a whole number from 1 to 3, not 4"):
        classifier[1].preprocess(json_item("a", top_k=4))
    with pytest.raises(InputError, match="'top_k' must be a whole number from 1 on, not 0"):
        classifier[1].preprocess(json_item("a", top_k=0))


def test_the_tokenizer_answers_for_texts_and_pairs(reranker, classifier):
    for _, model in (reranker, classifier):
        with pytest.raises(Answered) as found:
            model.preprocess(json_item("Hi you", tokenizer="tokenize", add_special_tokens=False))
        assert found.value.value == [
            {"id": 7632, "text": "Hi", "special": False, "start": 0, "stop": 2},
            {"id": 2017, "text": "you", "special": False, "start": 3, "stop": 6},
        ]
        with pytest.raises(Answered) as found:
            model.preprocess(json_item({"ids": [101, 7632, 102]}, tokenizer="decode"))
        assert found.value.value == "hi"
    with pytest.raises(Answered) as found:
        reranker[1].preprocess(json_item({"query": "Hi", "text": "you"}, tokenizer="tokenize"))
    assert [each["text"] for each in found.value.value] == ["[CLS]", "Hi", "[SEP]", "you", "[SEP]"]


def test_what_is_wrong_with_a_folder_is_said(classifier, tmp_path):
    folder, _ = classifier
    with pytest.raises(ModelError, match=r"3 labels, and a reranker has one.*transformers:"):
        build(f"reranker:{folder}", "DEFAULT", {})
    with pytest.raises(ModelError, match="must be at least 8 for pairs, not 7"):
        Reranker(str(write_scorer(tmp_path / "one", num_labels=1)), max_tokens=7)
    with pytest.raises(ModelError, match="there is no folder"):
        build("reranker:gone", "DEFAULT", {})
    (tmp_path / "one" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no weights"):
        loaded(build(str(tmp_path / "one"), "DEFAULT", {}))
    loaded(build(str(tmp_path / "one"), None, {}))
    (tmp_path / "one" / "config.json").write_text('{"architectures": ["ViTModel"]}')
    with pytest.raises((ModelError, SourceError)):
        build(f"reranker:{tmp_path / 'one'}", "DEFAULT", {})
