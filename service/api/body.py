"""What every codec of the request side takes and gives, and the limits that it keeps."""

from collections.abc import Mapping, Sequence

import msgspec

from models.spec import TensorSpec
from service.request import Payload


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much one HTTP call may ask for."""

    max_body_bytes: int = 16 * 2**20
    max_instances: int = 256
    default_timeout_s: float = 30.0
    max_timeout_s: float = 300.0


class Head(msgspec.Struct, frozen=True, gc=False):
    """What describes a body besides its content type."""

    headers: Mapping[bytes, bytes]
    """Names in lower case."""
    query: bytes
    """Without the "?"."""
    inputs: Sequence[TensorSpec]
    """What the model takes; empty where that is not known."""
    limits: Limits


class Decoded(msgspec.Struct, frozen=True, gc=False):
    """The instances of one HTTP call."""

    payloads: list[Payload]
    is_batch: bool
    """They came as a list or along a batch dimension, and are answered so even if there is one."""
    parameters: bytes = b""
    """A JSON object for the model, or nothing."""
