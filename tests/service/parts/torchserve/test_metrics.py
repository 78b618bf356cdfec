"""Counters of ours by the names of TorchServe's metrics."""

import re

import httpx

from inferpool.service.settings.draft import read_keys
from tests.models.torchserve.archives import make_mar
from tests.service.parts.torchserve.test_management import KEY, PREDICT_KEY, serving

NAMES = "ts_inference_latency_microseconds", "ts_queue_latency_microseconds"


def values_in(text: str) -> dict[tuple[str, str], float]:
    """Return each value by its metric and its model."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found = [re.fullmatch(r"(\w+){((?:\w+=\"[^\"]*\",)+)} (\S+)", line) for line in lines]
    values = {}
    for each in found:
        assert each is not None
        model = re.search(r"\b(?:model_name|ModelName)=\"(\w+)\"", each[2])
        values[each[1], model[1] if model else ""] = float(each[3])
    return values


async def read(client: httpx.AsyncClient) -> dict[tuple[str, str], float]:
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return values_in(answer.text)


async def test_metrics_are_our_counters_by_its_names(tmp_path, caplog):
    async with serving(tmp_path, caplog) as bench:
        found = await read(bench.metrics)
        assert found["ts_inference_requests_total", "m"] == 0
        counted = bench.service.metrics.model("m")
        for status, num in ((200, 3), (404, 2), (503, 1)):
            counted.requests[status] += num
        for seconds in (0.25, 0.5):
            counted.answer_duration.observe(seconds)
        bench.service.catalog.version("m").metrics.observe_batch(2, 0.01, 0.03, [0.125, 0.375])
        bench.service.metrics.unknown_model.requests[404] += 1
        found = await read(bench.metrics)
        assert found["ts_inference_requests_total", "m"] == 6
        assert found["ts_inference_latency_microseconds", "m"] == 750_000
        assert found["ts_queue_latency_microseconds", "m"] == 500_000
        assert found["Requests2XX", ""] == 3
        assert found["Requests4XX", ""] == 3
        assert found["Requests5XX", ""] == 1
        assert found["MemoryUsed", ""] > 0
        assert 0 <= found["DiskUtilization", ""] <= 100


async def test_a_caller_may_ask_for_some_metrics_by_their_names(tmp_path, caplog):
    async with serving(tmp_path, caplog) as bench:
        answer = await bench.metrics.get("/metrics", params={"name[]": NAMES})
        assert {name for name, _ in values_in(answer.text)} == set(NAMES)
        answer = await bench.metrics.get("/metrics", params={"name[]": "none"})
        assert (answer.status_code, answer.text) == (200, "")
        assert (await bench.metrics.post("/metrics")).status_code == 200
        answer = await bench.metrics.get("/x")
        assert answer.status_code == 404
        assert answer.json()["type"] == "ResourceNotFoundException"


async def test_metrics_need_a_key_where_there_are_some(tmp_path, caplog):
    async with serving(tmp_path, caplog, predict_keys=read_keys("a-key-of-a-caller")) as bench:
        for path in ("/metrics", "/models", "/"):
            answer = await bench.metrics.get(path)
            assert answer.status_code == 401
            assert answer.json()["type"] == "InvalidKeyException"
        assert (await bench.metrics.get("/metrics", headers=PREDICT_KEY)).status_code == 200


async def test_versions_of_an_archive_are_counted_together(tmp_path, caplog):
    async with serving(tmp_path, caplog) as bench:
        for label in ("1.0", "2.0"):
            make_mar(tmp_path / f"store/toy{label}.mar", name="toy", modelVersion=label)
            query = {"url": f"toy{label}.mar"}
            assert (await bench.ask("POST", "/models", params=query, headers=KEY))[0] == 200
        bench.service.metrics.model("toy").requests[200] += 1
        bench.service.metrics.model("toy-2.0").requests[200] += 2
        text = (await bench.metrics.get("/metrics")).text
        assert values_in(text)["ts_inference_requests_total", "toy"] == 3
        lines = [line for line in text.splitlines() if line.startswith("ts_inference_requests")]
        assert len(lines) == 2  # of m, and of toy
        assert (await bench.ask("DELETE", "/models/toy/2.0", headers=KEY))[0] == 200
        text = (await bench.metrics.get("/metrics")).text
        assert values_in(text)["Requests2XX", ""] == 3  # a counter never sinks
