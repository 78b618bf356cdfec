"""Files of ONNX, made by hand."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper
from torch import Tensor, nn

FLOAT, INT64, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING
_IR_VERSION = 9
info = helper.make_tensor_value_info


class TwoLayers(nn.Module):
    """The network of `write_two`, with the same weights each time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        with torch.no_grad():
            self.linear.weight.copy_(torch.arange(12).reshape(3, 4) / 10)
            self.linear.bias.copy_(torch.arange(3) / 10)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x + y


def write(
    path: Path,
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
    constants: Sequence[TensorProto] = (),
    **options: object,
) -> Path:
    graph = helper.make_graph(nodes, "graph", inputs, outputs, [*constants])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 2)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION)
    onnx.save(model, str(path), **options)
    return path


def write_two(path: Path, batch: int | str = "n", **options: object) -> Path:
    """Write the network of `TwoLayers`; the batch is a number, or free."""
    linear = TwoLayers().linear
    weight, bias = (each.detach().numpy() for each in (linear.weight, linear.bias))
    return write(
        path,
        [
            helper.make_node("Gemm", ["x.1", "w", "b"], ["logits"], transB=1),
            helper.make_node("Add", ["x.1", "y:0"], ["sum"]),
        ],
        [info("x.1", FLOAT, [batch, 4]), info("y:0", FLOAT, [batch, 4])],
        [info("logits", FLOAT, [batch, 3]), info("sum", FLOAT, [batch, 4])],
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(bias, "b")],
        **options,
    )


def write_classifier(path: Path) -> Path:
    """Write what converters of scikit-learn do: labels that are texts, and scores as maps."""
    classes = ["a", "b", "c"]
    scores = helper.make_map_type_proto(STRING, helper.make_tensor_type_proto(FLOAT, None))
    return write(
        path,
        [
            helper.make_node(
                "LinearClassifier",
                ["X"],
                ["label", "scores"],
                domain="ai.onnx.ml",
                classlabels_strings=classes,
                coefficients=np.eye(3).ravel().tolist(),
                intercepts=[0.0, 0.0, 0.0],
                multi_class=1,
                post_transform="SOFTMAX",
            ),
            helper.make_node(
                "ZipMap",
                ["scores"],
                ["probability"],
                domain="ai.onnx.ml",
                classlabels_strings=classes,
            ),
        ],
        [info("X", FLOAT, [None, 3])],
        [
            info("label", STRING, [None]),
            helper.make_value_info("probability", helper.make_sequence_type_proto(scores)),
        ],
    )


def write_words(path: Path) -> Path:
    """Write a table with a column of texts and one of numbers."""
    return write(
        path,
        [
            helper.make_node(
                "LabelEncoder",
                ["word"],
                ["number"],
                domain="ai.onnx.ml",
                keys_strings=["cat", "dog"],
                values_floats=[1.0, 2.0],
                default_float=-1.0,
            ),
            helper.make_node("Add", ["number", "age"], ["score"]),
        ],
        [info("word", STRING, [None, 1]), info("age", FLOAT, [None, 1])],
        [info("score", FLOAT, [None, 1])],
    )
