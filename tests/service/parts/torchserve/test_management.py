"""TorchServe's other two addresses, over real sockets: who may call, and what they are told.

The expected answers were seen on the real TorchServe 0.12.
"""

import asyncio
import contextlib
import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from inferpool.service.api.wire.listening import listen
from inferpool.service.app import Assembly, assemble, make_app
from inferpool.service.errors import StartError
from inferpool.service.parts.torchserve.addresses import MAX_CONNECTIONS
from inferpool.service.settings.draft import read_keys
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.settings import Settings
from inferpool.service.telemetry.console import Console
from inferpool.workers.host.devices import find_host
from inferpool.workers.shared.errors import WorkerStartError
from tests.certificates import make_certificate
from tests.fakes import FakeEngine
from tests.models.torchserve.archives import make_mar
from tests.service.pools import until

KEY = {"authorization": "Bearer a-key-of-an-admin"}
PREDICT_KEY = {"authorization": "Bearer a-key-of-a-caller"}
PROPERTIES = """
certificate_file={certificate}
private_key_file={key}
inference_address=http://127.0.0.1:8080
management_address={management}
metrics_address={metrics}
model_store={store}
"""
OWN = "http://127.0.0.1:0"
OTHER = "http://localhost:0"


class ReadyEngine(FakeEngine):
    """It starts workers that are ready at once, but none of a model "raises"."""

    async def start(self, id, config, on_progress):
        if id.model == "raises":
            raise WorkerStartError("a secret of its handler", permanent=True)
        return await super().start(id, config, on_progress)

    async def close(self) -> None: ...

    def forkserver_vitals(self) -> None: ...


class Bench:
    """A service whose addresses of TorchServe are open."""

    def __init__(self, assembly: Assembly, urls: dict[str, str]) -> None:
        self.assembly = assembly
        self.service = assembly.service
        self.management = httpx.AsyncClient(base_url=urls.get("management", ""))
        self.metrics = httpx.AsyncClient(base_url=urls.get("metrics", ""))

    async def ask(self, method: str, path: str, **request: Any) -> tuple[int, Any]:
        answer = await self.management.request(method, path, **request)
        return answer.status_code, answer.json()

    async def is_ready(self, name: str) -> None:
        await until(lambda: name in self.service.pools and self.service.pools[name].is_ready)


def settings_of(folder: Path, **changed: Any) -> Settings:
    properties = {"management": OWN, "metrics": OTHER, "store": folder / "store"}
    properties |= {"certificate": "", "key": ""}
    for name in properties.keys() & changed.keys():
        properties[name] = changed.pop(name)
    (folder / "store").mkdir(exist_ok=True)
    (folder / "config.properties").write_text(PROPERTIES.format(**properties))
    return Settings(
        models={"m": ModelSettings(source="echo", replicas=1, max_batch_size=4)},
        default_model="m",
        speed_search=False,
        job_store="none",
        cache_dir=str(folder),
        torchserve=str(folder / "config.properties"),
        **{"admin_keys": read_keys("a-key-of-an-admin"), **changed},
    )


@contextlib.asynccontextmanager
async def serving(
    folder: Path, caplog: pytest.LogCaptureFixture, **changed: Any
) -> AsyncIterator[Bench]:
    settings = settings_of(folder, **changed)
    with caplog.at_level("INFO"):
        assembly = assemble(
            settings, find_host(""), Console(None), make_engine=lambda _: ReadyEngine()
        )
        service = assembly.service
        service.start()
    found = re.findall(r"TorchServe's ([a-z ]+): (http\S+)", caplog.text)
    urls = {name.partition(" ")[0]: url for name, url in found}
    bench = Bench(assembly, urls)
    try:
        await bench.is_ready("m")
        async with bench.management, bench.metrics:
            yield bench
    finally:
        await service.stop()


def refusal(code: int, kind: str, message: str) -> tuple[int, dict[str, object]]:
    return code, {"code": code, "type": kind, "message": message}


def done(text: str, status: int = 200) -> tuple[int, dict[str, str]]:
    return status, {"status": text}


NO_MODEL = refusal(404, "ModelNotFoundException", "Model not found: nobody")
NO_VERSION = refusal(
    404, "ModelVersionNotFoundException", "Model version: 9.9 does not exist for model: m"
)
NO_METHOD = refusal(
    405,
    "MethodNotAllowedException",
    "Requested method is not allowed, please refer to API document.",
)
NOTHING = refusal(
    404,
    "ResourceNotFoundException",
    "Requested resource is not found, please refer to API document.",
)
RECORDED = [
    ("GET", "/models", (200, {"models": [{"modelName": "m", "modelUrl": "echo"}]})),
    (
        "GET",
        "/models?limit=1",
        (200, {"nextPageToken": "1", "models": [{"modelName": "m", "modelUrl": "echo"}]}),
    ),
    ("GET", "/models?next_page_token=7&limit=x", (200, {"models": []})),
    ("GET", "/models/nobody", NO_MODEL),
    ("GET", "/models/m/9.9", NO_VERSION),
    ("PUT", "/models/nobody?min_worker=1", NO_MODEL),
    ("PUT", "/models/m/9.9?min_worker=1", NO_VERSION),
    (
        "PUT",
        "/models/m?min_worker=3&max_worker=1",
        refusal(400, "BadRequestException", "max_worker cannot be less than min_worker."),
    ),
    ("PUT", "/models/m?min_worker=x", done("Processing worker updates...", 202)),
    ("PUT", "/models/m?synchronous=true", done("Workers scaled to 1 for model: m")),
    (
        "PUT",
        "/models/m/1/set-default",
        done('Default version successfully updated for model "m" to "1"'),
    ),
    (
        "PUT",
        "/models/m/9.9/set-default",
        refusal(
            404, "ModelVersionNotFoundException", "Model version 9.9 does not exist for model m"
        ),
    ),
    ("PUT", "/models/nobody/1/set-default", NO_MODEL),
    ("POST", "/models", refusal(400, "BadRequestException", "Parameter url is required.")),
    (
        "POST",
        "/models?url=none.mar",
        refusal(404, "ModelNotFoundException", "Model not found at: none.mar"),
    ),
    ("DELETE", "/models/nobody", NO_MODEL),
    ("DELETE", "/models/m/9.9", NO_VERSION),
    ("DELETE", "/models", NO_METHOD),
    ("PATCH", "/models/m", NO_METHOD),
    ("PUT", "/models", NO_METHOD),
    ("GET", "/", NO_METHOD),
    ("GET", "/nothing", NOTHING),
    ("GET", "/models/m/1/x", NOTHING),
    ("GET", "/ping", NOTHING),
    ("GET", "/predictions/m", NOTHING),
    ("GET", "/api-description", NOTHING),
    ("GET", "/v1/models/m", (200, {"name": "m", "ready": True})),
]


async def test_calls_are_answered_as_by_the_real_one(tmp_path, caplog):
    async with serving(tmp_path, caplog) as bench:
        for method, path, expected in RECORDED:
            assert await bench.ask(method, path, headers=KEY) == expected, (method, path)
        answer = await bench.management.get("/models")
        assert answer.headers["content-type"] == "application/json"
        assert answer.text.startswith('{\n  "models": [\n    {\n      "modelName": "m",\n')
        assert answer.text.endswith("}\n")


async def test_a_model_is_described_with_its_workers_and_its_queue(tmp_path, caplog):
    async with serving(tmp_path, caplog) as bench:
        for path in ("/models/m", "/models/m/1", "/models/m/all", "/models/m?customized=true"):
            status, [found] = await bench.ask("GET", path)
            assert status == 200
            [worker] = found.pop("workers")
            assert found["modelName"] == "m"
            assert (found["minWorkers"], found["maxWorkers"], found["batchSize"]) == (1, 1, 4)
            assert found["loadedAtStartup"] is True
            assert found["jobQueueStatus"]["pendingRequests"] == 0
            assert found["jobQueueStatus"]["remainingCapacity"] > 0
            assert worker["status"] == "READY"
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", worker["startTime"])


async def test_scaling_needs_no_key_on_loopback_and_loads_that_many_workers(tmp_path, caplog):
    async with serving(tmp_path, caplog, admin_keys=read_keys("")) as bench:
        path = "/models/m?min_worker=2&synchronous=true"
        assert await bench.ask("PUT", path) == done("Workers scaled to 2 for model: m")
        _, [found] = await bench.ask("GET", "/models/m")
        assert (found["minWorkers"], len(found["workers"])) == (2, 2)
        assert bench.service.settings.models["m"].replicas == 1
        assert bench.service.catalog.settings.models["m"].replicas == 2
        assert "admin: scale m to 2 workers" in caplog.text
        later = done("Processing worker updates...", 202)
        assert await bench.ask("PUT", "/models/m?min_worker=1") == later
        path = "/models/m?min_worker=3&synchronous=true"  # it waits for the call before
        assert await bench.ask("PUT", path) == done("Workers scaled to 3 for model: m")
        for bad in ("0", "-1"):
            status, body = await bench.ask("PUT", f"/models/m?min_worker={bad}")
            assert (status, body["type"]) == (400, "BadRequestException")
        status, body = await bench.ask("PUT", "/models/m?min_worker=999999999")
        assert status == 400


async def test_an_archive_of_the_store_is_registered_and_unregistered(tmp_path, caplog):
    async with serving(tmp_path, caplog) as bench:
        make_mar(tmp_path / "store/toy.mar", name="toy")
        path = "/models?url=toy.mar&initial_workers=2&batch_size=8&max_batch_delay=50"
        expected = done('Model "toy" Version: 1.0 registered with 2 initial workers')
        assert await bench.ask("POST", path, headers=KEY) == expected
        settings = bench.service.catalog.settings.models["toy"]
        assert (settings.max_batch_size, settings.batch_wait_ms) == (8, 50)
        text = "Model version 1.0 is already registered for model toy"
        again = refusal(409, "ConflictStatusException", text)
        assert await bench.ask("POST", path, headers=KEY) == again
        text = "a model is called toy here already, where names have small letters"
        other = await bench.ask("POST", f"{path}&model_name=TOY", headers=KEY)
        assert other == refusal(409, "ConflictStatusException", text)
        body = {"url": "toy.mar", "model_name": "other", "synchronous": False}
        later = done("Processing worker updates...", 202)
        assert await bench.ask("POST", "/models", headers=KEY, json=body) == later
        await bench.is_ready("other")
        _, [found] = await bench.ask("GET", "/models/other")
        assert found["loadedAtStartup"] is False
        _, listed = await bench.ask("GET", "/models")
        assert [each["modelName"] for each in listed["models"]] == ["m", "other", "toy"]
        expected = done('Model "toy" unregistered')
        assert await bench.ask("DELETE", "/models/toy", headers=KEY) == expected
        assert "toy" not in bench.service.pools
        for line in ("add toy, which is toy.mar of the model store", "remove toy"):
            assert f"admin: {line}" in caplog.text


BAD_URLS = (
    "http://127.0.0.1:1/toy.mar",
    "https://example.com/toy.mar",
    "s3://bucket/toy.mar",
    "file:///etc/toy.mar",
    "../toy.mar",
    "..",
    ".hidden.mar",
    "/etc/passwd",
    "sub/toy.mar",
    "sub\\toy.mar",
    "toy.mar\n",
    "toy\0.mar",
    "a" * 300,
)


async def test_nothing_but_an_archive_in_the_store_can_be_registered(tmp_path, caplog):
    async with serving(tmp_path, caplog) as bench:
        make_mar(tmp_path / "toy.mar", name="toy")
        for url in BAD_URLS:
            query: dict[str, Any] = {"params": {"url": url}}
            for request in (query, {"json": {"url": url}}):
                status, body = await bench.ask("POST", "/models", headers=KEY, **request)
                assert (status, body["type"]) == (400, "BadRequestException"), url
                assert "model_store" in body["message"]
        (tmp_path / "store/link.mar").symlink_to(tmp_path / "toy.mar")
        status, body = await bench.ask("POST", "/models?url=link.mar", headers=KEY)
        assert (status, body["message"]) == (404, "Model not found at: link.mar")
        (tmp_path / "store/bad.mar").write_bytes(b"no zip")
        status, body = await bench.ask("POST", "/models?url=bad.mar", headers=KEY)
        assert (status, body["type"]) == (400, "BadRequestException")
        make_mar(tmp_path / "store/toy.mar", name="toy")
        for more in (
            "handler=other.py",
            "runtime=java",
            "s3_sse_kms=true",
            "model_name=a/b",
            "model_name=a%0a",
        ):
            status, _ = await bench.ask("POST", f"/models?url=toy.mar&{more}", headers=KEY)
            assert status == 400, more
        for body_bytes in (b'{"url":', b"[]", b'{"url": 7}', b'{"url": {"a": 1}}', b"\xff"):
            status, _ = await bench.ask(
                "POST",
                "/models",
                headers={**KEY, "content-type": "application/json"},
                content=body_bytes,
            )
            assert status == 400, body_bytes
        assert list(bench.service.pools) == ["m"]


async def test_an_archive_that_does_not_load_is_not_registered(tmp_path, caplog):
    async with serving(tmp_path, caplog) as bench:
        make_mar(tmp_path / "store/raises.mar", name="raises")
        text = "Failed to start workers for model raises version: 1.0"
        answer = await bench.ask("POST", "/models?url=raises.mar", headers=KEY)
        assert answer == refusal(500, "InternalServerException", text)
        assert list(bench.service.pools) == ["m"]


HOSTILE = (
    *("%00", "%2e%2e%2f", "%ff%fe", "..", "m%2f1", "%7b%7d", "'%22", "a" * 3000, "%e2%80%ae"),
    *("m;x", "m?x=%ff", "m?min_worker=99999999999", "m?min_worker=%ff", "m?model_version=%00"),
    *("m?min_worker=1&min_worker=2", "m?max_worker=-1", "?limit=-9999999999&next_page_token=x"),
    *("?url=%00", "?url=a&model_name=%00", "?url=a&batch_size=1e9", "", "/", "//", "m//", "m/%00"),
)


async def test_odd_calls_are_refused_and_break_nothing(tmp_path, caplog):
    async with serving(tmp_path, caplog) as bench:
        make_mar(tmp_path / "store/toy.mar", name="toy")
        for rest in HOSTILE:
            for method in ("GET", "POST", "PUT", "DELETE"):
                if method == "DELETE" and rest[:1] == "m":
                    continue  # that is its name
                end = "/set-default" if method == "PUT" and "?" not in rest else ""
                answer = await bench.management.request(method, f"/models/{rest}{end}", headers=KEY)
                assert answer.status_code < 500, (method, rest)
        for name in ("\ud800", "a" * 5000, "..", "", "é", 7, None, [], {"a": "b"}, True):
            body = {"url": "toy.mar", "model_name": name, "initial_workers": name}
            content = json.dumps(body)
            headers = {**KEY, "content-type": "application/json"}
            status, _ = await bench.ask("POST", "/models", headers=headers, content=content)
            assert status in (200, 400, 409), name
        for number in (2**40, 10**9 - 1, 65537):
            for field in ("initial_workers", "batch_size", "max_batch_delay", "response_timeout"):
                body = {"url": "toy.mar", "model_name": "large", field: number}
                status, _ = await bench.ask("POST", "/models", headers=KEY, json=body)
                assert status in (200, 400, 409), (field, number)
        assert bench.service.pools["m"].is_ready


async def test_who_may_change_models(tmp_path, caplog):
    async with serving(tmp_path, caplog, predict_keys=read_keys("a-key-of-a-caller")) as bench:
        for method, path in (("POST", "/models?url=toy.mar"), ("DELETE", "/models/m")):
            assert (await bench.ask(method, path))[0] == 401
            assert (await bench.ask(method, path, headers=PREDICT_KEY))[0] == 403
            wrong = {"authorization": "Bearer nobody"}
            assert (await bench.ask(method, path, headers=wrong))[0] == 401
        for header in (
            {"host": "evil.example"},
            {"host": "127.0.0.1.evil.example:80"},
            {"x-forwarded-for": "10.0.0.9"},
            {"x-forwarded-proto": "https"},
            {"via": "1.1 proxy"},
        ):
            for method, path in (("GET", "/models"), ("PUT", "/models/m?min_worker=1")):
                assert (await bench.ask(method, path, headers=header))[0] == 401
                assert (await bench.ask(method, path, headers={**KEY, **header}))[0] in (200, 202)
        for page in (
            {"origin": "https://evil.example"},
            {"origin": "null"},
            {"sec-fetch-site": "cross-site"},
            {"sec-fetch-site": "same-site"},
        ):
            for method in ("POST", "PUT", "DELETE", "OPTIONS"):
                status, _ = await bench.ask(method, "/models/m", headers={**KEY, **page})
                assert status == 403, (method, page)
            answer = await bench.management.get("/models", headers=page)
            assert "access-control-allow-origin" not in answer.headers
        assert "admin: refused DELETE /models/m: this needs a key" in caplog.text
        assert list(bench.service.pools) == ["m"]


async def test_without_admin_keys_a_refusal_says_what_to_set(tmp_path, caplog):
    async with serving(tmp_path, caplog, admin_keys=read_keys("")) as bench:
        for method, path in (("POST", "/models?url=toy.mar"), ("DELETE", "/models/m")):
            for headers in ({}, KEY):
                status, body = await bench.ask(method, path, headers=headers)
                assert status == 403
                assert "INFERPOOL_ADMIN_KEYS" in body["message"]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"management": "http://0.0.0.0:0"}, "management_address: .* INFERPOOL_ADMIN_KEYS"),
        ({"metrics": "http://0.0.0.0:0"}, "metrics_address: .* INFERPOOL_METRICS_KEYS"),
        ({"management": "https://127.0.0.1:0"}, "management_address: https needs certificate_file"),
        ({"management": "unix:/tmp/socket"}, "management_address: unix sockets are not served"),
        ({"metrics": "http://127.0.0.1:99999"}, "metrics_address: .* is no address"),
        ({"metrics": "127.0.0.1:8082"}, "metrics_address: .* is no address"),
        ({"management": "http://192.0.2.1:8081", "admin_keys": read_keys("a-key-of-an-admin")},
         "cannot listen on 192.0.2.1:8081"),
    ],
)  # fmt: skip
async def test_the_start_is_refused_with_what_to_set(tmp_path, changed, text):
    settings = settings_of(tmp_path, **{"admin_keys": read_keys(""), **changed})
    with pytest.raises(StartError, match=text):
        assemble(settings, find_host(""), Console(None), make_engine=lambda _: ReadyEngine())


async def test_a_port_that_is_taken_is_named_with_its_key(tmp_path):
    with listen("127.0.0.1", 0) as other:
        settings = settings_of(tmp_path, metrics=f"http://127.0.0.1:{other.getsockname()[1]}")
        with pytest.raises(StartError, match="Choose another with metrics_address"):
            assemble(settings, find_host(""), Console(None), make_engine=lambda _: ReadyEngine())


async def test_addresses_that_are_the_same_are_served_by_one_port(tmp_path, caplog):
    async with serving(tmp_path, caplog, metrics=OWN) as bench:
        assert "TorchServe's management and metrics: http://127.0.0.1:" in caplog.text
        assert (await bench.ask("GET", "/models"))[0] == 200
        answer = await bench.management.get("/metrics")
        assert answer.status_code == 200
        assert "\nts_inference_requests_total{" in answer.text


async def test_the_address_of_predictions_may_serve_all_with_keys(tmp_path, caplog):
    main = "http://127.0.0.1:8080"
    async with serving(tmp_path, caplog, management=main, metrics=main) as bench:
        app, _, _ = make_app(bench.assembly)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://host") as client:
            for path in ("/models", "/models/m", "/models/m/1"):
                assert (await client.get(path)).status_code == 401
                assert (await client.get(path, headers=PREDICT_KEY)).status_code == 401
                assert (await client.get(path, headers=KEY)).status_code == 200
            answer = await client.put("/models/m/1/set-default", headers=KEY)
            assert answer.status_code == 200
            answer = await client.delete("/models/nobody", headers=KEY)
            assert answer.json() == NO_MODEL[1]
            shown = (await client.get("/metrics")).text
            assert "\nts_inference_requests_total{" in shown
            assert "\ninferpool_ready " in shown
            assert (await client.get("/nothing")).status_code == 404
        assert "TorchServe's" not in caplog.text


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
async def test_an_address_may_have_tls_alone(tmp_path, caplog):
    certificate, key = make_certificate(tmp_path)
    https = {"management": "https://127.0.0.1:0", "certificate": certificate, "key": key}
    async with serving(tmp_path, caplog, **https) as bench:
        [url] = re.findall(r"management: (https://\S+)", caplog.text)
        async with httpx.AsyncClient(verify=False) as client:
            assert (await client.get(f"{url}/models")).status_code == 200
        assert (await bench.metrics.get("/metrics")).status_code == 200


async def test_nothing_but_predictions_leaves_these_addresses_closed(tmp_path, caplog):
    async with serving(tmp_path, caplog, only_predictions=True, management="http://0.0.0.0:0"):
        assert "management_address and metrics_address are closed" in caplog.text
        assert "TorchServe's" not in caplog.text


async def test_what_waits_is_answered_and_nothing_more_is_accepted_at_the_end(tmp_path, caplog):
    async with serving(tmp_path, caplog) as bench:
        url = bench.management.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"GET /models HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        await bench.service.drain()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(url.host, url.port)
        async with asyncio.timeout(10):
            await bench.service.stop()
            await reader.read()  # the connection is closed
        writer.close()


async def test_slow_and_large_callers_are_cut_off(tmp_path, caplog):
    async with serving(tmp_path, caplog, head_timeout_s=0.3) as bench:
        url = bench.management.base_url
        slow = [await asyncio.open_connection(url.host, url.port) for _ in range(3)]
        for _, writer in slow:
            writer.write(b"GET /models HTTP/1.1\r\nhost:")
        async with asyncio.timeout(10):
            for reader, _ in slow:
                await reader.read()  # the connection is closed
        large = {**KEY, "content-type": "application/json"}
        status, _ = await bench.ask("POST", "/models", headers=large, content=b" " * (65 * 1024))
        assert status == 413
        status, _ = await bench.ask("POST", "/models", headers=large, content=b" " * (2 << 20))
        assert status == 413
        for _, writer in slow:
            writer.close()


async def test_only_so_many_connections_are_open_at_once(tmp_path, caplog):
    async with serving(tmp_path, caplog) as bench:
        url = bench.management.base_url
        open_ones = [
            await asyncio.open_connection(url.host, url.port) for _ in range(MAX_CONNECTIONS + 8)
        ]
        async with asyncio.timeout(10):
            ends = [asyncio.create_task(reader.read()) for reader, _ in open_ones]
            _, waiting = await asyncio.wait(ends, timeout=1.5)
        assert len(waiting) <= MAX_CONNECTIONS
        for task in waiting:
            task.cancel()
        for _, writer in open_ones:
            writer.close()


async def test_versions_of_an_archive_are_one_model_to_clients(tmp_path, caplog):
    async with serving(tmp_path, caplog) as bench:
        for label in ("1.0", "2.0"):
            make_mar(tmp_path / f"store/Toy_{label}.mar", name="Toy", modelVersion=label)
            expected = done(f'Model "Toy" Version: {label} registered with 1 initial workers')
            path = f"/models?url=Toy_{label}.mar"
            assert await bench.ask("POST", path, headers=KEY) == expected
            assert (await bench.ask("POST", path, headers=KEY))[0] == 409
        assert list(bench.service.pools) == ["m", "toy", "toy-2.0"]
        _, listed = await bench.ask("GET", "/models")
        assert listed["models"][0] == {"modelName": "Toy", "modelUrl": "Toy_1.0.mar"}
        assert len(listed["models"]) == 2
        for path, labels in (
            ("Toy", ["1.0"]),
            ("Toy/1.0", ["1.0"]),
            ("Toy/2.0", ["2.0"]),
            ("Toy/all", ["1.0", "2.0"]),
        ):
            _, found = await bench.ask("GET", f"/models/{path}")
            assert [each["modelVersion"] for each in found] == labels
        status, body = await bench.ask("DELETE", "/models/Toy/1.0", headers=KEY)
        assert (status, body["type"]) == (403, "InvalidModelVersionException")
        assert body["message"] == "Cannot remove default version for model Toy"
        assert (await bench.ask("PUT", "/models/Toy/2.0?min_worker=2&synchronous=true"))[0] == 200
        assert len(bench.service.pools["toy-2.0"].slots) == 2
        path = "/models/Toy/2.0/set-default"
        for end in ("", "/", "//"):
            assert (await bench.ask("PUT", path + end))[0] == 401
        expected = done('Default version successfully updated for model "Toy" to "2.0"')
        assert await bench.ask("PUT", path, headers=KEY) == expected
        assert list(bench.service.pools) == ["m", "toy", "toy-1.0"]
        _, found = await bench.ask("GET", "/models/Toy/all")
        shown = [(each["modelVersion"], each["minWorkers"]) for each in found]
        assert shown == [("2.0", 2), ("1.0", 1)]
        assert bench.service.catalog.settings.models["toy"].source.endswith("Toy_2.0.mar")
        for label in ("1.0", "2.0"):
            answer = await bench.ask("DELETE", f"/models/Toy/{label}", headers=KEY)
            assert answer == done('Model "Toy" unregistered')
        assert list(bench.service.pools) == ["m"]


async def test_a_default_that_is_being_scaled_is_not_left_twice(tmp_path, caplog, monkeypatch):
    async with serving(tmp_path, caplog) as bench:
        for label in ("1.0", "2.0"):
            make_mar(tmp_path / f"store/toy{label}.mar", name="toy", modelVersion=label)
            path = f"/models?url=toy{label}.mar"
            assert (await bench.ask("POST", path, headers=KEY))[0] == 200
        changes = bench.assembly.changes
        begin_swap = changes.begin_swap

        def begin_both(name, request):
            begin_swap(name, request)
            begin_swap("toy-2.0", {**request, "source": str(tmp_path / "store/toy2.0.mar")})

        monkeypatch.setattr(changes, "begin_swap", begin_both)
        assert (await bench.ask("PUT", "/models/toy/2.0/set-default", headers=KEY))[0] == 200
        _, found = await bench.ask("GET", "/models/toy/all")
        assert [each["modelVersion"] for each in found] == ["2.0", "1.0"]
