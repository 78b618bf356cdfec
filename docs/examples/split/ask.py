"""Asks the split service, and compares its answer with the whole network's.

Usage: python ask.py URL
"""

import sys

import torch
from safetensors.torch import load_file
from stack import WEIGHTS, WIDTH, build

from inferpool import Client

x = torch.linspace(-1, 1, WIDTH)
network = build()
network.load_state_dict(load_file(WEIGHTS))
with torch.inference_mode():
    expected = network(x[None])[0]

with Client(sys.argv[1]) as client:
    y = torch.tensor(client.predict(x).value)
    worker = client.health().models[0].workers[0]
torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
print(f"{len(y)} numbers, the same as those of the whole network; computed on {worker.device}")
