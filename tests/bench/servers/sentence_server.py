"""sentence-transformers behind FastAPI, as its users deploy it: one encode for each request.

The endpoint is a plain function, so FastAPI calls it in one of 40 threads. It runs in an
environment of its own that has sentence-transformers, fastapi and uvicorn, and imports nothing of
the benchmarks: python sentence_server.py PORT FOLDER
"""

import sys

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from sentence_transformers import (  # type: ignore[import-not-found, unused-ignore]  # of a peer
    SentenceTransformer,
)


class Texts(BaseModel):
    """The body of a call."""

    texts: list[str]


app = FastAPI()
encoder = SentenceTransformer(sys.argv[2], device="cpu")


@app.post("/embed")
def embed(body: Texts) -> list[list[float]]:
    """Return a vector for each text."""
    vectors: list[list[float]] = encoder.encode(body.texts).tolist()
    return vectors


@app.get("/health")
def health() -> str:
    """Answer once the model is loaded."""
    return "ready"


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False)
