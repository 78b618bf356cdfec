"""Clients of the protocols of texts, which have one server to compare with: what is right is known.

They get a service of their own, with a key, an encoder, a reranker and a classifier.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.clients.environments import ClientCall, Environments, calls_of
from tests.clients.service import served
from tests.models.text.scorers import write_scorer

_KEY = "a-key-of-the-tests-0123456789"
PACKAGES: Mapping[str, Sequence[str]] = {
    "openai": (
        *("openai==3.57.0", "langchain-openai==1.7.4"),
        "llama-index-embeddings-openai==0.7.0",
    ),
    "cohere": (
        *("cohere==5.21.1", "httpx", "langchain-cohere==0.6.0"),
        "llama-index-postprocessor-cohere-rerank==0.10.0",
        "llama-index-postprocessor-jinaai-rerank==0.6.0",
    ),
}
"""Environments by the script that needs them."""
TEXT_CLIENTS: Mapping[str, tuple[str, str]] = {
    "openai": ("openai_calls.py", "sync"),
    "openai aio": ("openai_calls.py", "aio"),
    "langchain, OpenAI": ("openai_calls.py", "langchain"),
    "llama-index, OpenAI": ("openai_calls.py", "llama_index"),
    "cohere v1": ("cohere_calls.py", "v1"),
    "cohere v1 aio": ("cohere_calls.py", "v1_aio"),
    "cohere v2": ("cohere_calls.py", "v2"),
    "cohere v2 aio": ("cohere_calls.py", "v2_aio"),
    "langchain, Cohere": ("cohere_calls.py", "langchain"),
    "llama-index, Cohere": ("cohere_calls.py", "llama_index"),
    "llama-index, Jina": ("cohere_calls.py", "jina"),
}
"""Scripts and the argument that says which client calls."""
_REFUSED: Mapping[str, str] = {}
"""The calls that must be refused, with their status."""


@contextmanager
def texts_served(folder: Path) -> Iterator[str]:
    """Serve models of texts; yield the address."""
    labels = dict(enumerate(("low", "middle", "high")))
    scored = {
        "reranker": write_scorer(folder / "reranker", num_labels=1),
        "classifier": write_scorer(folder / "classifier", id2label=labels),
    }
    models: dict[str, dict[str, object]] = {
        "minilm_l6": {"source": "minilm_l6", "replicas": 1, "speed": "exact"},
        **{
            name: {"source": str(path), "replicas": 1, "speed": "exact"}
            for name, path in scored.items()
        },
    }
    (folder / "predict.key").write_text(_KEY)
    settings: dict[str, object] = {
        "tei": True,
        "default_model": "minilm_l6",
        "predict_keys_file": str(folder / "predict.key"),
    }
    with served(folder, settings, models) as (port, _):
        yield f"127.0.0.1:{port}"


def text_rows(
    environments: Environments, folder: Path, clients: Sequence[str]
) -> Iterator[tuple[str, str, str, str]]:
    """Make each client's calls; yield its name, the call, the result, and what was wrong."""
    with texts_served(folder) as address:
        for client in clients:
            script, kind = TEXT_CLIENTS[client]
            name = script.removesuffix("_calls.py")
            python = environments.made(name, PACKAGES[name])
            given = {"PREDICT_KEY": _KEY, "MODEL": "minilm_l6"}
            for call in calls_of(python, script, kind, address, **given):
                complaint = complaint_of(call)
                yield client, call.call, "failed" if complaint else "right", complaint


def complaint_of(call: ClientCall) -> str:
    """Return what is wrong with a call; empty if nothing is."""
    status = _REFUSED.get(call.call, "200")
    if call.status != status:
        return f"expected {status}, found {call.status} {call.text}"
    if "false" in json.dumps(call.answer):  # it fits no other answer, or lacks something
        return f"found {call.answer}"
    return ""
