"""Archives of TorchServe before real workers, named as a source."""

import os
import signal
from pathlib import Path

from tests.e2e.running import running, until
from tests.models.torchserve.archives import make_mar

ADMIN = "an-admin-key-of-enough-characters"
HANDLER = """
import os

def handle(data, context):
    if data is None:
        return None
    folder = context.system_properties["model_dir"]
    return [{"is": {mark!r}, "num": len(data), "folder": folder, "pid": os.getpid()} for _ in data]
"""


def make(path: Path, mark: str, **fields: object) -> Path:
    return make_mar(path, {"handler.py": HANDLER.replace("{mark!r}", repr(mark))}, **fields)


def test_an_archive_outlives_its_worker_and_gives_way_to_another(tmp_path: Path) -> None:
    first, second = make(tmp_path / "first.mar", "first"), make(tmp_path / "second.mar", "second")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = {"INFERPOOL_ADMIN_KEYS": ADMIN, "TMPDIR": str(temporary)}
    with running(str(first), "--replicas", "1", env=env) as service:
        assert service.model()["name"] == "toy"
        (found,) = service.predict({"a": 1})
        assert (found["is"], found["num"]) == ("first", 1)
        folder = Path(found["folder"])
        assert folder.is_relative_to(temporary)
        os.kill(found["pid"], signal.SIGKILL)
        (again,) = service.predict({"a": 1})
        assert (again["is"], again["folder"]) == ("first", found["folder"])
        assert again["pid"] != found["pid"]
        answer = service.post(
            "/admin/models/toy/versions",
            json={"source": str(second), "policy": "force", "rollback_s": 0},
            headers={"Authorization": f"Bearer {ADMIN}"},
        )
        assert answer.status_code in (200, 202), answer.text
        until(lambda: service.predict({"a": 1})[0]["is"] == "second")
        until(lambda: not os.path.exists(f"/proc/{again['pid']}"))
        assert folder.exists()  # the next worker that unpacks an archive deletes it
        (newest,) = service.predict({"a": 1})
        os.kill(newest["pid"], signal.SIGKILL)
        assert service.predict({"a": 1})[0]["folder"] == newest["folder"]
        assert not folder.exists()
