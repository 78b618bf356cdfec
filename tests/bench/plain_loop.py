"""A plain process that decodes, batches and computes in a loop: what `model` compares with.

python -m tests.bench.plain_loop '{"source": ..., "files": [...], ...}': writes "ready" once it is
loaded and warm, waits for a line with the seconds to run, then writes one line of JSON.
"""

import json
import os
import sys
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from inferpool.models.item import Item
from inferpool.models.sources.registry import build
from inferpool.models.spec import Placement


def main(told: dict[str, Any]) -> None:
    placement = Placement(
        devices=tuple(told["devices"]), cpus=tuple(told["cpus"]), num_threads=told["num_threads"]
    )
    if placement.cpus:
        os.sched_setaffinity(0, placement.cpus)
    torch.set_num_threads(placement.num_threads)
    model = build(told["source"], told["weights"], {})
    model.load(placement)
    payloads = cycle([Path(file).read_bytes() for file in told["files"]])

    def compute_batch() -> None:
        items = [
            Item(kind="image", payload=memoryview(payload))
            for payload in islice(payloads, told["batch_size"])
        ]
        with torch.inference_mode():
            outputs = model.forward(model.collate([model.preprocess(item) for item in items]))
            # On a GPU nothing has been computed before the outputs are here.
            for output in outputs.values():
                output.cpu()

    for _ in range(3):
        compute_batch()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    secs = float(sys.stdin.readline())
    began, cpu_began, num_images = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < secs:
        compute_batch()
        num_images += told["batch_size"]
    result = {
        "num_images": num_images,
        "duration_s": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu_began,
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
