"""BentoML as a peer: python -m bentoml serve tests.bench.servers.bentoml_server:FrontService.

It batches calls between its services, so that one takes the requests and another does the work.
"""

import json
from typing import Any

import bentoml  # type: ignore[import-not-found, unused-ignore]  # of an environment of its own
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from tests.bench.servers.work import peer_setting, serve_batch

QUIET = {"logging": {"access": {"enabled": False}}, "metrics": {"enabled": False}}

setting = peer_setting()
app = Starlette()
batching = {"batchable": True, "max_batch_size": setting.max_batch_size}


@bentoml.service(workers=setting.num_workers, **QUIET)
class BentoWorker:
    """The work. How long a batch waits to fill, BentoML learns by itself."""

    def __init__(self) -> None:
        self.work = setting.make()

    @bentoml.api(  # type: ignore[untyped-decorator, unused-ignore]  # where it is not installed
        **batching if setting.max_batch_size > 1 else {}
    )
    def infer(self, bodies: list[Any]) -> list[Any]:
        return list(serve_batch(self.work, bodies))


@bentoml.service(workers=1, **QUIET)
@bentoml.asgi_app(app, path="/")
class FrontService:
    """Raw bodies in, JSON out."""

    workers = bentoml.depends(BentoWorker)

    def __init__(self) -> None:
        app.add_route("/predict", self.predict, methods=["POST"])

    async def predict(self, request: Request) -> Response:
        answers = await self.workers.to_async.infer([await request.body()])
        return Response(json.dumps(answers[0]), media_type="application/json")
