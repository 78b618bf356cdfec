"""The handler from which TorchServe's own and most of its users' are derived. Workers only."""

import importlib
import importlib.util
import logging
import sys
import time
import warnings
from abc import ABC
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from inferpool.models.accelerator.device import is_accelerator, synchronize
from inferpool.models.errors import ModelError, SourceError
from inferpool.models.files.checkpoint import first_line, load_weights
from inferpool.models.files.kinds import kind_of
from inferpool.models.torchserve.handlers.util import list_classes_from_module, load_label_mapping

logger = logging.getLogger(__name__)


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Measure a method of a handler, if `handler.profile` in model-config.yaml is true."""

    @wraps(function)
    def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = (self.context and self.context.model_yaml_config) or {}
        if not (config.get("handler") or {}).get("profile"):
            return function(self, *args, **kwargs)
        started = time.perf_counter()
        result = function(self, *args, **kwargs)
        if self.device is not None and is_accelerator(self.device):
            synchronize(self.device)
        duration_ms = (time.perf_counter() - started) * 1e3
        self.context.metrics.add_time(f"ts_handler_{function.__name__}", duration_ms)
        return result

    return measured


class BaseHandler(ABC):  # noqa: B024 - users' classes expect an abstract one that they can create
    """Loads an archive's network, and computes batches in three steps, each of which one overrides.

    The network is a class in the archive with a state_dict, a TorchScript file (.pt), or a file of
    ONNX for handlers that call onnxruntime themselves.
    """

    def __init__(self) -> None:
        self.model: Any = None
        self.mapping: dict[str, str] | None = None
        self.device: torch.device | None = None
        self.initialized = False
        self.context: Any = None
        self.model_pt_path: str | None = None
        self.manifest: Any = None
        self.map_location: str | None = None
        self.model_yaml_config: dict[str, Any] = {}
        self.explain = False
        self.target = 0
        self.profiler_args: dict[str, Any] = {}

    def initialize(self, context: Any) -> None:
        """Load the network onto the device, and the names of its classes.

        Args:
            context: Has `manifest`, `system_properties` (of them `model_dir` and `gpu_id`), and
                `model_yaml_config`.

        Raises:
            ModelError: The archive lacks something, or something in it cannot be used.
        """
        self.model_yaml_config = getattr(context, "model_yaml_config", None) or {}
        self.manifest = context.manifest
        self.device = _device_of(context.system_properties.get("gpu_id"))
        self.map_location = self.device.type
        folder = str(context.system_properties.get("model_dir"))
        named = self.manifest["model"]
        serialized = named.get("serializedFile")
        self.model_pt_path = str(Path(folder, serialized)) if serialized else None
        if named.get("modelFile"):
            self.model = self._load_pickled_model(folder, named["modelFile"], self.model_pt_path)
            self.model.to(self.device).eval()
        else:
            self.model = self._load_whole_model(self.model_pt_path)
        if "pt2" in self.model_yaml_config:
            logger.warning(
                "model-config.yaml asks for `pt2`: the network is served as it is, not compiled"
            )
        self.mapping = load_label_mapping(Path(folder, "index_to_name.json"))
        self.initialized = True

    def _load_whole_model(self, model_pt_path: str | None) -> Any:
        """Load a file that needs no class beside it."""
        if model_pt_path is None:
            raise SourceError("the manifest names neither a serializedFile nor a modelFile")
        if model_pt_path.endswith(".pt"):
            return self._load_torchscript_model(model_pt_path).eval()
        if model_pt_path.endswith(".onnx"):
            return _onnx_session(model_pt_path, self.device)
        raise SourceError(
            f"{model_pt_path} cannot be loaded without a class: give the archive a --model-file "
            "with the network's class, or a TorchScript file that ends in .pt; libraries (.so) of "
            "AOTInductor are not loaded"
        )

    def _load_torchscript_model(self, model_pt_path: str) -> Any:
        """Load a file of `torch.jit.save` onto the device.

        Raises:
            SourceError: The file is no such archive, or is damaged.
        """
        if kind_of(Path(model_pt_path)) != "torchscript":
            raise SourceError(
                f"{model_pt_path} is missing, or no TorchScript file, which an archive without a "
                "class needs: give it a --model-file with the network's class"
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch.jit is deprecated; the archive is as it is
                return torch.jit.load(model_pt_path, map_location=self.device)
        except Exception as error:  # a damaged archive makes it raise almost anything
            raise SourceError(f"{model_pt_path} cannot be read: {first_line(error)}") from error

    def _load_pickled_model(
        self, model_dir: str, model_file: str, model_pt_path: str | None
    ) -> nn.Module:
        """Create the only class of a file of the archive, and read its weights, if there are any.

        No code in the file of weights runs.

        Raises:
            SourceError: The file is missing, or has no class or several.
            CheckpointError: The weights cannot be read, or are those of another network.
        """
        path = Path(model_dir, model_file)
        if not path.is_file():
            raise SourceError(f"the manifest names {model_file!r} as modelFile: it is not there")
        classes = list_classes_from_module(_imported(path))
        if len(classes) != 1:
            names = ", ".join(each.__name__ for each in classes)
            raise SourceError(
                f"{model_file} must define one class, the network's, not {names or 'none'}: move "
                "others into files of their own (--extra-files)"
            )
        network: nn.Module = classes[0]()
        if model_pt_path and network.state_dict():
            load_weights(network, model_pt_path)
        return network

    @timed
    def preprocess(self, data: Any) -> Any:
        """Turn a batch's numbers into a tensor on the device. Users override it.

        Args:
            data: Numbers in lists of the same length; a service envelope makes these of requests.
        """
        return torch.as_tensor(data, device=self.device)

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the network with a tensor, and the other arguments."""
        with torch.inference_mode():
            return self.model(data.to(self.device), *args, **kwargs)

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        """Turn the network's output into a list with an answer for each instance."""
        answers: list[Any] = data.tolist()
        return answers

    def handle(self, data: Any, context: Any) -> list[Any]:
        """Answer a batch.

        Args:
            data: A mapping of names and values for each request, such as `{"body": bytearray}`.
            context: The context of this batch.
        """
        started = time.perf_counter()
        self.context = context
        if self._is_describe():
            answers = [self.describe_handle()]
        else:
            prepared = self.preprocess(data)
            if self._is_explain():
                answers = self.explain_handle(prepared, data)
            else:
                answers = self.postprocess(self.inference(prepared))
        duration_ms = round((time.perf_counter() - started) * 1e3, 2)
        context.metrics.add_time("HandlerTime", duration_ms, None, "ms")
        return answers

    def explain_handle(self, data_preprocess: Any, raw_data: Any) -> Any:
        """Return what `get_insights` of a user's class makes of the first request."""
        row = raw_data[0]
        if not isinstance(row, dict):
            return self.get_insights(data_preprocess, None, 0)
        inputs = row.get("data") or row.get("body")
        return self.get_insights(data_preprocess, inputs, row.get("target") or 0)

    def get_insights(self, tensor_data: Tensor, _: Any, target: Any = 0) -> Any:
        """Explain an answer: none of our handlers does."""
        raise NotImplementedError(
            f"{type(self).__name__} explains no answers: a class of your own may, by get_insights"
        )

    def describe_handle(self) -> Any:
        """Describe the model to a client; nothing by default. Users override it."""
        return None

    def get_device(self) -> torch.device | None:
        """Return the device of the network."""
        return self.device

    def _is_explain(self) -> bool:
        if _header_is_true(self.context, "explain"):
            self.explain = True
            return True
        return False

    def _is_describe(self) -> bool:
        return _header_is_true(self.context, "describe")


def _header_is_true(context: Any, name: str) -> bool:
    return bool(context) and context.get_request_header(0, name) == "True"


def _device_of(gpu_id: object) -> torch.device:
    kind = torch.accelerator.current_accelerator(check_available=True)
    if gpu_id is None or kind is None:
        return torch.device("cpu")
    return torch.device(kind.type, int(str(gpu_id)))


def _imported(path: Path) -> ModuleType:
    """Import a file by its name, as users' handlers do, whatever else is called so."""
    name = path.name.split(".")[0]
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SourceError(f"the manifest names {path.name} as modelFile: that is no file of Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)
    spec.loader.exec_module(module)
    return module


def _onnx_session(path: str, device: torch.device | None) -> Any:
    """Open a file of ONNX with as many threads as torch has here."""
    try:
        import onnxruntime
    except ImportError as error:
        raise ModelError(
            f"{path} needs the package onnxruntime, which cannot be imported ({error}): "
            "pip install 'inferpool[onnx]'"
        ) from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    kinds = dict.fromkeys([device.type if device else "cpu", "cpu"])
    known = onnxruntime.get_available_providers()
    wanted = [f"{kind.upper()}ExecutionProvider" for kind in kinds]
    return onnxruntime.InferenceSession(
        path, options, providers=[each for each in wanted if each in known]
    )
