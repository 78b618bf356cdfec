"""BentoML as a peer: python -m bentoml serve tests.bench.servers.bentoml_server:Front --port PORT.

It batches calls between its services, so that one takes the requests and another does the work.
"""

import json
from typing import Any

import bentoml  # type: ignore[import-not-found, unused-ignore]  # of an environment of its own
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from tests.bench.servers.work import serve_batch, setting

QUIET = {"logging": {"access": {"enabled": False}}, "metrics": {"enabled": False}}

told = setting()
app = Starlette()
batching = {"batchable": True, "max_batch_size": told.max_batch_size}


@bentoml.service(workers=told.num_workers, **QUIET)
class Infer:
    """The work. How long a batch waits to fill, BentoML learns by itself."""

    def __init__(self) -> None:
        self.work = told.make()

    @bentoml.api(  # type: ignore[untyped-decorator, unused-ignore]  # where it is not installed
        **batching if told.max_batch_size > 1 else {}
    )
    def infer(self, bodies: list[Any]) -> list[Any]:
        return list(serve_batch(self.work, bodies))


@bentoml.service(workers=1, **QUIET)
@bentoml.asgi_app(app, path="/")
class Front:
    """Raw bodies in, JSON out."""

    workers = bentoml.depends(Infer)

    def __init__(self) -> None:
        app.add_route("/predict", self.predict, methods=["POST"])

    async def predict(self, request: Request) -> Response:
        answers = await self.workers.to_async.infer([await request.body()])
        return Response(json.dumps(answers[0]), media_type="application/json")
