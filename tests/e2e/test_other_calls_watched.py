"""Metrics and traces of calls in other protocols than ours, by the models that they name."""

import signal
from pathlib import Path

import pytest

from tests.collector import attributes, collecting
from tests.e2e.protocols import VERTEX_ROUTE
from tests.e2e.running import running
from tests.fault_archive import make_fault_archive
from tests.ports import free_port

_CALLER = "00f067aa0ba902b7"
_OK, _BAD = {"n": 1, "do": "ok"}, {"n": 2, "do": "raise"}
_Call = tuple[str, object, str | None, int]
_TORCHSERVE: list[_Call] = [
    ("/predictions/archive", _OK, "archive", 200),
    ("/predictions/archive/1.0", _OK, "archive", 200),
    ("/archive/predict", _OK, "archive", 200),
    ("/invocations?model_name=archive", _OK, "archive", 200),
    ("/predictions/archive", _BAD, "archive", 503),
    ("/predictions/nobody", _OK, None, 404),
    ("/predictions/echo", {"instances": [1]}, "echo", 200),
]
"""Paths and bodies, the models that are asked, and the statuses."""
_PLATFORMS: list[_Call] = [
    ("/invocations", {"instances": [1]}, "echo", 200),
    (VERTEX_ROUTE, {"instances": [1]}, "echo", 200),
]
_TEXTS: list[_Call] = [
    ("/v1/embeddings", {"model": "encoder", "input": ["ok 1", "ok 2"]}, "encoder", 200),
    ("/v1/embeddings", {"input": "ok 3"}, "encoder", 200),
    ("/v1/embeddings", {"model": "encoder", "input": "raise 4"}, "encoder", 500),
    ("/v1/embeddings", {"model": "reranker", "input": "ok 5"}, "reranker", 400),
    ("/v1/embeddings", {"model": "nobody", "input": "ok 6"}, None, 404),
    ("/v2/rerank", {"model": "reranker", "query": "q", "documents": ["ok 1"]}, "reranker", 200),
    ("/embed", {"inputs": "ok 7"}, "encoder", 200),
    ("/tei/reranker/rerank", {"query": "q", "texts": ["ok 8"]}, "reranker", 200),
]


def check(calls: list[_Call], settings: dict[str, object], num_accepted: dict[str, int]) -> None:
    """Make the calls, each in a trace of its own, and look for them in the metrics and traces."""
    with collecting() as collector:
        env = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_TRACES_SAMPLER": "parentbased_always_off",
        }
        with running(settings=settings, env=env) as service:
            for number, (path, body, _, status) in enumerate(calls, 1):
                caller = f"00-{number:032x}-{_CALLER}-01"
                answer = service.post(path, json=body, headers={"traceparent": caller})
                assert answer.status_code == status, (path, body, answer.text)
            for name in {name for _, _, name, _ in calls}:
                for code in {status for _, _, each, status in calls if each == name}:
                    num = sum(each[2:] == (name, code) for each in calls)
                    labels = f'code="{code}",model="{name or "-"}"'
                    assert service.metric(f"requests_total{{{labels}}}") == num, labels
            for name, num in num_accepted.items():
                labels = f'model="{name}",outcome="accepted"'
                assert service.metric(f"instances_total{{{labels}}}") == num, labels
            service.signal(signal.SIGTERM)
            assert service.wait() == 0
        for number, (path, _, name, status) in enumerate(calls, 1):
            spans = collector.of_trace(f"{number:032x}")
            (root,) = (each for each in spans if each.parent_span_id.hex() == _CALLER)
            about = attributes(iter(root.attributes))
            assert about.get("inferpool.model") == name
            assert about["http.response.status_code"] == status
            assert about.get("http.route") == (path.partition("?")[0] if name else None)


@pytest.mark.slow
@pytest.mark.parametrize("front_ends", [1, 2])
def test_calls_about_texts_count_for_the_model_that_they_name(front_ends: int):
    source: dict[str, object] = {"source": "tests.text_model:TextFaultModel", "replicas": 1}
    models = {"encoder": source, "reranker": {**source, "options": {"task": "reranking"}}}
    settings = {"tei": True, "default_model": "encoder", "models": models}
    check(_TEXTS, {**settings, "front_ends": front_ends}, {"encoder": 5, "reranker": 2})


@pytest.mark.slow
@pytest.mark.parametrize("front_ends", [1, 2])
def test_calls_of_torchserve_s_clients_count_for_the_model_that_they_name(
    tmp_path: Path, front_ends: int
):
    file = tmp_path / "config.properties"
    names = ("management_address", "metrics_address")
    file.write_text("".join(f"{name}=http://127.0.0.1:{free_port()}\n" for name in names))
    archive = {"source": str(make_fault_archive(tmp_path / "archive.mar")), "replicas": 1}
    models = {"archive": archive, "echo": {"replicas": 1}}
    settings = {"torchserve": str(file), "default_model": "echo", "models": models}
    check(_TORCHSERVE, {**settings, "front_ends": front_ends}, {"archive": 5, "echo": 1})


@pytest.mark.slow
def test_calls_of_platforms_count_for_the_default_model():
    models = {"echo": {"replicas": 1}}
    settings = {"sagemaker": True, "vertex_predict_route": VERTEX_ROUTE, "models": models}
    check(_PLATFORMS, {**settings, "front_ends": 1}, {"echo": 2})
