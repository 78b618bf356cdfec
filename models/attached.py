"""Names all that is imported only if a model needs it. Imports no torch.

The code of each call imports none of it, and finds it here by name.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pkgutil import resolve_name
from typing import Any

SOURCES = {
    "efficientnet_lite0": "inferpool.models.vision.efficientnet:EfficientNetLite0",
    "minilm_l6": "inferpool.models.text.encoder:SentenceEncoder",
    "echo": "inferpool.models.sources.echo:Echo",
    "torchvision:": "inferpool.models.vision.zoo:torchvision_model",
    "encoder:": "inferpool.models.text.encoder:SentenceEncoder",
    "reranker:": "inferpool.models.text.reranker:Reranker",
    "transformers:": "inferpool.models.hugging_face.folder:model_of_folder",
    "torchserve:": "inferpool.models.torchserve.model:model_of_archive",
    ".mar": "inferpool.models.torchserve.model:model_of_archive",
    "package.module:Class": "inferpool.models.sources.classes:users_model",
    "card.json": "inferpool.models.sources.trained:TrainedClassifier",
    ".pt2": "inferpool.models.sources.archives:ExportedModel",
    "AOTInductor": "inferpool.models.sources.inductor:InductorModel",
    ".onnx": "inferpool.models.onnx_files.model:OnnxModel",
    ".skops": "inferpool.models.tables.model:TableModel",
    ".pt": "inferpool.models.sources.archives:ScriptedModel",
    ".ts": "inferpool.models.sources.archives:ScriptedModel",
    ".torchscript": "inferpool.models.sources.archives:ScriptedModel",
}
"""Makers of models by a source's name, its `prefix:`, its suffix, or the file in its folder."""
OTHERS = {
    "ranked worker": "inferpool.workers.ranks.host_side:RankedWorker",
    "decoders": "inferpool.workers.decoders.host_side:DecoderHost",
    "decoders in a worker": "inferpool.workers.decoders.worker_side:decoded_batches",
    "weights": "inferpool.models.files.checkpoint:load_weights",
    "folder of minilm_l6": "inferpool.models.text.encoder:packaged_folder",
    "form of a folder": "inferpool.models.files.hugging_face:form_of",
    "fault of transformers": "inferpool.models.files.hugging_face:why_no_task",
    "need of transformers": "inferpool.models.files.hugging_face:needs_transformers",
    "package of AOTInductor": "inferpool.models.files.kinds:is_package",
    "fault of a folder": "inferpool.models.files.run_folder:why_no_run",
    "errors of preprocess": "inferpool.workers.inside.preprocess_errors:PreprocessErrors",
    "cut by tokens": "inferpool.workers.inside.token_cut:TokenCut",
    "check of a list": "inferpool.workers.inside.lists:check_list",
    "lists to send": "inferpool.workers.inside.lists:OutgoingLists",
    "named outputs": "inferpool.models.ragged:outputs_of",
    "lists to compare": "inferpool.models.ragged:flat_pair",
    "start check": "inferpool.workers.start_check.check:ReadyCheck",
    "loop ahead": "inferpool.workers.inside.ahead:AheadLoop",
    "stream loop": "inferpool.workers.streams.worker_side:StreamLoop",
    "check of streams": "inferpool.workers.streams.check:StreamCheck",
    "speed preset": "inferpool.workers.speed.worker_side:chosen_preset",
    "replacer": "inferpool.service.queue.replacer:Replacer",
    "held streams": "inferpool.workers.host.held_streams:HeldStreams",
    "pass on parts": "inferpool.workers.host.held_streams:pass_on",
    "drop streams": "inferpool.workers.host.held_streams:drop",
    "streams": "inferpool.service.queue.streams:Streams",
    "forms of streams": "inferpool.service.parts.streams.forms:choose_form",
    "stream of a call": "inferpool.service.parts.streams.call_stream:stream_call",
    "stream by sockets": "inferpool.service.parts.streams.wires:SocketStream",
    "stream by ASGI": "inferpool.service.parts.streams.wires:AsgiStream",
    "unknown model": "inferpool.service.api.unknown:unknown_model",
    "several instances": "inferpool.service.api.several:submit_several",
    "body of raw bytes": "inferpool.service.api.codecs.tensors:decode_raw",
    "body of npy": "inferpool.service.api.codecs.tensors:decode_npy",
    "body of safetensors": "inferpool.service.api.codecs.tensors:decode_safetensors",
    "form as instances": "inferpool.service.api.codecs.forms:decode_form",
    "form as instance": "inferpool.service.api.codecs.whole:decode_form_as_one",
    "text": "inferpool.service.api.codecs.whole:decode_text",
    "document": "inferpool.service.api.codecs.whole:decode_document",
    "payload by interface": "inferpool.service.api.codecs.whole:payload_by",
    "upload": "inferpool.models.upload:upload_of",
    "read form": "inferpool.models.upload:read_form",
    "example of form": "inferpool.models.forms:example_of_form",
    "features of form": "inferpool.models.forms:features_of_form",
    "content": "inferpool.workers.inside.contents:outcome_of",
    "rendering of content": "inferpool.workers.inside.contents:rendering_with",
    "form of content": "inferpool.workers.inside.contents:shown_form",
    "types of content": "inferpool.workers.inside.contents:declared_types",
    "choice of content": "inferpool.service.api.codecs.contents:choose_with_content",
    "content of several": "inferpool.service.api.codecs.contents:check_several",
    "content in JSON": "inferpool.service.api.codecs.contents:json_of",
    "likeness of contents": "inferpool.service.parts.swap.contents:are_alike",
    "answers of tensors": "inferpool.service.api.codecs.tensor_answers:encode_tensors",
    "answers with content": "inferpool.service.api.codecs.contents:encode_with_content",
    "forget a load": "inferpool.models.speed.attempts:forget_load",
    "settings of an archive": "inferpool.service.settings.archives:settings_of_source",
    "name of an archive": "inferpool.service.settings.archives:name_of_source",
    "fault of an archive": "inferpool.models.torchserve.archive:fault_of",
    "needs of an archive": "inferpool.service.settings.archives:needs_yaml",
    "settings of platforms": "inferpool.service.settings.platforms:settings_of_platform",
    "settings of TorchServe": "inferpool.service.settings.torchserve:settings_of_torchserve",
    "model of a folder": "inferpool.service.settings.model_folder:table_of_folder",
    "source in a folder": "inferpool.service.settings.model_folder:source_in",
    "model of a URI": "inferpool.service.settings.model_folder:table_of_uri",
    "warnings of platforms": "inferpool.service.settings.platforms:warnings_of_platform",
}
_TEXTS = "inferpool.service.parts.texts"
CALLS = {
    "/v2/models/*/infer": "inferpool.service.parts.open_inference.calls:InferProtocol",
    "/v1/models/*:predict": "inferpool.service.parts.kserve_v1.calls:PredictProtocolV1",
    "/v1/embeddings": f"{_TEXTS}.embeddings:EmbeddingsProtocol",
    "/v1/rerank": f"{_TEXTS}.rerank:RerankProtocol",
    "/v2/rerank": f"{_TEXTS}.rerank:RerankProtocol",
    "/v1/classify": f"{_TEXTS}.classify:ClassifyProtocol",
}
"""Protocols besides our own, by the paths of their calls; `*` stands for a model's name."""

BUILT_IN_SOURCES = ("efficientnet_lite0", "minilm_l6", "echo")
"""Sources that need neither a file nor a package of the user's."""
CARD_FILE = "card.json"
"""The file that marks the folder of a training run."""
MODEL_FILE_SUFFIXES = (".pt2", ".onnx", ".skops", ".mar", ".pt", ".ts", ".torchscript")
WEIGHT_FILE_SUFFIXES = (".pth", ".safetensors")
_OF_NETWORKS = ("weights", "speed preset")


def modules_of(sources: Iterable[str]) -> list[str]:
    """Return the modules of ours that workers should find imported, for models of some sources."""
    names: dict[str, None] = {}
    for source in sources:
        if source == "echo":
            names["echo"] = None
            continue
        is_class = ":" in source and f"{source.partition(':')[0]}:" not in SOURCES
        pictures = () if is_class else ("efficientnet_lite0",)
        names |= dict.fromkeys((*pictures, "package.module:Class", *_OF_NETWORKS))
    return [(SOURCES | OTHERS)[name].partition(":")[0] for name in names]


@cache
def attached(name: str) -> Any:
    """Import and return the object with a name of this table."""
    return resolve_name((SOURCES | OTHERS)[name])


def protocol_at(path: str, further: Sequence[Mapping[str, str]] = ()) -> Any | None:
    """Return the protocol of a path, imported with its first call; None if no table has it.

    `further` are tables that settings turn on: `service.api.optional_calls`.
    """
    for table in (CALLS, *further):
        if path in table:
            return _protocol(table[path])
        for pattern, name in table.items():
            start, star, end = pattern.partition("*")
            is_long = len(path) >= len(start) + len(end)  # a model may be called "infer"
            if star and is_long and path.startswith(start) and path.endswith(end):
                found = _protocol(name)
                if found.has_path(path):
                    return found
    return None


@cache
def _protocol(name: str) -> Any:
    return resolve_name(name)()
