"""The work inside TorchServe's workers: packed into an archive by torchserve_server."""

import json
from collections.abc import Mapping, Sequence

from tests.bench.servers.work import peer_setting, serve_batch


class WorkHandler:
    """The only class of this file: it is how TorchServe finds it."""

    def initialize(self, context: object) -> None:
        self.work = peer_setting().make()

    def handle(self, data: Sequence[Mapping[str, bytes]], context: object) -> Sequence[bytes]:
        answers = serve_batch(self.work, [each["body"] for each in data])
        # Dictionaries it would indent, which takes longer.
        return [json.dumps(answer).encode() for answer in answers]
