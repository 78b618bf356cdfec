"""LitServe as a peer: python -m tests.bench.servers.litserve_server PORT."""

import sys
from collections.abc import Sequence
from typing import Annotated

import litserve  # type: ignore[import-not-found, import-untyped, unused-ignore]  # of the optional group `bench`
from fastapi import Body

from tests.bench.servers.work import peer_setting

OctetStream = Annotated[bytes, Body(media_type="application/octet-stream")]


class Api(litserve.LitAPI):  # type: ignore[misc, unused-ignore]  # Any where it is not installed
    """The work, behind LitServe's own batching."""

    def setup(self, device: object) -> None:
        self.work = peer_setting().make()

    def decode_request(self, request: OctetStream) -> object:
        return self.work.prepare(request)

    def batch(self, inputs: Sequence[object]) -> Sequence[object]:
        return inputs

    def predict(self, x: Sequence[object] | object) -> object:
        if self.max_batch_size == 1:
            return self.work.compute([x])[0]
        assert isinstance(x, Sequence)
        return self.work.compute(x)

    def unbatch(self, output: Sequence[object]) -> Sequence[object]:
        return output

    def encode_response(self, output: object) -> object:
        return output


if __name__ == "__main__":
    setting = peer_setting()
    api = Api(max_batch_size=setting.max_batch_size, batch_timeout=setting.wait_ms / 1000)
    # The fast_queue transport and more than one API server were slower here, on two cores.
    server = litserve.LitServer(
        api, accelerator="cpu", workers_per_device=setting.num_workers, timeout=60
    )
    server.run(
        host="127.0.0.1",
        port=int(sys.argv[1]),
        num_api_servers=1,
        log_level="warning",
        access_log=False,
        generate_client_file=False,
    )
