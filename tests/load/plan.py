"""One phase of load as a value: what is sent where, how fast, for how long."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tests.load.bodies import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the generator processes are to do together."""

    url: str
    """The whole of it, with the path."""
    source: Source
    headers: Mapping[str, str] = field(default_factory=dict)
    connections: int
    """Closed loop: always busy. Open loop: opened as they are needed, and no more than these."""
    rate: float | None = None
    """Requests per second, arriving at random moments (Poisson); None is the closed loop."""
    duration_s: float | None
    """Of measuring; None where a number of requests is given."""
    num_requests: int | None = None
    """To measure."""
    warmup_s: float = 0.0
    """Of the same load before, which is not counted."""
    timeout_s: float = 30.0
    """For the whole of a request, from the moment that it was meant to be sent."""
    verify: bool | str = True
    """Whether TLS certificates are checked; or the file of the authority that signs them."""
    expect: str | None = None
    """A field that the JSON of a good answer has."""
    seed: int = 0
    processes: int = 1

    def share(self, index: int) -> "Plan":
        """What one of the processes does of it."""

        def part(total: int) -> int:
            return total // self.processes + (index < total % self.processes)

        return replace(
            self,
            connections=part(self.connections),
            rate=self.rate / self.processes if self.rate else None,
            num_requests=part(self.num_requests) if self.num_requests else None,
            seed=self.seed + index,
            processes=1,
        )
