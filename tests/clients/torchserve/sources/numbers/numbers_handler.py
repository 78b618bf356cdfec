"""A custom handler: a class above TorchServe's own, with JSON in and out."""

import json
from pathlib import Path

import torch
from ts.torch_handler.base_handler import BaseHandler


class NumbersHandler(BaseHandler):
    """Reads {"numbers": [...]}, and answers with the network's numbers and the sum."""

    def initialize(self, context):
        super().initialize(context)
        self.unit = json.loads(Path("unit.json").read_text())["unit"]

    def preprocess(self, data):
        rows = [row.get("data") or row.get("body") for row in data]
        rows = [json.loads(row) if isinstance(row, bytes | bytearray) else row for row in rows]
        return torch.tensor([row["numbers"] for row in rows], dtype=torch.float32)

    def postprocess(self, data):
        self.context.metrics.add_counter("NumbersSeen", 2)
        return [{"numbers": row, "sum": sum(row), "unit": self.unit} for row in data.tolist()]
