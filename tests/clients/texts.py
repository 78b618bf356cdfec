"""Clients of the protocols of texts, which have one server to compare with: what is right is known.

They get a service of their own, with a key, an encoder, a reranker and a classifier.
"""

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
    "tei": (
        *("llama-index-embeddings-text-embeddings-inference==0.6.0", "huggingface_hub==1.33.0"),
        *("numpy", "httpx"),
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
    "llama-index, TEI": ("tei_calls.py", "llama_index"),
    "huggingface_hub": ("tei_calls.py", "hub"),
    "huggingface_hub aio": ("tei_calls.py", "hub_aio"),
    "TEI by hand": ("tei_calls.py", "plain"),
}
"""Scripts and the argument that says which client calls."""
_UNFIT = "invalid_input"
_REFUSED: Mapping[str, Mapping[str, str]] = {
    "openai": {
        "2049 texts": _UNFIT, "no text": _UNFIT, "an empty text": _UNFIT, "a text and ids": _UNFIT,
        "ids of another vocabulary": _UNFIT, "no dimensions": _UNFIT, "another format": _UNFIT,
        "too many dimensions": _UNFIT, "an unknown argument": _UNFIT, "no model": "model_not_found",
        "a model that is not there": "model_not_found", "too short a timeout": "deadline_exceeded",
        "a key that nobody knows": "invalid_api_key",
    },
    "cohere": {
        "1001 documents": "400", "no documents": "400", "no query": "400", "a wrong top_n": "400",
        "a number as a document": "400", "a long query": "413", "no such model": "404",
        "a model for something else": "400", "too short a timeout": "504",
        "classify no texts": "400", "classify examples": "400", "classify a reranker": "400",
        "a key that nobody knows": "401", "embed": "404", "a picture": "400",
        "classify by other labels": "400", "cohere, no such model": "404",
        "jina, no such model": "RuntimeError",
    },
    "tei": {
        "too long": "KeyError", "another model": "KeyError", "no such prompt": "422",
        "no key": "401", "classification by an encoder": "424", "embed nothing": "400",
        "embed_sparse": "424", "rerank by an encoder": "424",
    },
}  # fmt: skip
"""The calls that must be refused, with the code, status or class of the client's error.

llama-index's client of TEI reads no statuses, and fails with a KeyError.
"""


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
                complaint = complaint_of(call, _REFUSED[name])
                yield client, call.call, "failed" if complaint else "right", complaint


def complaint_of(call: ClientCall, refused: Mapping[str, str]) -> str:
    """Return what is wrong with a call; empty if nothing is."""
    status = refused.get(call.call, "200")
    if call.status != status and (status, call.status) != ("401", "KeyError"):
        return f"expected {status}, found {call.status} {call.text}"
    if isinstance(call.answer, dict) and False in call.answer.values():  # it fits no other one
        return f"found {call.answer}"
    return ""
