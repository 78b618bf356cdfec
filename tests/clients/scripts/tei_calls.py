"""Calls of TEI's clients: `python tei_calls.py llama_index|hub|hub_aio|plain ADDRESS`.

The default model must be an encoder. RERANKER and CLASSIFIER are the names of such models (by
default `reranker` and `classifier`), which are asked below /tei. PREDICT_KEY is a key, if one is
needed. llama_index is llama-index-embeddings-text-embeddings-inference; hub is the client of
huggingface_hub, which posts to /; plain are the calls of TEI's documentation, by httpx.
"""

import asyncio
import os
import sys

import httpx
from telling import shown, tell

KIND, ADDRESS = sys.argv[1:3]
URL = f"http://{ADDRESS}"
RERANKER = f"{URL}/tei/{os.environ.get('RERANKER', 'reranker')}"
CLASSIFIER = f"{URL}/tei/{os.environ.get('CLASSIFIER', 'classifier')}"
KEY = os.environ.get("PREDICT_KEY", "no key")
TEXTS = ["hello world", "how do I get there?", "Grüße, 東京! 🚲"]
MANY = [f"the text with the number {number}" for number in range(100)]
LONG = "a long text " * 2000
PAIR = {"query": "what is a cat?", "texts": ["a car", "an animal"]}


def vectors(found):
    """Return how many vectors there are, and the numbers of each."""
    rows = [list(each) for each in found]
    return {"vectors": len(rows), "numbers": sorted({len(each) for each in rows})}


def labels(found):
    return sorted(each["label"] if isinstance(each, dict) else each.label for each in found)


async def call(name, made):
    """Await or call what makes a call, and tell what it gave."""
    try:
        found = made()
        tell(name, await found if hasattr(found, "__await__") else found)
    except Exception as error:
        tell(name, error=shown(error))


async def llama_index():
    from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

    def client(url=URL, key=KEY, **options):
        return TextEmbeddingsInference(model_name="any", base_url=url, auth_token=key, **options)

    one, sizes = client(), {"default": {}, "32 a call": {"embed_batch_size": 32}}
    await call("a text", lambda: vectors([one.get_text_embedding(TEXTS[0])]))
    await call("a query", lambda: vectors([one.get_query_embedding(TEXTS[0])]))
    for name, options in sizes.items():
        made = client(**options)
        await call(f"texts, {name}", lambda made=made: vectors(made.get_text_embedding_batch(MANY)))
    await call("cut", lambda: vectors([client(truncate_text=True).get_text_embedding(LONG)]))
    await call("too long", lambda: vectors([client(truncate_text=False).get_text_embedding(LONG)]))
    await call("another model", lambda: vectors([client(RERANKER).get_text_embedding("a")]))
    await call("no key", lambda: vectors([client(key="nobody's").get_text_embedding("a")]))

    async def by_aio():
        return vectors(await client().aget_text_embedding_batch(MANY))

    await call("texts, aio", by_aio)


async def hub(aio):
    from huggingface_hub import AsyncInferenceClient, InferenceClient

    make = AsyncInferenceClient if aio else InferenceClient

    async def ask(url, method, show, *args, key=KEY, **options):
        found = getattr(make(model=url, token=key), method)(*args, **options)
        return show(await found if aio else found)

    def asking(*args, **options):
        return lambda: ask(*args, **options)

    for path in ("", "/embed"):
        feature = (URL + path, "feature_extraction", vectors)
        await call(f"a text{path}", asking(*feature, TEXTS[0]))
        await call(f"texts{path}", asking(*feature, TEXTS))
        await call(
            f"options{path}",
            asking(*feature, TEXTS[0], normalize=True, truncate=True, truncation_direction="left"),
        )
    await call("no such prompt", asking(*feature, TEXTS[0], prompt_name="nobody"))
    await call("no key", asking(*feature, TEXTS[0], key="nobody's"))
    for path in ("", "/similarity"):
        similar = (URL + path, "sentence_similarity", len, TEXTS[0])
        await call(f"similarity{path}", asking(*similar, other_sentences=TEXTS[1:]))
    label = ("text_classification", lambda found: bool(found.label))
    await call("classification", asking(f"{CLASSIFIER}/predict", *label, TEXTS[0]))
    await call("classification by an encoder", asking(f"{URL}/predict", *label, TEXTS[0]))


async def plain():
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}) as client:

        async def ask(url, body, show):
            answer = await client.post(url, json=body)
            if answer.is_error:
                assert set(answer.json()) == {"error", "error_type"}
            answer.raise_for_status()
            return show(answer.json())

        def asking(url, body, show=len):
            return lambda: ask(url, body, show)

        await call("embed", asking(f"{URL}/embed", {"inputs": TEXTS}, vectors))
        await call("embed ids", asking(f"{URL}/embed", {"inputs": [[101, 102], [101]]}, vectors))
        await call("embed 8", asking(f"{URL}/embed", {"inputs": "a", "dimensions": 8}, vectors))
        await call("embed nothing", asking(f"{URL}/embed", {"inputs": []}))
        await call("embed_all", asking(f"{URL}/embed_all", {"inputs": TEXTS}))
        await call("embed_sparse", asking(f"{URL}/embed_sparse", {"inputs": TEXTS}))
        await call("tokenize", asking(f"{URL}/tokenize", {"inputs": TEXTS}))
        await call("decode", asking(f"{URL}/decode", {"ids": [101, 102]}))
        await call("rerank", asking(f"{RERANKER}/rerank", PAIR))
        await call("rerank with texts", asking(f"{RERANKER}/rerank", {**PAIR, "return_text": True}))
        await call("rerank by an encoder", asking(f"{URL}/rerank", PAIR))
        await call("predict", asking(f"{CLASSIFIER}/predict", {"inputs": "a"}, labels))
        await call(
            "predict a pair", asking(f"{CLASSIFIER}/predict", {"inputs": ["a", "b"]}, labels)
        )
        await call("predict many", asking(f"{CLASSIFIER}/predict", {"inputs": [["a"], ["a", "b"]]}))
        for url in (URL, RERANKER, CLASSIFIER):
            answer = await client.get(f"{url}/info")
            name = url.removeprefix(URL).rpartition("/")[2]
            tell(f"info {name}".strip(), {"type": [*answer.json()["model_type"]]})


if __name__ == "__main__":
    kinds = {"llama_index": llama_index, "plain": plain}
    aio = KIND == "hub_aio"
    asyncio.run(kinds[KIND]() if KIND in kinds else hub(aio))
