"""A small service that prints what starts and stops, in order, from its start to its end.

`python -m tests.service.recorded_service FOLDER [NAME=VALUE ...]` serves "m" by a fake worker.
"""

import asyncio
import json
import sys
from functools import partial, wraps
from pathlib import Path

from inferpool.service.app import run
from inferpool.service.catalog.catalog import Catalog
from inferpool.service.parts.admin.operations import Operations
from inferpool.service.parts.cluster.hosts import Cluster
from inferpool.service.parts.fronts.fronts import Fronts
from inferpool.service.parts.jobs.jobs import Jobs
from inferpool.service.parts.live.sampler import LiveFeed
from inferpool.service.parts.speed import SpeedCache, SpeedSearch
from inferpool.service.parts.swap.changes import Changes
from inferpool.service.parts.watched.model_folder import ModelFolder
from inferpool.service.queue.dispatcher import Dispatcher
from inferpool.service.queue.pool import Pool
from inferpool.service.settings.loader import load
from inferpool.workers.host.gpu_watch import GpuWatch
from inferpool.workers.shared.arena import Arena
from tests.fakes import FakeEngine

EVENTS: list[str] = []
RECORDED = {
    Arena: ("close",),
    Catalog: ("start", "stop"),
    Changes: ("end", "stop"),
    Cluster: ("open", "close"),
    Dispatcher: ("drain",),
    Fronts: ("start", "on_ready", "move_clients_away", "stop"),
    GpuWatch: ("start", "stop"),
    Jobs: ("start", "end", "stop"),
    LiveFeed: ("start", "end", "stop"),
    ModelFolder: ("start", "stop"),
    Operations: ("end", "stop"),
    Pool: ("start", "stop"),
    SpeedCache: ("close",),
    SpeedSearch: ("add", "stop"),
}


class RecordedEngine(FakeEngine):
    """An engine of this host without processes."""

    async def close(self) -> None: ...

    def forkserver_vitals(self) -> None: ...


def record(kind: type, name: str) -> None:
    """Have a method leave its name, the first time that it is called."""
    method, event = getattr(kind, name), f"{kind.__name__}.{name}"

    @wraps(method)
    def recorded(*args: object, **kwargs: object) -> object:
        if event not in EVENTS:
            EVENTS.append(event)
        return method(*args, **kwargs)

    setattr(kind, name, recorded)


async def until_up(num_fronts: str) -> str:
    """Return the reason to stop, once everything has started."""
    last = {"Jobs.start", *(["Fronts.on_ready"] if num_fronts == "2" else [])}
    while not last <= set(EVENTS):  # noqa: ASYNC110  # the events are only recorded
        await asyncio.sleep(0.01)
    EVENTS.append("|")
    return "the end of the test"


def main(folder: Path, settings: dict[str, str]) -> None:
    """Serve for a moment."""
    for kind, names in {**RECORDED, RecordedEngine: ("close",)}.items():
        for name in names:
            record(kind, name)
    (folder / "watched").mkdir()
    cli = {
        "model": "echo",
        "port": 0,
        "front_ends": 1,
        "job_store": str(folder / "jobs"),
        "watch": str(folder / "watched"),
        "cache_dir": str(folder),
        "shutdown_delay_s": 0,
    }
    loaded = load({**cli, **settings}, {"INFERPOOL_CLUSTER_KEYS": "a-key-of-agents-01"}, folder)
    code = run(
        loaded.settings,
        make_engine=lambda _: RecordedEngine(),
        until_changed=partial(until_up, settings.get("front_ends", "1")),
    )
    sys.stdout.write(json.dumps({"code": code, "events": EVENTS}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), dict(each.split("=", 1) for each in sys.argv[2:]))
