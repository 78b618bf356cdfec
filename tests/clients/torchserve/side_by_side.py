"""The command `python -m tests.clients --torchserve`: both servers on the same archives, live."""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.clients.environments import Environments, calls_of
from tests.clients.scripts.telling import KEY
from tests.clients.torchserve.archives import RECIPES, members_of, write_store
from tests.clients.torchserve.calls import PHOTOS
from tests.clients.torchserve.differences import meant_statuses
from tests.clients.torchserve.exchange import ask_all, difference
from tests.clients.torchserve.real import real_torchserve, write_config

RECORDED = Path(__file__).with_name("recorded.json")
PACKAGES = (
    *("torchserve==0.12.0", "torch-model-archiver==0.12.0", "torch==2.15.0", "torchvision==0.29.2"),
    *("captum", "transformers", "pyyaml", "psutil", "requests", "packaging", "pillow", "numpy"),
    *("setuptools", "nvgpu"),
)
_START_S = 300.0
_STOP_S = 60.0
Row = tuple[str, str, str, str]


def record_torchserve(environments: Environments, folder: Path) -> None:
    """Write the recorded answers anew."""
    python = environments.made("torchserve", PACKAGES)
    store = write_store(_emptied(folder), python.parent / "torch-model-archiver")
    with real_torchserve(python, folder, store) as ports:
        found = json.dumps(ask_all(ports), indent=1, ensure_ascii=False)
    RECORDED.write_text(found + "\n")


def torchserve_rows(environments: Environments, folder: Path) -> Iterator[Row]:
    """Yield the name of the client and of each call, the result, and how the answers differ."""
    python = environments.made("torchserve", PACKAGES)
    archiver = python.parent / "torch-model-archiver"
    store = write_store(_emptied(folder / "theirs"), archiver)
    own = write_store(_emptied(folder / "ours"))
    for name in RECIPES:
        is_same = _is_same(store / f"{name}.mar", own / f"{name}.mar")
        yield "archiver", name, "same" if is_same else "different", ""
    with real_torchserve(python, folder / "theirs", store) as ports:
        theirs = _clients_of(python, ports["inference"]), ask_all(ports)
    shutil.rmtree(own)
    shutil.copytree(store, own)  # those of the real archiver
    with _served(folder / "ours", own) as ports:
        ours = _clients_of(python, ports["inference"]), ask_all(ports, KEY)
    for found, told in zip(ours, theirs, strict=True):
        yield from _rows(found, told)


def _rows(ours: Mapping[str, Mapping[str, Any]], theirs: Mapping[str, Any]) -> Iterator[Row]:
    meant = meant_statuses()
    for client, answers in theirs.items():
        for call, told in answers.items():
            found = ours[client][call]
            text = difference(told, found)
            if (client, call) in meant and found["status"] == meant[client, call]:
                yield client, call, "documented", text
            else:
                yield client, call, "different" if text else "same", text


def _is_same(one: Path, other: Path) -> bool:
    found, told = members_of(one), members_of(other)
    found.pop("script.pt", None)  # TorchScript numbers its classes in each process
    told.pop("script.pt", None)
    return found == told


def _clients_of(python: Path, port: int) -> dict[str, dict[str, Any]]:
    """Return the answers that real clients get, by the client's and the call's name."""
    found: dict[str, dict[str, Any]] = {}
    for kind in ("requests", "curl"):
        address = f"127.0.0.1:{port}"
        calls = calls_of(python, "torchserve_calls.py", kind, address, PHOTOS=str(PHOTOS))
        found[kind] = {each.call: each.answer or {"status": None} for each in calls}
    return found


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


@contextmanager
def _served(folder: Path, store: Path) -> Iterator[Mapping[str, int]]:
    """Serve a folder of archives by this service; yield the ports by the addresses' names."""
    config, ports = write_config(folder, store)
    (folder / "admin.key").write_text(KEY)
    log = folder / "inferpool.log"
    environment = os.environ | {
        "PYTHONPATH": os.getcwd(),
        "INFERPOOL_ADMIN_KEYS_FILE": str(folder / "admin.key"),
    }
    command = [sys.executable, "-m", "inferpool", "serve", "--torchserve", str(config)]
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    try:
        until = time.monotonic() + _START_S
        while not _is_ready(ports["inference"]):
            if time.monotonic() > until or process.poll() is not None:
                raise RuntimeError(f"the service is not ready:\n{log.read_text()[-3000:]}")
            time.sleep(0.3)
        yield ports
    finally:
        process.terminate()
        process.wait(_STOP_S)


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ping", timeout=20):
            return True
    except OSError:
        return False
