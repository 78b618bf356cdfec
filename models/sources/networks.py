"""Builds networks with the classes of a training run, to train them and to serve them.

Both sides build by the same call, so that weights trained with one fit the other. Imports of
torchvision take seconds and are made only for its networks.
"""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from inferpool.models.errors import CheckpointError, SourceError
from inferpool.models.files.checkpoint import check_fit, read_weights
from inferpool.models.files.kinds import is_checkpoint_path
from inferpool.models.files.run_folder import RunFolder, TransformCard, is_run, read_card
from inferpool.models.sources.classes import find_class
from inferpool.models.sources.registry import check_options, construct

_INCEPTIONS = ("googlenet", "inception_v3")
_LITE = "efficientnet_lite0"
_FORMS = f"torchvision:NAME, {_LITE}, or package.module:Class of a torch.nn.Module"
_CLASSES = "num_classes"
"""Argument of a user's class for the number of classes."""


def build_classifier(
    model: str, weights: str | None, *, num_classes: int, options: Mapping[str, object]
) -> nn.Module:
    """Build a network on the CPU: float32 [B, 3, crop, crop] to logits [B, num_classes].

    Args:
        model: `torchvision:NAME`, `efficientnet_lite0`, or `package.module:Class` of an `nn.Module`
            with a constructor that takes `num_classes`.
        weights: `DEFAULT` for those that the source publishes, one of torchvision's names, a
            checkpoint's path or the folder of a run; None for random ones. A last layer for
            another number of classes is replaced by a random one.
        num_classes: Outputs of the last layer.
        options: Keyword arguments of the builder.

    Raises:
        SourceError: The source names nothing that can be built.
        CheckpointError: The weights cannot be read, or do not fit.
    """
    kind, _, name = model.partition(":")
    file = _file_of(weights)
    if model == _LITE:
        build: Callable[[int], nn.Module] = _lite0(options)
        file = _packaged() if weights == "DEFAULT" else file
    elif kind == "torchvision" and name:
        if weights is not None and file is None:
            return _with_head(_published(name, weights, options), num_classes, model)
        build = _torchvision(name, options)
    elif kind and name:
        build = _users(kind, name, options)
        if weights not in (None, "DEFAULT") and file is None:
            raise CheckpointError(f"{weights}: there is no such file of weights")
    else:
        near = get_close_matches(model, [_LITE], 1)
        hint = f"did you mean {near[0]}?" if near else f"a network is {_FORMS}"
        raise SourceError(f"there is no network {model!r} to train: {hint}")
    if weights is not None and model == _LITE and file is None:
        raise CheckpointError(f"{weights}: there is no such file of weights")
    return build(num_classes) if file is None else _loaded(build, file, num_classes)


def native_transform(model: str, weights: str | None) -> TransformCard | None:
    """Return the transform that a network's published weights were trained with; None if unknown.

    Raises:
        SourceError: The source names nothing that can be built.
    """
    if weights is not None and is_run(Path(weights)):
        return read_card(Path(weights)).transform
    transform: Any = None
    if model == _LITE:
        from inferpool.models.vision.efficientnet import EfficientNetLite0

        transform = EfficientNetLite0(weights=None).transform
    elif model.startswith("torchvision:"):
        from inferpool.models.vision.zoo import TorchvisionClassifier

        named = None if weights is None or _file_of(weights) else weights
        transform = TorchvisionClassifier(model.partition(":")[2], weights=named).transform
    if transform is None:
        return None
    name: Any = Image.Resampling(transform.interpolation).name.lower()
    return TransformCard(
        resize=transform.resize,
        crop=transform.crop,
        interpolation=name,
        mean=transform.mean,
        std=transform.std,
    )


def head_of(network: nn.Module, num_classes: int) -> nn.Module:
    """Return the last layer of a network: the last one that yields as many numbers as classes.

    Raises:
        SourceError: It has none.
    """
    _, head = _named_head(network, num_classes)
    return head


def can_compute(network: nn.Module, edge: int, num_classes: int) -> bool:
    """Return whether a network turns a picture of a size into logits."""
    was_training = network.training
    network.eval()
    try:
        with torch.inference_mode():
            logits = network(torch.zeros(1, 3, edge, edge))
    except Exception:  # a network may raise anything for a size that it does not accept
        return False
    finally:
        network.train(was_training)
    return isinstance(logits, Tensor) and tuple(logits.shape) == (1, num_classes)


def _file_of(weights: str | None) -> Path | None:
    if weights is None:
        return None
    path = Path(weights)
    if is_run(path):
        return RunFolder(path).weights
    return path if is_checkpoint_path(weights) or path.is_file() else None


def _packaged() -> Path:
    from inferpool.models.vision.efficientnet import packaged_weights

    return packaged_weights()


def _lite0(options: Mapping[str, object]) -> Callable[[int], nn.Module]:
    from inferpool.models.vision.efficientnet import Network

    if options:
        raise SourceError(f"{_LITE} takes no options, but was given {', '.join(options)}")
    return lambda num_classes: Network(num_classes=num_classes)


def _torchvision(name: str, options: Mapping[str, object]) -> Callable[[int], nn.Module]:
    from inferpool.models.vision.zoo import TorchvisionClassifier

    fixed: dict[str, object] = {}
    if name in _INCEPTIONS:  # their second heads serve only the training of very deep networks
        fixed = {"aux_logits": False, "transform_input": True, "init_weights": True}

    def build(num_classes: int) -> nn.Module:
        chosen: dict[str, Any] = {**fixed, **options, _CLASSES: num_classes}
        return TorchvisionClassifier(name, weights=None, **chosen).build_network()

    return build


def _published(name: str, weights: str, options: Mapping[str, object]) -> nn.Module:
    from inferpool.models.vision.zoo import TorchvisionClassifier

    chosen: dict[str, Any] = dict(options)
    network = TorchvisionClassifier(name, weights=weights, **chosen).build_network()
    return _without_second_heads(network) if name in _INCEPTIONS else network


def _without_second_heads(network: Any) -> nn.Module:
    network.aux_logits = False
    for name in ("AuxLogits", "aux1", "aux2"):
        if hasattr(network, name):
            setattr(network, name, None)
    assert isinstance(network, nn.Module)
    return network


def _users(
    module_name: str, class_name: str, options: Mapping[str, object]
) -> Callable[[int], nn.Module]:
    source = f"{module_name}:{class_name}"
    found = find_class(module_name, class_name)
    if not issubclass(found, nn.Module):
        raise SourceError(f"{source} is no subclass of torch.nn.Module, so it cannot be trained")
    check_options(found, {**options, _CLASSES: 2}, source)
    return lambda num_classes: construct(found, {**options, _CLASSES: num_classes}, source)


def _loaded(build: Callable[[int], nn.Module], file: Path, num_classes: int) -> nn.Module:
    """Load a checkpoint; its last layer may be for another number of classes."""
    network = build(num_classes)
    weights = read_weights(file, network)
    name, head = _named_head(network, num_classes)
    own = head.state_dict()
    prefix = f"{name}." if name else ""
    others = {
        key
        for key, tensor in own.items()
        if f"{prefix}{key}" in weights and weights[f"{prefix}{key}"].shape != tensor.shape
    }
    if others:  # then all of the last layer stays random
        weights = {k: v for k, v in weights.items() if not k.startswith(prefix)}
        weights |= {f"{prefix}{key}": tensor for key, tensor in own.items()}
    check_fit(network, {key: tensor.shape for key, tensor in weights.items()}, file)
    network.load_state_dict(weights, strict=False)
    return network


def _with_head(network: nn.Module, num_classes: int, model: str) -> nn.Module:
    """Replace the last layer of a network by a random one with other classes."""
    name, head = _last_layer(network, model)
    if isinstance(head, nn.Linear):
        new: nn.Module = nn.Linear(head.in_features, num_classes, bias=head.bias is not None)
    else:
        assert isinstance(head, nn.Conv2d)
        new = nn.Conv2d(head.in_channels, num_classes, kernel_size=1, bias=head.bias is not None)
    parent, _, child = name.rpartition(".")
    setattr(network.get_submodule(parent), child, new)
    if hasattr(network, _CLASSES):
        setattr(network, _CLASSES, num_classes)  # squeezenet keeps it
    return network


def _last_layer(network: nn.Module, model: str) -> tuple[str, nn.Module]:
    found = [
        (name, module)
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear)
        or (isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1))
    ]
    if not found:
        raise SourceError(f"{model} has no last layer that could be replaced for other classes")
    linear = [each for each in found if isinstance(each[1], nn.Linear)]
    return linear[-1] if linear else found[-1]


def _named_head(network: nn.Module, num_classes: int) -> tuple[str, nn.Module]:
    fitting = [
        (name, module)
        for name, module in network.named_modules()
        if getattr(module, "out_features", getattr(module, "out_channels", None)) == num_classes
        and isinstance(module, nn.Linear | nn.Conv2d)
    ]
    if not fitting:
        raise SourceError(
            f"{type(network).__name__} has no last layer with {num_classes} outputs, one for each "
            "class"
        )
    return fitting[-1]
