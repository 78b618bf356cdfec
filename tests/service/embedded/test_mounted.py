"""Services of Python code over fake workers, and what their next start knows."""

from pathlib import Path

import httpx
import pytest

from inferpool.service.embedded.arguments import read_arguments
from inferpool.service.embedded.mounted import MountedApp
from inferpool.service.embedded.serve import RunningService
from inferpool.service.errors import StartError
from tests.fakes import FakeEngine

KEY = "a-key-for-administration"


class QuietEngine(FakeEngine):
    """An engine of this host without processes."""

    async def close(self) -> None: ...

    def forkserver_vitals(self) -> None: ...


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.toml"
    path.write_text('speed_search = false\n[models.m]\nsource = "echo"\nreplicas = 1\n')
    return path


def mounted(file: Path) -> MountedApp:
    settings = {"admin_keys": KEY, "cache_dir": str(file.parent)}
    loaded, _ = read_arguments(None, file, settings)
    return MountedApp(loaded, lambda arena: QuietEngine())


async def asked(app: MountedApp, method: str, path: str = "", **body: object) -> httpx.Response:
    transport = httpx.ASGITransport(app=app)
    headers = {"x-api-key": KEY}
    async with httpx.AsyncClient(transport=transport, base_url="http://h", headers=headers) as http:
        return await http.request(method, f"/admin/models{path}", json=body or None)


async def test_changes_of_a_mounted_service_are_kept_beside_its_file_of_settings(file):
    app = mounted(file)
    async with app.lifespan():
        added = await asked(app, "POST", name="n", source="echo", replicas=1)
        assert added.json()["saved"]
        removed = await asked(app, "DELETE", "/m")
        assert removed.status_code == 204
    for again in (app, mounted(file)):
        async with again.lifespan():
            models = (await asked(again, "GET")).json()["models"]
            assert [each["name"] for each in models] == ["n"]
    async with app.lifespan():
        assert (await asked(app, "DELETE", "/n")).status_code == 204
    async with app.lifespan():
        assert (await asked(app, "GET")).json()["models"] == []


def test_the_service_of_a_script_is_told_where_to_keep_changes(file):
    def toml_of(models: str | None = None) -> str:
        return RunningService(*read_arguments(models, file, {}), {})._toml().decode()

    assert f'state_file = "{file.with_suffix(".state.json")}"' in toml_of()
    assert 'state_file = "none"' in toml_of("echo")


async def test_a_mounted_service_does_not_start_with_a_state_file_that_cannot_be_used(file):
    file.with_suffix(".state.json").write_text("x")
    with pytest.raises(StartError, match=r"own\.state\.json: it cannot be used"):
        async with mounted(file).lifespan():
            pass
