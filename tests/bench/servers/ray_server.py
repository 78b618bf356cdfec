"""Ray Serve as a peer: python -m tests.bench.servers.ray_server PORT."""

import json
import os
import secrets
import sys
import tempfile
from collections.abc import Sequence

import ray  # type: ignore[import-not-found, unused-ignore]  # of an environment of its own
from ray import serve  # type: ignore[import-not-found, unused-ignore]  # as above
from ray.serve.schema import (  # type: ignore[import-not-found, unused-ignore]  # as above
    LoggingConfig,
)
from starlette.requests import Request
from starlette.responses import Response

from tests.bench.servers.work import HOST, peer_setting, serve_batch

_OBJECT_STORE_BYTES = 300 << 20
"""Bodies do not pass through it; by default it would be a third of the machine's memory."""

setting = peer_setting()
quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)


class RayReplica:
    """The work, in each replica, behind Ray Serve's own batching."""

    def __init__(self) -> None:
        self.work = setting.make()

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        if setting.max_batch_size == 1:
            answer = serve_batch(self.work, [body])[0]
        else:
            answer = await self.infer(body)
        return Response(json.dumps(answer), media_type="application/json")

    @serve.batch(  # type: ignore[untyped-decorator, unused-ignore]  # where it is not installed
        max_batch_size=setting.max_batch_size, batch_wait_timeout_s=setting.wait_ms / 1000
    )
    async def infer(self, bodies: Sequence[bytes]) -> Sequence[dict[str, object]]:
        return serve_batch(self.work, bodies)


def main(port: int) -> None:
    """Serve until SIGTERM; a cluster of this machine alone begins and ends with it."""
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # else it leaves one in the home folder
    ray.init(
        "local",
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        _node_ip_address=HOST,
        _temp_dir=tempfile.gettempdir(),
    )
    serve.start(http_options={"host": HOST, "port": port}, logging_config=quiet)
    deployment = serve.deployment(
        num_replicas=setting.num_workers,
        max_ongoing_requests=128,
        ray_actor_options={"num_cpus": 0},  # that many, however few the cores
        logging_config=quiet,
    )
    serve.run(
        deployment(RayReplica).bind(), route_prefix="/predict", logging_config=quiet, blocking=True
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
