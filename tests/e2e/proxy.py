"""nginx as docker/nginx.conf has it, in front of services of a test."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from tests.e2e.running import ROOT

CONFIG = ROOT / "docker" / "nginx.conf"
needs_nginx = pytest.mark.skipif(
    shutil.which("nginx") is None, reason="needs nginx: apt-get install nginx-light"
)
_TEMPORARY = ("client_body", "proxy", "fastcgi", "scgi", "uwsgi")


@contextlib.contextmanager
def proxy(folder: Path, port: int, upstream_ports: Sequence[int]) -> Iterator[str]:
    """Run it with other ports; yields its URL."""
    text = CONFIG.read_text()
    changes = {"listen 8000;": f"listen 127.0.0.1:{port};"}
    for number, upstream_port in enumerate(upstream_ports, 8001):
        changes[f"127.0.0.1:{number}"] = f"127.0.0.1:{upstream_port}"
    changes["http {"] = "http {\n" + "".join(
        f"{name}_temp_path {folder}/{name};\n" for name in _TEMPORARY
    )
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    config = folder / "nginx.conf"
    config.write_text(text)
    (folder / "log").touch()
    own = f"daemon off; pid {folder}/pid; error_log {folder}/log warn;"
    own += " user root;" if os.getuid() == 0 else ""
    process = subprocess.Popen(
        ["nginx", "-p", str(folder), "-c", str(config), "-e", f"{folder}/log", "-g", own]
    )
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 60
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/admin").status_code == 404:
                    break
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < until
            time.sleep(0.02)
        yield url
    finally:
        process.terminate()
        process.wait(20)
