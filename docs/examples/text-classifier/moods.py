"""A classifier of short texts: sentence vectors of all-MiniLM-L6-v2 and a small head on top."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn import functional

from inferpool import Features, Placement, TensorSpec
from inferpool.models.text.encoder import SentenceEncoder, packaged_folder

LABELS = ["complaint", "praise", "question"]
HEAD = Path(__file__).with_name("head.safetensors")


class Moods(SentenceEncoder):
    """Says what a text is. Tokenizing, batches of like lengths and the encoder are inherited."""

    example = "When does the shop open?"

    def __init__(self) -> None:
        super().__init__(packaged_folder())
        self.outputs = [TensorSpec(name="scores", dtype="float32", shape=(-1, len(LABELS)))]

    def load(self, placement: Placement) -> None:
        """Load the encoder, and the head that `train.py` wrote."""
        super().load(placement)
        self.head = load_file(HEAD)

    def postprocess(self, outputs: Features) -> Features:
        """Turn sentence vectors [B, 384] into scores [B, 3]."""
        vectors = super().postprocess(outputs)["embedding"]
        logits = functional.linear(vectors, self.head["weight"], self.head["bias"])
        return {"scores": logits.softmax(-1)}

    def render_batch(
        self, outputs: Features, parameters: Sequence[Mapping[str, object]]
    ) -> Sequence[object]:
        """Answer each text with its label and score."""
        scores, labels = torch.max(outputs["scores"], dim=-1)
        return [
            {"label": LABELS[label], "score": score}
            for label, score in zip(labels.tolist(), scores.tolist(), strict=True)
        ]
