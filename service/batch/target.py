"""The seam between a run and what computes its inputs."""

from typing import TYPE_CHECKING, Protocol

from inferpool.service.batch.inputs import BatchAnswer

if TYPE_CHECKING:
    from inferpool.service.batch.reading import DecodedInput


class BatchTarget(Protocol):
    """Computes inputs: a pool in this process, or a service elsewhere. Event loop only."""

    room: int
    """Inputs that keep all replicas busy, if so many are asked for at a time."""
    max_pixels: int | None
    """Readers are to turn pictures of so many pixels at most into pixels; None: to leave them."""

    async def predict(self, given: "DecodedInput") -> BatchAnswer:
        """Compute an input. What is wrong with the input alone is in the answer.

        Raises:
            RunLostError: Nothing more can be computed.
        """


def refused(given: "DecodedInput", code: str, message: str) -> BatchAnswer:
    """Return the answer for an input that has no prediction."""
    about = given.input
    return BatchAnswer(
        index=about.index, name=about.name, label=about.label, code=code, message=message
    )


def answered(given: "DecodedInput", prediction: object) -> BatchAnswer:
    """Return the answer for an input with its prediction."""
    about = given.input
    return BatchAnswer(index=about.index, name=about.name, label=about.label, prediction=prediction)
