"""The routes below `/v2` over a catalog of fake workers: what they show, load and unload."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import msgspec
import pytest

from inferpool.models.spec import Interface, TensorSpec
from inferpool.service.api.web import App
from inferpool.service.errors import UnavailableError, UnknownModelError
from inferpool.service.parts.open_inference.repository import Repository
from inferpool.service.parts.open_inference.routes import v2_router
from inferpool.service.parts.swap.changes import Changes
from inferpool.service.report import report_of
from inferpool.service.settings.state import StateFile
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.errors import WorkerStartError
from tests.fakes import FakeEngine, ref_to
from tests.service.catalog.test_catalog import ECHO, ROOM, Kept, answering
from tests.service.pools import until

X = TensorSpec(name="x", dtype="float32", shape=(-1, 3))
Y = TensorSpec(name="y", dtype="bfloat16", shape=(-1, 2, -1))


class AskedRepository:
    """Asks the routes over fake workers, as an operator may if there are `changes`."""

    def __init__(
        self, arena: Arena, state: StateFile | None = None, *, has_operators: bool = True
    ) -> None:
        self.kept = kept = Kept(arena, state)
        self.changes = Changes(kept.catalog, kept.metrics, None, ROOM, grace_s=5)
        configured = {**kept.state.configured, **kept.state.models}
        self.repository = Repository(
            kept.catalog, configured, self.changes if has_operators else None
        )
        self.is_ready = True
        router = v2_router(self.repository, self._report, has_operators=has_operators)
        self.app = App(version="1", routers=[router])
        form = "inferpool.service.parts.open_inference.calls:error_answer"
        self.app.forms_of_errors = {"v2": form}
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://host")

    async def ready(self) -> "AskedRepository":
        await until(lambda: self.kept.catalog.serving["m"].is_ready)
        return self

    async def get(self, path: str) -> Any:
        answer = await self.http.get(f"/v2{path}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def change(self, what: str, model: str = "m", body: object = None) -> tuple[int, str]:
        """Load or unload a model; return the status and the error."""
        content = b"" if body is None else msgspec.json.encode(body)
        answer = await self.http.post(f"/v2/repository/models/{model}/{what}", content=content)
        return answer.status_code, answer.json()["error"] if answer.content else ""

    async def index(self, body: bytes = b"") -> Any:
        return (await self.http.post("/v2/repository/index", content=body)).json()

    async def refusal(self, method: str, path: str, body: bytes = b"") -> tuple[int, str]:
        answer = await self.http.request(method, f"/v2{path}", content=body)
        is_of_route = answer.headers["content-type"] == "application/json"  # KServe reads no other
        assert is_of_route or answer.json()["code"] in ("not_found", "method_not_allowed")
        return answer.status_code, answer.json()["error"]

    def _report(self) -> Any:
        return report_of([], [], [], None, is_ready=self.is_ready, is_draining=False)


@pytest.fixture
def make(arena: Arena) -> Callable[..., AskedRepository]:
    return lambda **options: AskedRepository(arena, **options)


async def test_an_unloaded_model_is_gone_until_it_is_loaded_with_the_settings_it_had(make):
    asked = await make().ready()
    answering(asked.kept)
    asked.changes.begin_swap("m", {"policy": "force", "max_batch_size": 3, "rollback_s": 0})
    await asked.changes.until_decided("m")
    await until(lambda: "m" not in asked.kept.catalog.busy)
    assert (await asked.get("/models/m/config"))["max_batch_size"] == 3
    body = {"parameters": {"unload_dependents": True}}
    assert await asked.change("unload", body=body) == (200, "")
    gone = {"name": "m", "version": "2", "state": "UNAVAILABLE", "reason": "unloaded"}
    assert await asked.index() == [gone]
    assert await asked.index(b'{"ready": true}') == []
    for path in ("", "/ready", "/config", "/stats", "/versions/2"):
        words = "no model is called 'm'; there are: none"
        assert await asked.refusal("GET", f"/models/m{path}") == (404, words)
    assert (await asked.get("/models/stats")) == {"model_stats": []}
    assert await asked.change("unload") == (200, "")
    assert await asked.change("load", body={}) == (200, "")
    loaded = {"name": "m", "version": "3", "state": "READY"}
    assert await asked.index(b'{"ready": true}') == [loaded]
    assert (await asked.get("/models/m/config"))["max_batch_size"] == 3
    assert await asked.change("load") == (200, "")  # it stays as it is
    assert (await asked.get("/models/m"))["versions"] == ["3"]


@pytest.mark.parametrize(
    ("what", "model", "body", "status", "said"),
    [
        ("load", "n", None, 404, "'n' is neither served nor configured"),
        ("unload", "n", {}, 404, "those that can be loaded are: m"),
        ("load", "m", {"parameters": {"config": "{}"}}, 400, "a configuration from a caller"),
        ("load", "m", {"parameters": {"file:1/model.pt": "AAAA"}}, 400, "files from a caller"),
        ("load", "m", {"parameters": {"unload_dependents": True}}, 400, "is not known"),
        ("unload", "m", {"parameters": {"config": "{}"}}, 400, "parameters.config: is not known"),
        ("unload", "m", {"parameters": []}, 400, "parameters: must be an object"),
        ("load", "m", [], 400, "must be a JSON object"),
        ("load", "m", {"parameters": {"x": "a" * 70_000}}, 413, "larger than 65536 bytes"),
    ],
)
async def test_callers_bring_in_neither_models_nor_settings(make, what, model, body, status, said):
    asked = await make().ready()
    found, error = await asked.change(what, model, body)
    assert (found, said in error) == (status, True), error
    assert await asked.index() == [{"name": "m", "version": "1", "state": "READY"}]


async def test_a_load_is_answered_once_all_fronts_know_the_model(make):
    asked = await make().ready()
    await asked.change("unload")
    kept = asked.kept
    kept.are_fronts_slow = True
    loading = asyncio.create_task(asked.change("load"))
    await until(lambda: "m" in kept.catalog.serving and "m" not in kept.catalog.busy)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not loading.done()
    kept.told.set()
    assert await loading == (200, "")


async def test_a_model_that_cannot_be_loaded_any_more_says_why_and_stays_away(make):
    asked = await make().ready()
    await asked.change("unload")
    asked.kept.engine.failures = [WorkerStartError("there is no file x.pt", permanent=True)] * 9
    status, error = await asked.change("load")
    assert (status, "there is no file x.pt" in error) == (400, True), error
    assert [each["state"] for each in await asked.index()] == ["UNAVAILABLE"]
    asked.kept.engine.failures = []
    assert await asked.change("load") == (200, "")


async def test_a_client_that_is_gone_before_its_body_disturbs_nothing(make):
    asked = await make().ready()
    came = iter(
        [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    )
    statuses = []

    async def receive() -> Any:
        return next(came)

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    path = "/v2/repository/index"
    head = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode()}
    await asked.app({**head, "query_string": b"", "headers": []}, receive, send)
    assert statuses[0] == 400


async def test_a_model_that_is_being_changed_is_neither_loaded_nor_unloaded(make):
    asked = await make().ready()
    asked.kept.catalog.busy.begin("m", "workers of it are being restarted")
    status, error = await asked.change("unload")
    assert (status, "being restarted" in error) == (409, True)


async def test_an_unloaded_model_of_the_settings_can_be_loaded_after_the_next_start(
    make, tmp_path: Path
):
    def started() -> StateFile:
        state = StateFile(tmp_path / "state.json", {"m": ECHO, "n": ECHO})
        state.read()
        return state

    first = make(state=started())
    await until(lambda: all(pool.is_ready for pool in first.kept.catalog.serving.values()))
    assert await first.change("unload", "n") == (200, "")
    second = await make(state=started()).ready()
    assert await second.get("/models") == {"models": ["m"]}
    assert [each["state"] for each in await second.index()] == ["READY", "UNAVAILABLE"]
    assert await second.change("load", "n") == (200, "")
    assert {*started().models} == {"m", "n"}


async def test_without_an_operator_nothing_is_loaded_or_unloaded(make):
    asked = await make(has_operators=False).ready()
    assert "model_repository" not in (await asked.get(""))["extensions"]
    status, error = await asked.change("unload")
    assert (status, "there is nothing at" in error) == (404, True)
    with pytest.raises(UnavailableError, match="there is no admin key"):
        asked.repository.begin_unload("m", {})
    assert await asked.get("/models/m/ready") == {"name": "m", "ready": True}


async def test_the_server_is_ready_when_the_service_is(make):
    asked = await make().ready()
    metadata = await asked.get("/")
    assert metadata == await asked.get("")
    assert metadata["name"] == "inferpool"
    assert {"binary_tensor_data", "statistics", "model_repository"} <= {*metadata["extensions"]}
    assert await asked.get("/health/live") == {"live": True}
    assert await asked.get("/health/ready") == {"ready": True, "live": True}
    asked.is_ready = False
    answer = await asked.http.get("/v2/health/ready")
    assert answer.status_code == 503
    assert answer.json() == {"ready": False, "live": True, "error": "this server is not ready"}
    assert (await asked.http.head("/v2/health/ready")).status_code == 503
    document: Any = asked.app.openapi()
    described = document["paths"]["/v2/health/ready"]["get"]["responses"]["503"]["content"]
    schema = described["application/json"]["schema"] | {"components": document["components"]}
    jsonschema_rs.validate(schema, answer.json())


async def test_versions_that_calls_can_name_are_numbers_as_texts(make):
    asked = await make().ready()
    asked.kept.engine.interfaces = {"m": Interface(path="/own")}
    asked.kept.catalog.serve(await asked.kept.ready())
    assert "/own" in asked.kept.catalog.entries
    for path in ("", "/versions/1", "/versions/2"):
        assert (await asked.get(f"/models/m{path}"))["versions"] == ["1", "2"]
    stats = (await asked.get("/models/m/stats"))["model_stats"]
    assert [each["version"] for each in stats] == ["1", "2"]
    (one,) = (await asked.get("/models/m/versions/1/stats"))["model_stats"]
    assert (one["name"], one["version"]) == ("m", "1")
    assert await asked.get("/models/m/versions/1/ready") == {"name": "m", "ready": True}
    for version in ("3", "01", "no", "-1"):
        status, error = await asked.refusal("GET", f"/models/m/versions/{version}")
        assert (status, error.endswith("loaded; there are: 1, 2")) == (404, True)
    for name in ("m/versions/1", "/own"):  # gRPC has names in messages, not in paths
        with pytest.raises(UnknownModelError, match="no model is called"):
            asked.repository.find(name)


async def test_a_model_that_loads_is_listed_and_not_ready(make):
    asked = make()
    asked.kept.engine.failures = [WorkerStartError("not now", permanent=False)] * 9
    await until(lambda: len(asked.kept.engine.failures) < 9)
    (entry,) = await asked.index()
    assert (entry["state"], bool(entry["reason"])) == ("LOADING", True)
    for path in ("", "/ready", "/config"):
        status, error = await asked.refusal("GET", f"/models/m{path}")
        assert (status, error.startswith("m is not ready: ")) == (503, True)
    status, error = await asked.change("load")
    assert (status, error.startswith("m is not ready: ")) == (503, True)
    assert len((await asked.get("/models/m/stats"))["model_stats"]) == 1


class DeclaringEngine(FakeEngine):
    """Starts workers whose model declares tensors and speaks in some way."""

    def __init__(self, *specs: TensorSpec, **interface: object) -> None:
        super().__init__()
        self.inputs = [each for each in specs if each.name == "x"]
        self.outputs = [each for each in specs if each.name == "y"]
        self.spoken = Interface(**interface)  # type: ignore[arg-type]  # a test knows its fields

    async def start(self, id: Any, config: Any, on_progress: Any) -> Any:
        worker = await super().start(id, config, on_progress)
        worker.ready = msgspec.structs.replace(
            worker.ready, inputs=self.inputs, outputs=self.outputs, interface=self.spoken
        )
        return worker


BYTES_IN = ("input", "BYTES", [-1, 1])
BYTES_OUT = ("output", "BYTES", [-1, 1])
FLOATS_IN, HALVES_OUT = ("x", "FP32", [-1, 3]), ("y", "BF16", [-1, 2, -1])


@pytest.mark.parametrize(
    ("engine", "inputs", "outputs", "decoupled"),
    [
        (lambda: DeclaringEngine(X, Y), [FLOATS_IN], [HALVES_OUT], False),
        (lambda: DeclaringEngine(X), [FLOATS_IN], [], False),
        (lambda: DeclaringEngine(), [BYTES_IN], [BYTES_OUT], False),
        (lambda: DeclaringEngine(Y), [BYTES_IN], [HALVES_OUT], False),
        (lambda: DeclaringEngine(X, Y, accepts="image"), [BYTES_IN], [HALVES_OUT], False),
        (lambda: DeclaringEngine(X, Y, streams=True), [FLOATS_IN], [BYTES_OUT], True),
    ],
)
async def test_metadata_and_configuration_say_what_a_model_takes_and_gives(
    arena, engine, inputs, outputs, decoupled
):
    kept = Kept(arena, engine=engine())
    await until(lambda: kept.catalog.serving["m"].is_ready)
    repository = Repository(kept.catalog, {}, None)
    found, config = repository.metadata("m"), repository.config("m")
    for tensors, expected in ((found.inputs, inputs), (found.outputs, outputs)):
        assert [(each.name, each.datatype, each.shape) for each in tensors] == expected
    for tensors, declared in ((config.input, found.inputs), (config.output, found.outputs)):
        for one, other in zip(tensors, declared, strict=True):
            data_type = "TYPE_STRING" if other.datatype == "BYTES" else f"TYPE_{other.datatype}"
            assert (one.name, one.data_type) == (other.name, data_type)
            assert [-1, *one.dims] == other.shape
    assert config.model_transaction_policy.decoupled is decoupled
    assert (config.dynamic_batching is None) is decoupled
    assert config.max_batch_size == ECHO.batch_size


async def test_statistics_only_grow_and_count_each_instance_with_its_whole_batch(make):
    asked = await make().ready()
    version = asked.kept.catalog.version("m")
    worker = asked.kept.worker_of(version)

    async def compute(num: int, compute_s: float) -> None:
        futures = [version.submit(ref_to(b"x"), [b"x"]) for _ in range(num)]
        await until(lambda: sum(worker.sizes) == num)
        while worker.batches:
            worker.answer(compute_s=compute_s)
        await asyncio.gather(*futures)

    async def stats() -> Any:
        (found,) = (await asked.get("/models/m/stats"))["model_stats"]
        return found

    assert (await stats())["last_inference"] == 0
    await compute(1, 0.5)
    before = await stats()
    await compute(3, 0.25)
    after = await stats()
    assert (before["inference_count"], before["execution_count"]) == (1, 1)
    assert after["inference_count"] == 4
    assert after["last_inference"] >= before["last_inference"] > 0
    sizes = {each["batch_size"]: each["compute_infer"] for each in after["batch_stats"]}
    assert sum(size * each["count"] for size, each in sizes.items()) == 4
    assert sum(each["count"] for each in sizes.values()) == after["execution_count"]
    for name, each_ns in (("compute_input", 125_000_000), ("compute_infer", 250_000_000)):
        grown = after["inference_stats"][name]["ns"] - before["inference_stats"][name]["ns"]
        assert grown == 3 * each_ns
        assert after["inference_stats"][name]["count"] == 4
    assert after["inference_stats"]["success"]["count"] == 4
    assert after["inference_stats"]["success"]["ns"] >= 4 * 375_000_000
    assert after["inference_stats"]["fail"] == {"count": 0, "ns": 0}


@pytest.mark.parametrize("kind", ["system", "cuda"])
async def test_no_client_names_a_region_of_memory(make, kind):
    asked = await make().ready()
    words = f"{kind} shared memory is not supported: send tensors in the body"
    memory = f"/{kind}sharedmemory"
    for method, path in (
        ("GET", "/status"),
        ("GET", "/region/a/status"),
        ("POST", "/region/a/register"),
        ("POST", "/region/a/unregister"),
        ("POST", "/unregister"),
    ):
        assert await asked.refusal(method, memory + path, b'{"key": "/a"}') == (400, words)


@pytest.mark.parametrize("path", ["/trace/setting", "/models/m/trace/setting", "/logging"])
async def test_no_client_sets_traces_or_logs(make, path):
    asked = await make().ready()
    for method in ("GET", "POST"):
        status, error = await asked.refusal(method, path, b"{}")
        assert (status, "cannot be set by clients" in error) == (400, True)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/models/m/nothing", 404),
        ("POST", "/models/m/infer/", 404),
        ("GET", "/models/nobody/config", 404),
        ("GET", "/models/nobody/stats", 404),
        ("POST", "/models/m", 405),
        ("GET", "/repository/index", 405),
        ("POST", "/repository/index", 400),
    ],
)
async def test_each_refusal_has_an_error_in_words(make, method, path, status):
    asked = await make().ready()
    found, error = await asked.refusal(method, path, b'{"ready":')
    assert (found, bool(error), isinstance(error, str)) == (status, True, True)
