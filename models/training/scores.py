"""Figures of right answers: intervals, confusions and scores of each class. No torch."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt

Pair = tuple[str, str]
"""The label of an image, and the label that was predicted for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassScore:
    """Counts of one class."""

    label: str
    num_images: int
    """Images that have the label."""
    num_predicted: int
    """Images that were predicted to have the label."""
    num_right: int

    @property
    def recall(self) -> float | None:
        """Share of the class's images that were recognised; None if it has none."""
        return self.num_right / self.num_images if self.num_images else None

    @property
    def precision(self) -> float | None:
        """Share of the predictions of this class that were right; None if there were none."""
        return self.num_right / self.num_predicted if self.num_predicted else None


def wilson(num_right: int, num_images: int, z: float = 1.96) -> tuple[float, float]:
    """Return the confidence interval of a share, by default with 95 % confidence.

    It is the score interval of E. B. Wilson, "Probable inference, the law of succession, and
    statistical inference", Journal of the American Statistical Association 22 (1927), 209-212. It
    stays within 0 and 1, and holds for few images and for shares near 1, where the normal
    approximation does not.

    Args:
        num_right: Images that were right.
        num_images: All images; with none, the interval is all from 0 to 1.
        z: Quantile of the normal distribution, 1.96 for 95 %.
    """
    if not num_images:
        return 0.0, 1.0
    share, square = num_right / num_images, z * z
    middle = share + square / (2 * num_images)
    half = z * sqrt(share * (1 - share) / num_images + square / (4 * num_images * num_images))
    scale = 1 + square / num_images
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def class_scores(confusions: Mapping[Pair, int], labels: Iterable[str]) -> list[ClassScore]:
    """Return the counts of each class, in the order of the labels."""
    images, predicted, right = Counter[str](), Counter[str](), Counter[str]()
    for (label, found), num in confusions.items():
        images[label] += num
        predicted[found] += num
        right[label] += num if label == found else 0
    return [
        ClassScore(
            label=label,
            num_images=images[label],
            num_predicted=predicted[label],
            num_right=right[label],
        )
        for label in labels
    ]
