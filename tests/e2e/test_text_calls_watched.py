"""Metrics and traces of calls whose bodies name their models."""

import signal

import pytest

from tests.collector import attributes, collecting
from tests.e2e.running import running

_SOURCE = "tests.text_model:TextFaultModel"
_CALLER = "00f067aa0ba902b7"
_MODELS = {
    "encoder": {"source": _SOURCE, "replicas": 1},
    "reranker": {"source": _SOURCE, "replicas": 1, "options": {"task": "reranking"}},
}
_RANKED = {"model": "reranker", "query": "q", "documents": ["ok 1"]}
_CALLS: list[tuple[str, dict[str, object], str | None, int]] = [
    ("/v1/embeddings", {"model": "encoder", "input": ["ok 1", "ok 2"]}, "encoder", 200),
    ("/v1/embeddings", {"input": "ok 3"}, "encoder", 200),
    ("/v1/embeddings", {"model": "encoder", "input": "raise 4"}, "encoder", 500),
    ("/v1/embeddings", {"model": "reranker", "input": "ok 5"}, "reranker", 400),
    ("/v1/embeddings", {"model": "nobody", "input": "ok 6"}, None, 404),
    ("/v2/rerank", _RANKED, "reranker", 200),
    ("/embed", {"inputs": "ok 7"}, "encoder", 200),
    ("/tei/reranker/rerank", {"query": "q", "texts": ["ok 8"]}, "reranker", 200),
]
"""Paths and bodies, the models that are asked, and the statuses."""


@pytest.mark.slow
@pytest.mark.parametrize("front_ends", [1, 2])
def test_calls_count_for_the_model_that_they_name_and_are_traced_with_it(front_ends: int):
    settings = {
        "tei": True,
        "models": _MODELS,
        "default_model": "encoder",
        "front_ends": front_ends,
    }
    with collecting() as collector:
        env = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_TRACES_SAMPLER": "parentbased_always_off",
        }
        with running(settings=settings, env=env) as service:
            for number, (path, body, _, status) in enumerate(_CALLS, 1):
                caller = f"00-{number:032x}-{_CALLER}-01"
                answer = service.post(path, json=body, headers={"traceparent": caller})
                assert answer.status_code == status, (path, body, answer.text)
            for code, model, num in (
                *((200, "encoder", 3), (500, "encoder", 1), (200, "reranker", 2)),
                *((400, "reranker", 1), (404, "-", 1)),
            ):
                assert service.metric(f'requests_total{{code="{code}",model="{model}"}}') == num
            accepted = 'instances_total{model="%s",outcome="accepted"}'
            assert service.metric(accepted % "encoder") == 5
            assert service.metric(accepted % "reranker") == 2
            service.signal(signal.SIGTERM)
            assert service.wait() == 0
        for number, (path, _, name, status) in enumerate(_CALLS, 1):
            spans = collector.of_trace(f"{number:032x}")
            (root,) = (each for each in spans if each.parent_span_id.hex() == _CALLER)
            about = attributes(iter(root.attributes))
            assert about.get("inferpool.model") == name
            assert about.get("http.route") == (path if name else None)
            assert about["http.response.status_code"] == status
