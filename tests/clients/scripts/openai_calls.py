"""Calls of OpenAI's clients: `python openai_calls.py sync|aio|langchain|llama_index ADDRESS`.

The model is that of the variable MODEL, an encoder. Each answer says how it fits the first ones.
"""

import asyncio
import logging
import os
import sys

import openai
from telling import shown, tell

KIND, ADDRESS = sys.argv[1:3]
URL = f"http://{ADDRESS}/v1"
MODEL = os.environ.get("MODEL", "texts")
KEY = os.environ.get("PREDICT_KEY", "no key")
NO_KEY = "sk-that-nobody-knows"
TEXTS = ["hello world", "how do I get there?", "Grüße, 東京! 🚲"]
MANY = [f"the text with the number {number}" for number in range(2048)]
IDS = [101, 102, 103]
NO_IDS = [100_257, 3]
"""Ids of another vocabulary, as LangChain sends them by default."""


def failure(error):
    """Return an error with what OpenAI's client reads from it."""
    read = {name: getattr(error, name, None) for name in ("code", "param", "request_id")}
    return {**shown(error), **read, "request_id": bool(read["request_id"])}


def same(one, other, most=1e-4):
    """Return whether vectors are the same but for their rounding."""
    pairs = zip(one, other, strict=True)
    return all(
        len(a) == len(b) and max(abs(x - y) for x, y in zip(a, b, strict=True)) <= most
        for a, b in pairs
    )


def vectors(answer):
    assert [each.index for each in answer.data] == list(range(len(answer.data)))
    assert {each.object for each in answer.data} == {"embedding"}
    assert answer.object == "list"
    return [each.embedding for each in answer.data]


def length(vector):
    return sum(each * each for each in vector) ** 0.5


CALLS = {
    "a text": {"input": TEXTS[0]},
    "texts": {"input": TEXTS},
    "texts as floats": {"input": TEXTS, "encoding_format": "float"},
    "texts as base64": {"input": TEXTS, "encoding_format": "base64"},
    "fewer dimensions": {"input": TEXTS, "dimensions": 3},
    "a user": {"input": TEXTS, "user": "somebody"},
    "our own arguments": {"input": TEXTS, "extra_body": {"normalize": True, "truncate": False}},
    "ids": {"input": IDS},
    "lists of ids": {"input": [IDS, IDS[:2]]},
    "300 texts": {"input": MANY[:300]},
    "2048 texts": {"input": MANY},
    "2049 texts": {"input": [*MANY, "one more"]},
    "no text": {"input": []},
    "an empty text": {"input": ["a", ""]},
    "a text and ids": {"input": ["a", IDS]},
    "ids of another vocabulary": {"input": NO_IDS},
    "no dimensions": {"input": TEXTS, "dimensions": 0},
    "too many dimensions": {"input": TEXTS, "dimensions": 10**6},
    "another format": {"input": TEXTS, "encoding_format": "int8"},
    "an unknown argument": {"input": TEXTS, "extra_body": {"instances": []}},
    "no model": {"input": TEXTS, "model": "text-embedding-3-small"},
    "an extra query and header": {
        "input": TEXTS,
        "extra_query": {"api-version": "1"},
        "extra_headers": {"x-request-id": "of-the-client"},
    },
    "too short a timeout": {"input": MANY, "extra_headers": {"x-timeout-ms": "1"}},
}
"""The arguments of `embeddings.create`."""


def summary(name, answer, first):
    """Return what there is to say about an answer, given the vectors of TEXTS."""
    found = vectors(answer)
    told = {
        "vectors": len(found),
        "width": len(found[0]) if isinstance(found[0], list) else "text",
        "model": answer.model,
        "counts": answer.usage.prompt_tokens == answer.usage.total_tokens > 0,
    }
    if name == "fewer dimensions":
        told["length"] = round(length(found[0]), 3)
    elif len(found) == len(TEXTS) and first and isinstance(found[0], list):
        told["same"] = same(found, first)
    return told


async def calls(client, finished):
    """Make all calls; `finished` awaits what an asynchronous client returns."""
    first = None
    for name, given in CALLS.items():
        try:
            answer = await finished(client.embeddings.create(**{"model": MODEL, **given}))
            tell(name, summary(name, answer, first))
            first = vectors(answer) if name == "texts" else first
        except Exception as error:
            tell(name, error=failure(error))
    await others(client, finished)


async def others(client, finished):
    raw = client.embeddings.with_raw_response
    for name, call in {
        "raw response": lambda: raw.create(model=MODEL, input=TEXTS[0]),
        "models": lambda: client.models.list(),
        "a model": lambda: client.models.retrieve(MODEL),
        "a model that is not there": lambda: client.models.retrieve("gpt-4o"),
        "a key that nobody knows": lambda: client.with_options(api_key=NO_KEY).embeddings.create(
            model=MODEL, input=TEXTS[0]
        ),
    }.items():
        try:
            found = await finished(call())
        except Exception as error:
            tell(name, error=failure(error))
            continue
        if name == "raw response":
            found = {
                "id": bool(found.headers["x-request-id"]),
                "kind": type(found.parse()).__name__,
            }
        elif name == "models":
            found = [[each.id, each.object, each.owned_by] for each in found.data]
        elif name == "a model":
            found = [found.id, found.object]
        else:
            found = len(found.data)
        tell(name, found)


async def at_once(client):
    """Make many calls at the same time; some may be refused at first, and are tried again."""
    client = client.with_options(max_retries=50)
    made = [client.embeddings.create(model=MODEL, input=MANY[place : place + 40])
            for place in range(0, 1280, 40)]  # fmt: skip
    try:
        found = [vectors(each) for each in await asyncio.gather(*made)]
        alone = vectors(await client.embeddings.create(model=MODEL, input=MANY[:1280]))
    except Exception as error:
        tell("32 calls at once", error=failure(error))
    else:
        everyone = [each for group in found for each in group]
        tell("32 calls at once", {"same": same(everyone, alone)})


def langchain():
    from langchain_openai import OpenAIEmbeddings

    made = {"base_url": URL, "api_key": KEY, "model": MODEL, "check_embedding_ctx_length": False}
    for name, call in {
        "documents": lambda: OpenAIEmbeddings(**made).embed_documents(TEXTS),
        "2048 documents": lambda: OpenAIEmbeddings(**made).embed_documents(MANY),
        "a query": lambda: [OpenAIEmbeddings(**made).embed_query(TEXTS[0])],
        "fewer dimensions": lambda: OpenAIEmbeddings(**made, dimensions=3).embed_documents(TEXTS),
        "documents, aio": lambda: asyncio.run(OpenAIEmbeddings(**made).aembed_documents(TEXTS)),
    }.items():
        try:
            found = call()
            tell(name, {"vectors": len(found), "width": len(found[0])})
        except Exception as error:
            tell(name, error=failure(error))


def llama_index():
    from llama_index.embeddings.openai import OpenAIEmbedding

    client = OpenAIEmbedding(api_base=URL, api_key=KEY, model_name=MODEL, embed_batch_size=300)
    for name, call in {
        "texts": lambda: client.get_text_embedding_batch(TEXTS),
        "2048 texts": lambda: client.get_text_embedding_batch(MANY),
        "a query": lambda: [client.get_query_embedding(TEXTS[0])],
        "texts, aio": lambda: asyncio.run(client.aget_text_embedding_batch(TEXTS)),
    }.items():
        try:
            found = call()
            tell(name, {"vectors": len(found), "width": len(found[0])})
        except Exception as error:
            tell(name, error=failure(error))


async def value_of(made):
    return made


async def awaited(made):
    return await made


async def asynchronous():
    async with openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=1) as client:
        await calls(client, awaited)
        await at_once(client)


def main():
    logging.disable()
    if KIND == "sync":
        with openai.OpenAI(base_url=URL, api_key=KEY, max_retries=1) as client:
            asyncio.run(calls(client, value_of))
    elif KIND == "aio":
        asyncio.run(asynchronous())
    else:
        {"langchain": langchain, "llama_index": llama_index}[KIND]()


if __name__ == "__main__":
    main()
