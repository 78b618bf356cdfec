"""Calls of Cohere's and Jina's clients: `python cohere_calls.py KIND ADDRESS`.

KIND is v1, v1_aio, v2, v2_aio, langchain, llama_index or jina. RERANKER and CLASSIFIER name the
models. A reranker may give any scores; each answer says whether it fits the first one.
"""

import asyncio
import logging
import os
import sys
import time

from telling import shown, tell

KIND, ADDRESS = sys.argv[1:3]
URL = f"http://{ADDRESS}"
RERANKER = os.environ.get("RERANKER", "reranker")
CLASSIFIER = os.environ.get("CLASSIFIER", "classifier")
KEY = os.environ.get("PREDICT_KEY", "no key")
NO_KEY = "a-key-that-nobody-knows"
QUERY = "what is the capital of France?"
DOCUMENTS = ["a cat is an animal", "Paris is the capital of France", "Grüße, 東京! 🚲"]
MANY = [f"the document with the number {number}" for number in range(1000)]
OBJECTS = [{"text": each, "page": str(page)} for page, each in enumerate(DOCUMENTS)]
FIELDS = [{"title": "t", "body": each} for each in DOCUMENTS]

BOTH = {
    "documents": {"documents": DOCUMENTS},
    "the best of them": {"documents": DOCUMENTS, "top_n": 1},
    "more than there are": {"documents": DOCUMENTS, "top_n": 50},
    "one document": {"documents": DOCUMENTS[:1]},
    "the same twice": {"documents": [DOCUMENTS[0]] * 2},
    "an empty document": {"documents": ["", *DOCUMENTS]},
    "a long document": {"documents": ["word " * 5000, *DOCUMENTS]},
    "1000 documents": {"documents": MANY},
    "1001 documents": {"documents": [*MANY, "one more"]},
    "no documents": {"documents": []},
    "no query": {"query": "", "documents": DOCUMENTS},
    "a wrong top_n": {"documents": DOCUMENTS, "top_n": -1},
    "a number as a document": {"documents": [*DOCUMENTS, 3]},
    "a long query": {"query": "q" * 100_000, "documents": MANY},
    "no such model": {"model": "rerank-v3.5", "documents": DOCUMENTS},
    "a model for something else": {"model": CLASSIFIER, "documents": DOCUMENTS},
}
"""Arguments of `rerank` for both clients."""
ONLY_V1 = {
    "documents that are shown": {"documents": DOCUMENTS, "return_documents": True},
    "documents that are not shown": {"documents": DOCUMENTS, "return_documents": False},
    "objects": {"documents": OBJECTS, "return_documents": True},
    "fields": {"documents": FIELDS, "rank_fields": ["title", "body"], "return_documents": True},
    "chunks": {"documents": DOCUMENTS, "max_chunks_per_doc": 10},
}
ONLY_V2 = {
    "a length": {"documents": DOCUMENTS, "max_tokens_per_doc": 4096},
    "a short length": {"documents": DOCUMENTS, "max_tokens_per_doc": 2},
    "a priority": {"documents": DOCUMENTS, "priority": 5},
}
CLASSIFIED = {
    "texts": {"inputs": DOCUMENTS},
    "one text": {"inputs": DOCUMENTS[:1]},
    "cut at the start": {"inputs": DOCUMENTS, "truncate": "START"},
    "no texts": {"inputs": []},
    "examples": {"inputs": DOCUMENTS, "examples": [{"text": "a", "label": "b"}]},
    "a reranker": {"inputs": DOCUMENTS, "model": RERANKER},
}


def failure(error):
    """Return an error with what Cohere's client reads from it."""
    body = getattr(error, "body", None)
    if not isinstance(body, dict):
        return shown(error)
    is_cohere = body.get("message") == body.get("detail") and bool(body.get("id"))
    text = body.get("message") or body.get("detail")
    status = getattr(error, "status_code", None)
    return {"type": type(error).__name__, "status": status, "text": text, "as cohere": is_cohere}


def pairs(results):
    return [(each.index, each.relevance_score) for each in results]


def same(one, other, most=1e-4):
    """Return whether the documents of both have about the same scores."""
    one, other = dict(one), dict(other)
    return all(abs(score - other[index]) <= most for index, score in one.items() if index in other)


def summary(answer, documents, first):
    """Return what there is to say about an answer, given the documents and the first answer."""
    found = pairs(answer.results)
    scores = [score for _, score in found]
    told = {
        "results": len(found),
        "best first": scores == sorted(scores, reverse=True),
        "in [0, 1]": all(0 <= score <= 1 for score in scores),
        "id": bool(answer.id),
        "version": answer.meta.api_version.version,
        "counts": answer.meta.tokens.input_tokens > 0,
        "warnings": answer.meta.warnings,
    }
    document = getattr(answer.results[0], "document", None)
    if document is not None:
        told["shown"] = document if isinstance(document, dict) else document.dict()
    if first and documents in (DOCUMENTS, OBJECTS):
        told["same"] = same(found, first)
    return told


async def ranks(client, given, finished):
    """Make all calls of `rerank`; `finished` awaits what an asynchronous client returns."""
    first = None
    for name, arguments in given.items():
        try:
            made = client.rerank(**{"model": RERANKER, "query": QUERY, **arguments})
            answer = await finished(made)
            tell(name, summary(answer, arguments["documents"], first))
            first = first or pairs(answer.results)
        except Exception as error:
            tell(name, error=failure(error))


async def deadline(client, finished):
    """Ask for an answer in too short a time, twice over: the client tries again."""
    began = time.monotonic()
    try:
        options = {"additional_headers": {"x-timeout-ms": "1"}, "max_retries": 1}
        made = client.rerank(
            model=RERANKER, query=QUERY, documents=MANY, request_options=options
        )  # fmt: skip
        tell("too short a timeout", len((await finished(made)).results))
    except Exception as error:
        told = {"tried again": time.monotonic() - began > 0.5}
        tell("too short a timeout", told, error=failure(error))


async def classes(client, finished):
    for name, arguments in CLASSIFIED.items():
        try:
            answer = await finished(client.classify(**{"model": CLASSIFIER, **arguments}))
        except Exception as error:
            tell(f"classify {name}", error=failure(error))
            continue
        texts = answer.classifications
        best = [max(each.labels.items(), key=lambda pair: pair[1].confidence) for each in texts]
        told = {
            "texts": [each.input for each in texts] == arguments["inputs"],
            "best": [name for name, _ in best] == [each.prediction for each in texts],
            "confidence": all(each.confidence == each.confidences[0] for each in texts),
            "labels": sorted(texts[0].labels),
            "type": texts[0].classification_type,
            "id": bool(answer.id),
        }
        tell(f"classify {name}", told)


async def cohere_calls(client, nobody, finished):
    import cohere

    is_v1 = KIND.startswith("v1")
    await ranks(client, BOTH | (ONLY_V1 if is_v1 else ONLY_V2), finished)
    await deadline(client, finished)
    if is_v1:
        await classes(client, finished)
    for name, made in {
        "a key that nobody knows": lambda: nobody.rerank(
            model=RERANKER, query=QUERY, documents=DOCUMENTS
        ),
        "embed": lambda: client.embed(
            model="m", texts=["a"], input_type="search_query", embedding_types=["float"]
        ),
    }.items():
        try:
            tell(name, type(await finished(made())).__name__)
        except cohere.core.ApiError as error:
            tell(name, error=failure(error))


async def value_of(made):
    return made


async def awaited(made):
    return await made


def cohere_client(key):
    import cohere

    kinds = {
        "v1": cohere.Client, "v1_aio": cohere.AsyncClient,
        "v2": cohere.ClientV2, "v2_aio": cohere.AsyncClientV2,
    }  # fmt: skip
    return kinds[KIND](api_key=key, base_url=URL)


async def at_once(client):
    """Make many calls at the same time."""
    made = [client.rerank(model=RERANKER, query=QUERY, documents=MANY[place : place + 40])
            for place in range(0, 1000, 40)]  # fmt: skip
    found = [
        (group * 40 + index, score)
        for group, answer in enumerate(await asyncio.gather(*made))
        for index, score in pairs(answer.results)
    ]
    alone = await client.rerank(model=RERANKER, query=QUERY, documents=MANY)
    tell("25 calls at once", {"same": same(found, pairs(alone.results)), "results": len(found)})


async def asynchronous():
    async with cohere_client(KEY) as client, cohere_client(NO_KEY) as nobody:
        await cohere_calls(client, nobody, awaited)
        await at_once(client)


def langchain():
    from langchain_cohere import CohereRerank
    from langchain_core.documents import Document

    client = CohereRerank(base_url=URL, cohere_api_key=KEY, model=RERANKER, top_n=2)
    pages = [Document(page_content=each) for each in DOCUMENTS]
    for name, call in {
        "texts": lambda: client.rerank(DOCUMENTS, QUERY),
        "objects": lambda: client.rerank(FIELDS, QUERY, rank_fields=["body"], top_n=None),
        "documents": lambda: [
            {"index": DOCUMENTS.index(each.page_content), **each.metadata}
            for each in client.compress_documents(pages, QUERY)
        ],
    }.items():
        try:
            found = call()
            scores = [each["relevance_score"] for each in found]
            told = {"results": len(found), "best first": scores == sorted(scores, reverse=True)}
            tell(name, told)
        except Exception as error:
            tell(name, error=failure(error))


def llama_index():
    from llama_index.core.schema import NodeWithScore, TextNode

    nodes = [NodeWithScore(node=TextNode(text=each), score=0.0) for each in DOCUMENTS]
    for name, client in {"cohere": llama_cohere, "jina": llama_jina}.items():
        for case, model in {"": RERANKER, ", no such model": "rerank-v3.5"}.items():
            try:
                ranked = client(model).postprocess_nodes(nodes, query_str=QUERY)
                scores = [each.score for each in ranked]
                told = {"results": len(ranked), "best first": scores == sorted(scores)[::-1]}
                tell(f"{name}{case}", told)
            except Exception as error:
                tell(f"{name}{case}", error=failure(error))


def llama_cohere(model):
    from llama_index.postprocessor.cohere_rerank import CohereRerank

    return CohereRerank(top_n=2, model=model, api_key=KEY, base_url=URL)


def llama_jina(model):
    from llama_index.postprocessor.jinaai_rerank import JinaRerank

    return JinaRerank(top_n=2, model=model, api_key=KEY, base_url=f"{URL}/v1")


def jina():
    """Call as Jina's API is called by hand; it has no client of its own for texts."""
    import httpx

    with httpx.Client(base_url=URL, headers={"authorization": f"Bearer {KEY}"}) as client:
        for name, path, body in (
            (
                "documents",
                "/v1/rerank",
                {"model": RERANKER, "query": QUERY, "documents": DOCUMENTS},
            ),
            (
                "objects",
                "/v1/rerank",
                {"model": RERANKER, "query": QUERY, "documents": OBJECTS, "top_n": 1},
            ),
            (
                "a picture",
                "/v1/rerank",
                {"model": RERANKER, "query": QUERY, "documents": [{"image": "https://x"}]},
            ),
            ("classify", "/v1/classify", {"model": CLASSIFIER, "input": DOCUMENTS}),
            (
                "classify by other labels",
                "/v1/classify",
                {"model": CLASSIFIER, "input": DOCUMENTS, "labels": ["a", "b"]},
            ),
        ):
            answer = client.post(path, json=body)
            found = answer.json()
            if answer.is_success:
                first = (found.get("results") or found.get("data"))[0]
                tell(name, {"usage": found["usage"]["total_tokens"] > 0, "first": sorted(first)})
            else:
                tell(name, error={"status": answer.status_code, "detail": found["detail"]})


def main():
    logging.disable()
    if KIND in ("v1", "v2"):
        asyncio.run(cohere_calls(cohere_client(KEY), cohere_client(NO_KEY), value_of))
    elif KIND in ("v1_aio", "v2_aio"):
        asyncio.run(asynchronous())
    else:
        {"langchain": langchain, "llama_index": llama_index, "jina": jina}[KIND]()


if __name__ == "__main__":
    main()
