"""A private PostgreSQL server, from the Debian package, for as long as a test needs it."""

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.ports import free_port

_START_S = 60.0


def find_programs() -> Path | None:
    """Return the folder with `initdb` and `postgres`; None if PostgreSQL is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    return None if on_path is None else Path(on_path).parent


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """Yield the URL of a database, of a server that forgets everything at the end."""
    programs = find_programs()
    assert programs is not None
    folder = Path(tempfile.mkdtemp(prefix="pg-"))
    user: str | None = None
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        user = "postgres"
        owner = pwd.getpwnam(user)
        os.chown(folder, owner.pw_uid, owner.pw_gid)
    port = free_port()
    data = folder / "data"
    make = ["initdb", "--pgdata", data, "--auth", "trust", "--username", "inferpool", "--no-sync"]
    environ = {**os.environ, "LC_ALL": "C.UTF-8"}
    try:
        subprocess.run(
            [programs / make[0], *make[1:]],
            user=user,
            env=environ,
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(
                [programs / "postgres", "-D", data, "-p", str(port), "-k", folder],
                user=user,
                env=environ,
                cwd=folder,
                stdout=log,
                stderr=log,
            )
        try:
            _wait_for(programs, port, folder / "log")
            yield f"postgresql://inferpool@127.0.0.1:{port}/postgres"
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(programs: Path, port: int, log: Path) -> None:
    end = time.monotonic() + _START_S
    ask = [programs / "pg_isready", "--host", "127.0.0.1", "--port", str(port), "--quiet"]
    while subprocess.run(ask, check=False).returncode != 0:
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.05)
