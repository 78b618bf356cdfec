"""The commands to try that a start prints, pasted into a shell as they are."""

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.running import running, until

MODELS = """
import pathlib
import time

import torch
from inferpool.models.base import Model
from inferpool.models.item import Features, Item
from inferpool.models.spec import TensorSpec


class Words(Model):
    inputs = [TensorSpec(name="n", dtype="int64", shape=(-1,))]

    def preprocess(self, item: Item) -> Features:
        return {"n": torch.tensor(len(item.json()["words"]))}

    def forward(self, batch: Features) -> Features:
        return {"y": batch["n"] * 2}


class Shown(Words):
    example = {"words": ["it's", "so"]}


class Picture(Words):
    def example(self):
        return b"GIF89a", "image/gif"

    def preprocess(self, item: Item) -> Features:
        assert item.kind == "image"
        return {"n": torch.tensor(len(item.payload))}


class Refused(Words):
    example = {"letters": ["a"]}


class Numbers(Model):
    inputs = [TensorSpec(name="x", dtype="float32", shape=(-1, 3))]

    def forward(self, batch: Features) -> Features:
        return {"y": batch["x"].flatten(1).sum(1)}


class Two(Numbers):
    inputs = [
        TensorSpec(name="x", dtype="float32", shape=(-1, -1)),
        TensorSpec(name="ok", dtype="bool", shape=(-1,)),
    ]


class Large(Numbers):
    inputs = [TensorSpec(name="x", dtype="float32", shape=(-1, 3, 64, 64))]


class Pair(Words):
    inputs = [
        TensorSpec(name="a", dtype="uint8", shape=(-1, -1)),
        TensorSpec(name="b", dtype="uint8", shape=(-1, -1)),
    ]
    preprocessed = [TensorSpec(name="n", dtype="int64", shape=(-1,))]
    example = {"a": {"b64": "AAAA"}, "b": {"b64": ""}}

    def preprocess(self, item: Item) -> Features:
        files = item.json()
        assert isinstance(files["a"], bytes)
        return {"n": torch.tensor(len(files["a"]) * 100 + len(files["b"]))}


class Slow(Numbers):
    def load(self, placement):
        while not pathlib.Path("go").exists():
            time.sleep(0.02)
"""
ANSWERS: dict[str, object] = {"Shown": 4, "Picture": 12, "Pair": 600}
ANSWERS |= dict.fromkeys(("Numbers", "Two", "Large", "Slow"), 0.0)
"""What the try line of each model is answered with."""
UNKNOWN = ("Words", "Refused")
"""Models that read a form of their own and have no example that they accept."""
BUILT_IN = ("echo", "efficientnet_lite0", "minilm_l6")


def try_lines(messages: Sequence[str]) -> dict[str, str]:
    """Return the line for each model: "try: curl ..." or "ask: ..."."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in messages:
        if match := re.match(r"serving ([\w, ]+?)( too.*| at .*)", line):
            names = match[1].split(", ")
        elif names and line.startswith(("try: ", "ask: ")):
            found[names.pop(0)] = line
    return found


def pasted(line: str) -> object:
    assert line.startswith("try: ")
    command = ["bash", "-c", line.removeprefix("try: ")]
    answer = subprocess.run(command, capture_output=True, timeout=240, check=True)
    return json.loads(answer.stdout).get("predictions", answer.stdout)


@pytest.mark.slow
def test_every_try_line_works_when_pasted(tmp_path: Path):
    (tmp_path / "own.py").write_text(MODELS)
    key = tmp_path / "its key"
    key.write_text("0123456789abcdef\n")
    own = {name.lower(): f"own:{name}" for name in (*ANSWERS, *UNKNOWN)}
    sources = dict(zip(BUILT_IN, BUILT_IN, strict=True)) | own
    models = {
        name: {"source": source, "replicas": 1, "threads_per_replica": 1}
        for name, source in sources.items()
    }
    models["refused"]["check"] = "warn"  # its own preprocess refuses its example
    settings = {"predict_keys_file": key, "models": models}
    with running(settings=settings, cwd=tmp_path, ready=False) as service:
        service.wait_for_log("serving echo")
        assert "slow" in str(service.wait_for_log("not ready yet: ")["message"])
        (tmp_path / "go").touch()

        def lines() -> dict[str, str]:
            return try_lines([str(each["message"]) for each in service.log])

        until(lambda: lines().keys() == models.keys())
        by_model = lines()
        for name in BUILT_IN:
            assert isinstance(pasted(by_model[name]), list)
        for name, answer in ANSWERS.items():
            assert pasted(by_model[name.lower()]) == [answer]
        for name in UNKNOWN:
            assert by_model[name.lower()].startswith("ask: POST to http")
        (tmp_path / "one").write_bytes(b"GIF89a")
        (tmp_path / "two").write_bytes(b"xyz")
        form = f"-F 'a=@{tmp_path}/one;type=image/gif' -F b=@{tmp_path}/two"
        (url,) = re.findall(r"http://[^/ ]+", by_model["shown"])
        url += "/predict/pair"
        head = '-H "X-API-Key: 0123456789abcdef"'
        assert pasted(f"try: curl {url} {form} {head}") == [1206]
        without_type = (
            f"""curl {url.replace("pair", "numbers")} {head} -d '{{"instances": [[1, 2, 3]]}}'"""
        )
        assert pasted(f"try: {without_type}") == [6.0]
        assert any("refuses its example" in str(each["message"]) for each in service.log)
