"""Compares a file with a network of torch that it was made from. Worker processes only."""

import logging
from pathlib import Path

import torch
from torch import Tensor, nn

from inferpool.models.base import Model
from inferpool.models.errors import ModelError
from inferpool.models.item import Features
from inferpool.models.sources.classes import find_class
from inferpool.models.sources.made_up import made_up
from inferpool.models.sources.modules import TensorModel
from inferpool.models.sources.registry import build
from inferpool.models.spec import Placement

logger = logging.getLogger(__name__)

_NUM_SAMPLES = 8


def compare(
    model: TensorModel, path: Path, source: str, weights: str | None, placement: Placement
) -> None:
    """Compute numbers by chance with both, and log how far the outputs are apart.

    Args:
        model: The loaded model of the file.
        path: The file.
        source: The source of the network.
        weights: Its weights; None for what the source brings.
        placement: Where the network is computed.

    Raises:
        ModelError: The outputs differ by more than the model's tolerance, or the network cannot be
            loaded.
    """
    batch = _samples(model)
    if batch is None:
        raise ModelError(
            f"{path} cannot be compared with {source}: the numbers of its inputs are free"
        )
    other = _built(model, source, weights)
    other.load(placement)
    with torch.inference_mode():
        ours = model.postprocess(model.forward(batch))
        renamed = {
            spec.name: tensor for spec, tensor in zip(other.inputs, batch.values(), strict=False)
        }
        if len(renamed) != len(batch):
            raise ModelError(
                f"{path} has {len(batch)} inputs, but {source} {len(renamed)}: they cannot be "
                "compared"
            )
        theirs = other.postprocess(other.forward(renamed))
    names = list(ours)
    if len(theirs) != len(names):
        raise ModelError(f"{path} has {len(names)} outputs, but {source} has {len(theirs)}")
    found = theirs if {*theirs} == {*names} else dict(zip(names, theirs.values(), strict=True))
    wanted = {name: tensor.cpu() for name, tensor in found.items()}
    agreement = model.tolerance.judge(wanted, _like(ours, wanted))
    if not agreement.is_within:
        raise ModelError(f"{path} does not compute what {source} does: {agreement.text}")
    logger.info(
        "%s agrees with %s on %d instances by chance: %s",
        path,
        source,
        _NUM_SAMPLES,
        agreement.text,
    )


def _built(model: TensorModel, source: str, weights: str | None) -> Model:
    """Build the network's model; a plain network is given the inputs of the file."""
    options: dict[str, object] = {}
    module, colon, name = source.partition(":")
    if colon and module not in ("torchvision", "encoder", "transformers"):
        found = find_class(module, name)
        if issubclass(found, nn.Module):
            options = {
                "inputs": [
                    {"name": each.name, "dtype": each.dtype, "shape": list(each.shape)}
                    for each in model.inputs
                ]
            }
    return build(source, weights, options)


def _samples(model: TensorModel) -> dict[str, Tensor] | None:
    generator = torch.Generator().manual_seed(0)
    items = [made_up(model.inputs, generator, torch.randn) for _ in range(_NUM_SAMPLES)]
    rows = [item.tensors() for item in items if item is not None]
    if not rows:
        return None
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _like(ours: Features, wanted: Features) -> dict[str, Tensor]:
    """Return our outputs with the dtypes of the others, where both are floats."""
    return {
        name: tensor.to(wanted[name].dtype)
        if tensor.is_floating_point() and wanted[name].is_floating_point()
        else tensor
        for name, tensor in ours.items()
    }
