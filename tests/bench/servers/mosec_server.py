"""mosec as a peer: python -m tests.bench.servers.mosec_server, followed by flags of mosec's own."""

import json

from mosec import (  # type: ignore[import-not-found, unused-ignore]  # of the optional group `bench`
    Server,
    Worker,
)

from tests.bench.servers.work import peer_setting


class MosecWorker(Worker):  # type: ignore[misc, unused-ignore]  # Any where it is not installed
    """The work, in each of mosec's Python processes."""

    def __init__(self) -> None:
        super().__init__()
        self.setting = peer_setting()
        self.work = self.setting.make()

    def deserialize(self, data: bytes) -> object:
        return self.work.prepare(data)

    def forward(self, data):  # mosec: a list where batching is on, else one value
        if self.setting.max_batch_size == 1:
            return self.work.compute([data])[0]
        return self.work.compute(data)

    def serialize(self, data: object) -> bytes:
        return json.dumps(data).encode()


if __name__ == "__main__":
    setting = peer_setting()
    server = Server()
    server.append_worker(
        MosecWorker,
        num=setting.num_workers,
        max_batch_size=setting.max_batch_size,
        max_wait_time=max(1, round(setting.wait_ms)),
        route="/predict",
    )
    server.run()
