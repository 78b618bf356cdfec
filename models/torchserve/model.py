"""Builds the model of an archive of TorchServe, which serves without it. Worker processes only."""

from dataclasses import replace
from pathlib import Path

from msgspec import structs

from inferpool.models.base import Model
from inferpool.models.torchserve.archive import read_facts
from inferpool.models.torchserve.loading import names_any
from inferpool.models.torchserve.running import ArchiveModel
from inferpool.models.torchserve.streaming import StreamingArchive
from inferpool.models.torchserve.unpacking import unpacked


def model_of_archive(
    path: Path | str,
    *,
    name: str | None = None,
    streaming: bool | None = None,
    envelope: str | None = None,
) -> Model:
    """Build the model of an archive; nothing of it runs before `load`.

    Args:
        path: A `.mar` or `.tar.gz`, or a folder with an archive's files.
        name: The name that the handler and clients of TorchServe know it by; by default its
            manifest's.
        streaming: Whether its answers come in parts; by default if a Python file in it names
            `send_intermediate_predict_response`.
        envelope: TorchServe's `service_envelope`: "body" or "json".

    Raises:
        SourceError: It is no archive, or asks for what only TorchServe does.
    """
    facts = read_facts(Path(path))
    if name is not None:
        facts = replace(facts, model=structs.replace(facts.model, model_name=name))
    folder = unpacked(Path(path))
    if streaming is None:
        streaming = names_any(folder, [b"send_intermediate_predict_response"])
    if not streaming:
        return ArchiveModel(facts, folder, envelope=envelope)
    return StreamingArchive(facts, folder, envelope=envelope)
