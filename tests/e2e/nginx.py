"""A real nginx in front of services of tests."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.running import status_of, until

_FOLDERS = ("client_body", "proxy", "fastcgi", "scgi", "uwsgi")
needs_nginx = pytest.mark.skipif(
    shutil.which("nginx") is None, reason="needs nginx: apt-get install nginx-light"
)


@contextmanager
def nginx(folder: Path, text: str, url: str) -> Iterator[str]:
    """Run nginx with a configuration that listens at a URL, and yield the URL.

    All that it writes goes into the folder. It is up once `/admin` is 404.
    """
    folders = "".join(f"{name}_temp_path {folder}/{name};\n" for name in _FOLDERS)
    assert text.count("http {") == 1
    config = folder / "nginx.conf"
    config.write_text(text.replace("http {", f"http {{\n{folders}"))
    (folder / "log").touch()
    own = f"daemon off; pid {folder}/pid; error_log {folder}/log warn;"
    own += " user root;" if os.getuid() == 0 else ""
    process = subprocess.Popen(
        ["nginx", "-p", str(folder), "-c", str(config), "-e", f"{folder}/log", "-g", own]
    )

    def is_up() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        return status_of(f"{url}/admin") == 404

    try:
        until(is_up)
        yield url
    finally:
        process.terminate()
        process.wait(20)
