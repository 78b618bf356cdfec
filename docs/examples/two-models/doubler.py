"""The smallest model of your own: numbers in, numbers out."""

from inferpool import Features, Model, TensorSpec


class Doubler(Model):
    """Multiplies three numbers by a factor.

    Args:
        factor: What each number is multiplied by; the settings file may set it.
    """

    inputs = (TensorSpec(name="x", dtype="float32", shape=(-1, 3)),)
    outputs = (TensorSpec(name="y", dtype="float32", shape=(-1, 3)),)

    def __init__(self, factor: float = 2.0) -> None:
        self.factor = factor

    def forward(self, batch: Features) -> Features:
        """Multiply a batch, float32 [B, 3]."""
        return {"y": batch["x"] * self.factor}
