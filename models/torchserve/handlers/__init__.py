"""TorchServe's own handlers, and the helpers that users' handlers import, written anew.

They have the methods and attributes that users' classes override. `MODULES` and `HANDLERS` name
them as text, since they import torch: a worker loads those that its archive asks for.
"""

from collections.abc import Mapping

_HERE = "inferpool.models.torchserve.handlers"

MODULES: Mapping[str, str] = {
    "ts.torch_handler.base_handler": f"{_HERE}.base",
    "ts.torch_handler.vision_handler": f"{_HERE}.vision",
    "ts.torch_handler.image_classifier": f"{_HERE}.vision",
    "ts.torch_handler.object_detector": f"{_HERE}.vision",
    "ts.torch_handler.image_segmenter": f"{_HERE}.vision",
    "ts.torch_handler.text_handler": f"{_HERE}.text",
    "ts.torch_handler.text_classifier": f"{_HERE}.text",
    "ts.handler_utils.text_utils": f"{_HERE}.text",
    "ts.handler_utils.timer": f"{_HERE}.base",
    "ts.utils.util": f"{_HERE}.util",
}
"""Modules of TorchServe by their names there, with ours that have their classes and functions."""

HANDLERS: Mapping[str, str] = {
    "base_handler": f"{_HERE}.base:BaseHandler",
    "image_classifier": f"{_HERE}.vision:ImageClassifier",
    "object_detector": f"{_HERE}.vision:ObjectDetector",
    "image_segmenter": f"{_HERE}.vision:ImageSegmenter",
    "text_classifier": f"{_HERE}.text:TextClassifier",
}
"""Handlers that the manifest of an archive names by a word, with their modules and classes."""
