"""Rerankers: how well a text answers a query. Runs in worker processes only."""

# ruff: noqa: N806 - tensors carry their axes in their names

from collections.abc import Mapping, Sequence

from inferpool.models.errors import ModelError
from inferpool.models.files.hugging_face import why_no_reranker
from inferpool.models.files.networks import FolderOptions, folder_at
from inferpool.models.item import Features
from inferpool.models.spec import Placement, TensorSpec
from inferpool.models.text.options import RERANKER, options_of
from inferpool.models.text.scores import TextScorer


class Reranker(TextScorer):
    """Serves the source `reranker:FOLDER`: a cross-encoder with one label.

    An instance is an object with the strings `query` and `text`. The answer is a number from 0 to
    1, the sigmoid of the network's score; with the parameter `raw_scores` it is that score itself.
    The activation that sentence-transformers wrote into the folder makes no difference, since many
    folders have none, and their scores have no bounds.

    Args:
        folder: Folder in Hugging Face's form.
        weights: "DEFAULT" for the folder's, a checkpoint's path, or None for random ones.
        max_tokens: Most tokens of a query and a text together; by default as the folder says.
        download: Whether to fetch the folder from the Hub if there is none of this name.
        trust_remote_code: Whether code that lies in the folder may run.

    Raises:
        ModelError: The folder has no such network.
    """

    known_parameters = RERANKER
    forms = (("query", "text"),)
    outputs = (TensorSpec(name="score", dtype="float32", shape=(-1,)),)
    can_run_ahead = True

    def __init__(
        self,
        folder: str,
        *,
        weights: str | None = "DEFAULT",
        max_tokens: int | None = None,
        download: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        options = FolderOptions(
            weights=weights, trust_remote_code=trust_remote_code, pickled_weights=False
        )
        path = folder_at(folder, options, download=download)
        if path.is_dir() and (why := why_no_reranker(path)):
            raise ModelError(why)
        super().__init__(path, options, max_tokens=max_tokens)

    def load(self, placement: Placement) -> None:
        """Read the weights and the tokenizer.

        Raises:
            ModelError: They are missing or cannot be read.
        """
        super().load(placement)
        self.text = self.facts("reranking")
        self.log_found("one label, so a reranker of pairs of query and text")

    def postprocess(self, outputs: Features) -> Features:
        """Turn logits [B, 1] into scores [B] from 0 to 1."""
        logits_B = outputs["_logits"][:, 0]
        return {**outputs, "_logits": logits_B, "score": logits_B.sigmoid()}

    def render_batch(
        self, outputs: Features, parameters: Sequence[Mapping[str, object]]
    ) -> Sequence[object]:
        """Render each score as a number, with the number of tokens if it is wanted."""
        scores: list[object] = outputs["score"].tolist()
        if not any(parameters):
            return scores
        logits, nums = outputs["_logits"].tolist(), outputs["_num_tokens"].tolist()
        for row, given in enumerate(parameters):
            options = options_of(given, RERANKER)
            score = logits[row] if options.raw_scores else scores[row]
            scores[row] = [nums[row], score] if options.count else score
        return scores
