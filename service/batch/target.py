"""The interface between a run and the place where its inputs are computed."""

from typing import TYPE_CHECKING, Protocol

from inferpool.service.batch.inputs import BatchAnswer

if TYPE_CHECKING:
    from inferpool.service.batch.reading import DecodedInput


class BatchTarget(Protocol):
    """Computes inputs: a pool in this process, or a service elsewhere. Event loop only."""

    room: int
    """Number of inputs under way that keeps all replicas busy."""
    max_pixels: int | None
    """Readers are to decode pictures up to this number of pixels; None: to decode none."""

    async def predict(self, given: "DecodedInput") -> BatchAnswer:
        """Compute an input. The answer has errors that concern the input alone.

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
