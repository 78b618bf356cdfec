"""How far the probabilities of a faster classifier may be from the exact ones. In workers.

Axes: N samples, K classes.
"""

# ruff: noqa: N803, N806 - tensors carry their axes in their names

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from inferpool.models.tolerance import Agreement


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelTolerance:
    """Requires a classifier's best label to stay the best, and probabilities about the same.

    A picture does not settle a label that hardly leads. If each pixel moves by one of 256 levels at
    random, as between two JPEG decoders, the exact network's scores move by 6 % of their spread
    (resnet18 and mobilenet_v3_small with random weights) to 22 % (EfficientNet-Lite0), and 6 to
    28 % of all pictures change their label. In bf16, scores move by 2 to 4 %, and 3 to 5 % change.
    To ignore such changes set `min_lead`, to 0.1 say, and `max_deviation` to what one level does
    (0.15 to 0.25 in 60 pictures). Leads are measured by the spread of the scores, so that networks
    with scores that are all alike, as with random weights, are judged the same way.
    """

    output: str = "probabilities"
    min_agreement: float = 0.99
    """Part of the images with a clearly leading label that must keep it."""
    min_lead: float = 0.0
    """Least clear lead, as a part of the spread of the scores; 0 counts every image."""
    max_deviation: float = 0.05
    """Largest change of any probability."""

    def judge(self, exact: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Agreement:
        """Compare probabilities [N, K], and estimate how often the best label would change."""
        exact_NK, other_NK = exact[self.output], other[self.output]
        deviation = (exact_NK - other_NK).abs().max().item()
        agreement = expected_agreement(exact_NK, other_NK, self.min_lead)
        of_all = expected_agreement(exact_NK, other_NK)
        is_finite = bool(other_NK.isfinite().all())
        clear = f" ({agreement:.1%} of those where it leads clearly)" if self.min_lead else ""
        return Agreement(
            is_within=is_finite
            and agreement >= self.min_agreement
            and deviation <= self.max_deviation,
            deviation=deviation,
            text=f"the best label is kept for {of_all:.1%} of images{clear}, probabilities are "
            f"off by up to {deviation:.2g}; at least {self.min_agreement:.0%} and at most "
            f"{self.max_deviation:.2g} are asked for",
        )


def expected_agreement(exact_NK: Tensor, other_NK: Tensor, min_lead: float = 0.0) -> float:
    """Estimate the part of images like these that keep their best label.

    A label changes if its lead over the runner-up (in log probability) shrinks by more than the
    lead. All pairs of a sample's lead and another's shrinking are counted: that way a few dozen
    samples distinguish 99 % from 97 %; counting changed labels could not.

    Args:
        exact_NK: Exact probabilities.
        other_NK: Probabilities to compare with them.
        min_lead: Least lead of an image that counts, as a part of the standard deviation of the
            scores over the classes.
    """
    if exact_NK.shape[1] < 2:
        return 1.0
    tiny = torch.finfo(torch.float32).tiny
    log_exact, log_other = (x.float().clamp_min(tiny).log() for x in (exact_NK, other_NK))
    best_N1 = log_exact.argmax(-1, keepdim=True)

    def leads(log_NK: Tensor) -> Tensor:
        rivals = log_NK.scatter(1, best_N1, -torch.inf).amax(1)
        return log_NK.gather(1, best_N1)[:, 0] - rivals

    lead_N = leads(log_exact)
    loss_N = lead_N - leads(log_other)
    spread = log_exact.var(1, correction=0).mean().sqrt()
    clear = lead_N[lead_N >= min_lead * spread]
    if not len(clear):
        return 1.0
    return 1 - (loss_N[:, None] > clear[None, :]).float().mean().item()
