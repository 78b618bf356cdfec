"""Brings our service to the speed that it has after a while, before it is measured."""

import json
import time
from dataclasses import replace

from tests.bench.processes import OUT, BenchError, Contender, Probe, Server, ask
from tests.bench.report import console

_START_S = 180.0
_SEARCH_S = 1800.0
_POLL_S = 1.0
_HEALTH = Probe(path="/health")


def settled(ours: Contender, port: int) -> Contender:
    """Let the service search for a faster preset, and measure it without a search beside it.

    Raises:
        BenchError: The search did not come to an end.
    """
    console.print(f"{ours.name}: searching for the fastest preset", markup=False, highlight=False)
    with Server(ours, port, OUT / "logs" / f"{ours.name}-search.log") as server:
        server.wait_ready(_HEALTH, _START_S)
        until = time.monotonic() + _SEARCH_S
        while True:
            server.require_running()
            (model,) = json.loads(ask(port, _HEALTH)[1])["models"]
            search = model["speed_search"]
            if search["state"] in ("off", "done", "failed"):
                break
            if time.monotonic() > until:
                raise BenchError(f"{ours.name} still searches for speed: {search['text']}")
            time.sleep(_POLL_S)
    console.print(f"  {search['text'] or 'nothing to search for'}", markup=False, highlight=False)
    return replace(ours, env={**ours.env, "INFERPOOL_SPEED_SEARCH": "false"})
