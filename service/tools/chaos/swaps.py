"""Swaps of the models under test to versions of the same settings, while clients ask."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from inferpool.service.tools.chaos.questions import problem_code
from inferpool.service.tools.trial.connection import (
    Address,
    NoAnswerError,
    connected,
    post_request,
)

MOST_COMPARED = 40
"""Most instances that a swap has both versions compute: ten inputs, as the answer and as
tensors."""
_ANSWER_S = 300.0
_REFUSED = (409, 422, 503)
_BODY = json.dumps({"policy": "force", "rollback_s": 0, "ephemeral": True}).encode()


@dataclass(slots=True, kw_only=True)
class Swaps:
    """Swaps one model after the other. Lives in the event loop."""

    address: Address
    models: Sequence[str]
    key: str
    """The administrator's key of the service."""
    num_done: int = 0
    refused: list[str] = field(default_factory=list)
    """Why versions were refused: their workers were struck, too."""
    failed: list[str] = field(default_factory=list)
    """Swaps without an answer, or with one that says neither yes nor no."""

    @property
    def num_begun(self) -> int:
        """Requested swaps that are over."""
        return self.num_done + len(self.refused) + len(self.failed)

    async def swap(self) -> None:
        """Swap the next model, and wait for the decision."""
        name = self.models[self.num_begun % len(self.models)]
        path = f"/admin/models/{name}/versions"
        request = post_request(path, _BODY, "application/json", {"X-API-Key": self.key})
        try:
            async with connected(self.address) as connection:
                answer = await connection.ask(request, _ANSWER_S)
        except (OSError, NoAnswerError) as error:
            self.failed.append(f"the swap of {name} had no answer: {error}")
            return
        if answer.status == 200:
            self.num_done += 1
            return
        text = f"{name}: {answer.status} {problem_code(answer.body)} {answer.body[:300]!r}"
        (self.refused if answer.status in _REFUSED else self.failed).append(text)
