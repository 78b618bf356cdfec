"""Values of a batch run: inputs, answers, and why a run cannot go on."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from inferpool.service.settings.names import FlagError

InputKind: TypeAlias = Literal["image", "bytes", "json", "npy"]
"""Form of an input: an encoded picture, opaque bytes, a JSON value, or a file of numpy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInput:
    """One input of a run."""

    index: int
    """Its place in the source, from 0; the same each time the source is opened."""
    name: str
    """A path, a member of an archive, or a line or row, for people."""
    kind: InputKind
    data: bytes = b""
    label: str | None = None
    """The right answer, if the source knows it."""
    error: str = ""
    """Why it could not be read; then there is no data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAnswer:
    """The outcome for one input: a prediction or an error."""

    index: int
    name: str
    label: str | None = None
    prediction: object = None
    """A JSON value."""
    code: str = ""
    """The code of the error; empty if there is a prediction."""
    message: str = ""


class SourceUnusableError(FlagError):
    """The inputs or the output cannot be used as the flags say; names what to do."""


class RunLostError(Exception):
    """The model or the service is gone, so that the run cannot go on; --resume does later."""
