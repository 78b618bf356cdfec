"""Classifiers of texts: the labels of a text, or of a pair of texts. Worker processes only."""

# ruff: noqa: N806 - tensors carry their axes in their names

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from inferpool.models.errors import InputError
from inferpool.models.files.networks import FolderOptions, some_names
from inferpool.models.item import Features
from inferpool.models.label_tolerance import LabelTolerance
from inferpool.models.spec import Placement, TensorSpec
from inferpool.models.text.base import Instance
from inferpool.models.text.options import CLASSIFIER, TextOptions, options_of
from inferpool.models.text.scores import TextScorer
from inferpool.models.text.tokenizer import Tokens
from inferpool.models.tolerance import Tolerance

_DEFAULT_TOP_K = 5
"""The number of labels that classifiers of pictures answer with, too."""


class TextClassifier(TextScorer):
    """Serves the folder of a `*ForSequenceClassification`: texts, or pairs of them, to labels.

    An instance is a string, an object with the string `text`, bytes in UTF-8, an object with the
    list `ids`, or one with the strings `text` and `pair`. The answer is that of a classifier of
    pictures: the `top_k` best labels with their index and score. Scores are probabilities; if the
    folder says that it was trained for a number (`problem_type` is "regression"), what the network
    computed.

    Args:
        folder: The folder.
        options: What is allowed, and the weights.
        max_tokens: Most tokens of a text or a pair; None for what the folder says.

    Raises:
        ModelError: The folder has no such network.
    """

    known_parameters = CLASSIFIER
    forms = (("text",), ("ids",), ("text", "pair"))
    tolerance: Tolerance = LabelTolerance()
    can_run_ahead = True

    def __init__(
        self, folder: Path, options: FolderOptions, *, max_tokens: int | None = None
    ) -> None:
        super().__init__(folder, options, max_tokens=max_tokens)
        self.labels = self.config.labels
        num = len(self.labels)
        self.outputs = [TensorSpec(name="probabilities", dtype="float32", shape=(-1, num))]
        kind = self.config.problem_type
        self._is_number = kind == "regression"
        self._is_multi_label = kind == "multi_label_classification" or num == 1
        self._usual_top_k = min(_DEFAULT_TOP_K, num)

    def load(self, placement: Placement) -> None:
        """Read the weights and the tokenizer.

        Raises:
            ModelError: They are missing or cannot be read.
        """
        super().load(placement)
        self.text = replace(self.facts("classification"), is_multi_label=self._is_multi_label)
        several = ", several of which one text may have" if self._is_multi_label else ""
        self.log_found(f"{len(self.labels)} labels: {some_names(self.labels)}{several}")

    def features_of_tokens(
        self, tokens: Tokens, instance: Instance, options: TextOptions
    ) -> Features:
        """Check the number of wanted labels, before anything is computed."""
        if options.top_k is not None and options.top_k > len(self.labels):
            raise InputError(
                f"parameter 'top_k' must be a whole number from 1 to {len(self.labels)}, "
                f"not {options.top_k}"
            )
        return super().features_of_tokens(tokens, instance, options)

    def postprocess(self, outputs: Features) -> Features:
        """Turn logits [B, K] into probabilities."""
        logits_BK = outputs["_logits"]
        if self._is_number:
            found_BK = logits_BK
        elif self._is_multi_label:
            found_BK = logits_BK.sigmoid()
        else:
            found_BK = logits_BK.softmax(-1)
        return {**outputs, "probabilities": found_BK}

    def render_batch(
        self, outputs: Features, parameters: Sequence[Mapping[str, object]]
    ) -> Sequence[object]:
        """Render the `top_k` best labels, best first, with their index and score."""
        # A softmax and a sigmoid keep the order, until they round to 1 or 0.
        logits_BK, indices_BK = outputs["_logits"].sort(dim=-1, descending=True, stable=True)
        scores_BK = outputs["probabilities"].gather(-1, indices_BK)
        indices, scores = indices_BK.tolist(), scores_BK.tolist()
        answers: list[object] = []
        for row, given in enumerate(parameters):
            options = options_of(given, CLASSIFIER)
            top_k = options.top_k or self._usual_top_k
            wanted = logits_BK[row].tolist() if options.raw_scores else scores[row]
            answer = [
                {"label": self.labels[index], "index": index, "score": score}
                for index, score in zip(indices[row][:top_k], wanted, strict=False)
            ]
            num_tokens = int(outputs["_num_tokens"][row])
            answers.append([num_tokens, answer] if options.count else answer)
        return answers
