"""Supplies TorchServe's modules (`ts.*`) to handlers, without TorchServe. Worker processes only.

Only a process that runs an archive has them. Where TorchServe is installed, modules of it that are
not among ours are its own.
"""

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType

from inferpool.models.torchserve.context import TORCHSERVE_VERSION
from inferpool.models.torchserve.handlers import MODULES

_OURS = "inferpool.models.torchserve"
_SEND = f"{_OURS}.context:send_intermediate_predict_response"
_METRICS = f"{_OURS}.metrics"
_METRIC = {"Metric": f"{_METRICS}:CachingMetric", "CachingMetric": f"{_METRICS}:CachingMetric"}
_STORE = {"MetricsStore": f"{_METRICS}:HandlerMetrics"}
_CACHE = {"MetricsCacheYamlImpl": f"{_METRICS}:HandlerMetrics"}
_ENVELOPES = f"{_OURS}.envelopes"
_NAMES: Mapping[str, Mapping[str, str]] = {
    "ts.context": {
        "Context": f"{_OURS}.context:HandlerContext",
        "RequestProcessor": f"{_OURS}.context:RequestProcessor",
    },
    "ts.service": {
        "emit_metrics": f"{_METRICS}:emit_metrics",
        "PredictionException": f"{MODULES['ts.utils.util']}:PredictionException",
    },
    "ts.handler_utils.utils": {
        "send_intermediate_predict_response": _SEND,
        "import_class": f"{_OURS}.loading:import_class",
    },
    "ts.handler_utils.micro_batching": {"MicroBatching": f"{_OURS}.batching:MicroBatching"},
    "ts.handler_utils.hf_batch_streamer": {
        "TextIteratorStreamerBatch": f"{_OURS}.batching:TextIteratorStreamerBatch"
    },
    "ts.protocol.otf_message_handler": {"send_intermediate_predict_response": _SEND},
    "ts.metrics.caching_metric": _METRIC,
    "ts.metrics.metric": _METRIC,
    "ts.metrics.metrics_store": _STORE,
    "ts.metrics.metric_cache_yaml_impl": _CACHE,
    "ts.metrics.dimension": {"Dimension": f"{_METRICS}:Dimension"},
    "ts.metrics.metric_type_enum": {"MetricTypes": f"{_METRICS}:MetricTypes"},
    "ts.torch_handler.request_envelope.base": {"BaseEnvelope": f"{_ENVELOPES}:BaseEnvelope"},
    "ts.torch_handler.request_envelope.body": {"BodyEnvelope": f"{_ENVELOPES}:BodyEnvelope"},
    "ts.torch_handler.request_envelope.json": {"JSONEnvelope": f"{_ENVELOPES}:JSONEnvelope"},
}
"""Modules that we make, with the names in them and what these are."""
_PACKAGES = frozenset(name.rpartition(".")[0] for name in (*MODULES, *_NAMES)) | {"ts"}


def hint_of(error: BaseException) -> str:
    """Return what to do about a module of TorchServe's that is missing; empty for other errors."""
    name = error.name if isinstance(error, ImportError) else None
    if name is None or not f"{name}.".startswith(("ts.", f"{_OURS}.")):
        return ""
    return (
        "this part of TorchServe does not come with inferpool: copy what the handler needs of it "
        "into the archive, or install torchserve beside inferpool"
    )


def supply_modules() -> None:
    """Have this process find TorchServe's modules from now on."""
    if not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder(_installed_folder()))


class _Finder(MetaPathFinder):
    """Finds `ts` and what is below it."""

    def __init__(self, installed: Path | None) -> None:
        self._installed = installed

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module of ours, or return None."""
        if fullname in _PACKAGES:
            spec = ModuleSpec(fullname, _Maker(), is_package=True)
            if self._installed is not None:
                folder = self._installed.joinpath(*fullname.split(".")[1:])
                spec.submodule_search_locations = [str(folder)]
            return spec
        if fullname in MODULES or fullname in _NAMES:
            return ModuleSpec(fullname, _Maker())
        return None


class _Maker(Loader):
    """Makes a module of ours under TorchServe's name."""

    def exec_module(self, module: ModuleType) -> None:
        """Fill a module with its names, or put the one of ours in its place."""
        name = module.__name__
        if name in MODULES:
            sys.modules[name] = importlib.import_module(MODULES[name])
        elif name == "ts":
            module.__version__ = TORCHSERVE_VERSION  # type: ignore[attr-defined]  # new there
        else:
            vars(module).update(
                (each, resolve_name(place)) for each, place in _NAMES.get(name, {}).items()
            )


def _installed_folder() -> Path | None:
    """Return the folder of an installed TorchServe, if there is one."""
    spec = find_spec("ts") if "ts" not in sys.modules else sys.modules["ts"].__spec__
    folders = [] if spec is None else [Path(x) for x in spec.submodule_search_locations or ()]
    return next((each for each in folders if (each / "model_loader.py").is_file()), None)
