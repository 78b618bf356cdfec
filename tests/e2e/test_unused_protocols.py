"""A service imports nothing of another protocol until a client speaks it."""

import os
import signal
from pathlib import Path

from tests.e2e.forked import python_path
from tests.e2e.running import Running, running, until

_SIGNAL = signal.SIGRTMIN  # which the service does not use
_HOOK = """
import os, pathlib, signal, sys

def write(*_):
    file = pathlib.Path({folder!r}, f"{{os.getpid()}}.part")
    file.write_text(" ".join(sys.modules))
    file.rename(file.with_suffix(".modules"))

signal.signal({number}, write)
"""
_ROOM = "inferpool.service.parts"
V2, V1, TEXTS, TEI = (f"{_ROOM}.{each}" for each in ("open_inference", "kserve_v1", "texts", "tei"))
SERVERS = {
    f"{_ROOM}.torchserve",
    f"{_ROOM}.platforms",
    "inferpool.models.torchserve",
    "inferpool.service.settings.properties",
    "yaml",
}
ALL = {V2, V1, TEXTS, TEI, "grpc", "google.protobuf", *SERVERS}


def loaded_by(service: Running, folder: Path) -> set[str]:
    """Return the modules that the main process has imported, and the packages around them."""
    file = folder / f"{service.process.pid}.modules"
    file.unlink(missing_ok=True)
    service.signal(_SIGNAL)
    until(file.exists)
    names = file.read_text().split()
    return {name[:end] for name in names for end in (*_ends(name), len(name))}


def _ends(name: str) -> list[int]:
    return [place for place, letter in enumerate(name) if letter == "."]


def test_calls_to_predict_load_nothing_of_other_protocols(tmp_path: Path):
    """Python runs `sitecustomize` in each process of the service."""
    (tmp_path / "sitecustomize.py").write_text(
        _HOOK.format(folder=str(tmp_path), number=int(_SIGNAL))
    )
    path = os.pathsep.join([str(tmp_path), python_path()])
    with running("echo", "--replicas", "1", env={"PYTHONPATH": path}, forks=False) as service:
        for _ in range(3):
            assert service.predict("a", {"b": 1}) == ["a", {"b": 1}]
            octets = {"content-type": "application/octet-stream"}
            assert service.post(content=b"x", headers=octets).status_code == 200
        loaded = loaded_by(service, tmp_path)
        assert f"{_ROOM}.live" in loaded  # so it does list what there is
        assert loaded & ALL == set()
        body = {"inputs": [{"name": "x", "shape": [1], "datatype": "INT32", "data": [1]}]}
        assert service.post("/v2/models/echo/infer", json=body).status_code == 200
        assert loaded_by(service, tmp_path) & ALL == {V2}
        assert service.post("/v1/embeddings", json={"input": "a"}).status_code == 400
        loaded = loaded_by(service, tmp_path)
        assert loaded & ALL == {V2, TEXTS}
        assert f"{TEXTS}.rerank" not in loaded
