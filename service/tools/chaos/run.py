"""A run of `inferpool chaos`: learn the right answers, ask in peace, ask under faults, compare."""

import asyncio
import contextlib
import itertools
import json
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop

from inferpool.models.torchserve.archive import is_archive
from inferpool.service.client.health import ServiceHealth
from inferpool.service.settings.loader import LoadedSettings, Row
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.names import Key
from inferpool.service.tools.chaos.faults import POISONS, Faults
from inferpool.service.tools.chaos.greed import Greed, SlowUploads, UnreadConnections
from inferpool.service.tools.chaos.hosts import HostFaults
from inferpool.service.tools.chaos.load import ChaosTally, NumberedLoad
from inferpool.service.tools.chaos.plan import (
    HOST_STRIKES,
    PLURALS,
    SCARCE,
    ChaosPlan,
    Fault,
    shown_share,
)
from inferpool.service.tools.chaos.protocols import opener
from inferpool.service.tools.chaos.questions import (
    EchoQuestion,
    Question,
    indistinct,
    learn,
)
from inferpool.service.tools.chaos.report import ChaosReport
from inferpool.service.tools.chaos.resources import (
    Holdings,
    LedgerReading,
    holdings_of,
    read_ledger,
)
from inferpool.service.tools.chaos.servers import SERVER_FORMS, VERTEX_ROUTE
from inferpool.service.tools.chaos.stores import StoreFaults
from inferpool.service.tools.chaos.swaps import Swaps
from inferpool.service.tools.chaos.texts import TEXT_FORMS
from inferpool.service.tools.chaos.watch import Watch
from inferpool.service.tools.trial import inputs
from inferpool.service.tools.trial.agents import TrialAgents
from inferpool.service.tools.trial.connection import (
    NoAnswerError,
    TrialError,
    connected,
)
from inferpool.service.tools.trial.screen import Interruption, Screen
from inferpool.service.tools.trial.service import TrialService, free_port, rows_of

EXIT_KEPT = 0
EXIT_BROKEN = 1
EXIT_UNTESTED = 3
"""No service started, or no input has a known answer."""
EXIT_INTERRUPTED = 130
"""No promise was broken until then: 128 and the number of SIGINT, as in shells."""
_NUM_INPUTS = 32
_QUIET_S = 2.0
_MAX_START_S = 900.0
_SETTLE_S = 60.0
"""How long all workers may take to be back at the end."""
_SAME_S = 60.0
"""How long the service may take to close its side of our connections, and those that its fronts
keep to the main process: 50 s without a call."""
_TICK_S = 0.1
BATCH_TIMEOUT_S = 5.0
"""Time after which a stopped worker is found, unless the user has set another."""
POISONABLE = "inferpool.models.sources.poisonable:Poisonable"


def run(loaded: LoadedSettings, plan: ChaosPlan) -> int:
    """Test the promise on a service with these settings; returns the exit status."""
    try:
        key, *own_keys = (secrets.token_urlsafe(24) for _ in range(3))
        grpc_port = free_port() if plan.protocol == "grpc" else 0
        if not plan.every_s["greed"] and not plan.every_s["upload"]:
            own_keys = []  # then any client may ask, as usual
        with (
            TemporaryDirectory() as folder,
            TrialAgents(plan.hosts) as agents,
            TrialService(
                [*agents.rows, *_rows_with(loaded, plan, grpc_port, Path(folder))],
                admin_key=key,
                predict_keys=own_keys,
                keeps_jobs=plan.every_s["store"] > 0 or plan.every_s["upload"] > 0,
            ) as subject,
        ):
            swaps = Swaps(address=subject.address, models=list(loaded.settings.models), key=key)
            chaos_run = _ChaosRun(subject, agents, loaded, plan, swaps, own_keys, grpc_port)
            report = uvloop.run(chaos_run.run())
    except KeyboardInterrupt:
        sys.stderr.write("inferpool chaos: ended at once, without a report\n")
        return EXIT_INTERRUPTED
    except TrialError as error:
        sys.stderr.write(f"inferpool chaos: {error}\n")
        return EXIT_UNTESTED
    report.write(sys.stderr if plan.is_json else sys.stdout)
    if plan.is_json:
        sys.stdout.write(json.dumps(report.as_dict(), indent=1) + "\n")
    if report.problems():
        return EXIT_BROKEN
    return EXIT_INTERRUPTED if report.is_interrupted else EXIT_KEPT


def _rows_with(
    loaded: LoadedSettings, plan: ChaosPlan, grpc_port: int, folder: Path
) -> Sequence[Row]:
    """Return the settings of the service, with those that the protocol of the run needs."""
    can_be_poisoned = any(plan.every_s[fault] for fault in POISONS)
    own: Sequence[Row] = []
    if grpc_port:
        own = [(("grpc_port",), grpc_port, "chaos")]
    elif plan.protocol == "tei":
        own = [(("tei",), True, "chaos")]
    elif plan.protocol in SERVER_FORMS:
        own = rows_of_server(plan.protocol, folder)
    names = [row[0] for row in own]
    rows = rows_for(loaded, can_be_poisoned=can_be_poisoned)
    return [*own, *(row for row in rows if row[0] not in names)]


class _ChaosRun:
    def __init__(
        self,
        subject: TrialService,
        agents: TrialAgents,
        loaded: LoadedSettings,
        plan: ChaosPlan,
        swaps: Swaps,
        keys: Sequence[str],
        grpc_port: int,
    ) -> None:
        self._keys = keys
        """Keys of the watched clients and of the greedy ones, if there are any."""
        self._grpc_port = grpc_port
        self._subject = subject
        self._agents = agents
        self._swaps = swaps
        self._settings = loaded.settings
        self._plan = plan
        self._numbers = itertools.count()
        self._questions: list[Question] = []
        self._notes: list[str] = []

    async def run(self) -> ChaosReport:
        self._interruption = Interruption(signal.SIGINT, signal.SIGTERM)
        with Screen(sys.stderr) as screen:
            screen.begin("starting the service")
            await self._subject.until_ready(_MAX_START_S)
            await self._agents.until_ready(self._subject, _MAX_START_S)
            watch = Watch(self._subject.address, self._subject.key)
            health = await watch.look()
            archives = archives_among(self._settings.models)
            self._open = opener(self._plan.protocol, health, self._grpc_port, archives)
            screen.begin("learning the right answers")
            await self._learn(health)
            screen.begin("asking undisturbed")
            first = await self._ledger()
            quiet = ChaosTally()
            until = time.monotonic() + _QUIET_S
            await self._load(quiet, lambda _: time.monotonic() > until)
            stores = await self._stores()
            health = await watch.look()  # decoders start after their worker
            watch.close()  # it connects again when it needs to
            before = await self._settled_holdings(None)
            screen.begin(f"asking under faults, {self._plan.text}")
            chaos = ChaosTally()
            faults = self._faults(watch, chaos, health, stores)
            seconds, is_complete = await self._disturb(watch, faults, chaos, screen)
            screen.begin("looking at what is left")
            grace_s = _SETTLE_S if is_complete else 0.0
            is_complete = await watch.settle(grace_s) and is_complete
            watch.close()
            after = await self._settled_holdings(before) if self._subject.is_running else None
            last = await self._ledger()
            exit_code, left_over = await self._subject.stop()
            complaints, left_of_agents = await self._agents.stop()
        return ChaosReport(
            plan=self._plan,
            models=[f"{name} ({m.source})" for name, m in self._settings.models.items()],
            workers=len(health.workers),
            seconds=seconds,
            is_complete=is_complete,
            is_interrupted=self._interruption.has_come,
            quiet=quiet,
            chaos=chaos,
            faults={kind: faults.counts[kind] for kind in self._plan.every_s if faults.does(kind)},
            poisonings=faults.poisonings,
            greedy=self._greed.tally,
            stores=stores,
            swaps=self._swaps,
            recoveries=watch.recoveries,
            ledger=last.since(first) if first and last else None,
            before=before,
            after=after,
            exit_code=exit_code,
            left_over=left_over + left_of_agents,
            notes=self._notes,
            agent_complaints=[*faults.hosts.failed, *complaints],
        )

    async def _learn(self, health: ServiceHealth) -> None:
        plan, questions, notes = self._plan, self._questions, self._notes
        try:
            opened = await self._open(self._subject.address, lambda: None)
            with contextlib.closing(opened) as connection:
                for model in health.models:
                    path = f"/predict/{model.name}"
                    is_echo = self._settings.models[model.name].source == "echo"
                    if is_echo and not plan.inputs and plan.protocol not in TEXT_FORMS:
                        questions.append(EchoQuestion(path, plan.seed))
                        continue
                    given = (
                        inputs.read_inputs(plan.inputs)
                        if plan.inputs
                        else inputs.made_up(model, plan.seed, _NUM_INPUTS)
                    )
                    known = [
                        await learn(connection, path, each, plan.tolerance, self._subject.key)
                        for each in given
                    ]
                    questions += known
                    if pairs := indistinct(known, plan.tolerance):
                        names = " and ".join(pairs[0])
                        notes.append(
                            f"{model.name}: {len(pairs)} pairs of inputs have the same answer, "
                            f"such as {names}: a swap of those would not be seen"
                        )
        except NoAnswerError as error:
            raise TrialError(
                f"the service does not answer, with nothing done to it: {error}"
                f"{self._subject.log_tail()}"
            ) from error
        if not self._poisonable and any(plan.every_s[fault] for fault in POISONS):
            notes.append("no input is a single instance, so none was poisoned")

    @property
    def _poisonable(self) -> Sequence[Question]:
        return [question for question in self._questions if question.num_instances == 1]

    async def _load(self, tally: ChaosTally, is_over: Callable[[ChaosTally], bool]) -> None:
        load = NumberedLoad(
            address=self._subject.address,
            questions=self._questions,
            tally=tally,
            timeout_s=self._settings.default_timeout_s,
            is_over=lambda: self._interruption.has_come or is_over(tally),
            key=self._subject.key,
            open=self._open,
        )
        try:
            await load.run(self._numbers, self._plan.clients)
        except* OSError as error:
            tally.lost += tally.num_sent - tally.num_settled
            tally.note(f"the service is gone: {error.exceptions[0]}{self._subject.log_tail()}")

    async def _stores(self) -> StoreFaults:
        stores = StoreFaults(
            address=self._subject.address,
            folder=self._subject.job_store,
            questions=self._questions,
            key=self._subject.key,
        )
        if stores.folder is not None:
            with contextlib.suppress(OSError, NoAnswerError):
                await stores.compute()  # so that the store is open
        return stores

    def _faults(
        self,
        watch: Watch,
        tally: ChaosTally,
        health: ServiceHealth,
        stores: StoreFaults,
    ) -> Faults:
        every_s = dict(self._plan.every_s)
        greedy_key = self._keys[-1] if self._keys else ""
        address = self._subject.address
        uploads = SlowUploads(address=address, stores=stores, key=greedy_key)
        self._greed = Greed(
            address=address,
            questions=self._questions,
            key=greedy_key,
            num_clients=self._plan.clients,
            timeout_s=self._settings.default_timeout_s,
            open=self._open,
        )
        if not self._poisonable:
            every_s |= dict.fromkeys(POISONS, 0.0)
        if health.forkserver is None:  # this host has none
            every_s["forkserver"] = every_s["burst"] = 0.0
        if not any(worker.decoders for worker in health.workers):
            every_s["decoder"] = 0.0
        return Faults(
            address=address,
            watch=watch,
            tally=tally,
            questions=self._poisonable,
            seed=self._plan.seed,
            every_s=every_s,
            timeout_s=self._settings.default_timeout_s,
            # Each version has a quarantine of its own.
            keeps_quarantine=self._settings.quarantine_s > 0 and not every_s["swap"],
            hosts=HostFaults(watch=watch, agents=self._agents.agents, seed=self._plan.seed),
            acts={
                "swap": self._swaps.swap,
                "unread": UnreadConnections(address=address).open,
                "greed": self._greed.ask,
                "store": stores.lose,
                "upload": uploads.hold,
            },
            key=self._subject.key,
            open=self._open,
        )

    async def _disturb(
        self, watch: Watch, faults: Faults, tally: ChaosTally, screen: Screen
    ) -> tuple[float, bool]:
        """Load the service under faults; return for how long, and whether to the end."""
        plan = self._plan
        began = time.monotonic()
        enough: dict[Fault, int] = {"kill": plan.kills, "host": HOST_STRIKES}
        enough |= dict.fromkeys(SCARCE, 1)

        def shares(tally: ChaosTally) -> list[float]:
            """Return the done share of each thing that the end waits for."""
            if plan.seconds is not None:
                return [(time.monotonic() - began) / plan.seconds if plan.seconds else 1.0]
            parts = [tally.num_sent / plan.requests]
            for fault, least in enough.items():
                if faults.does(fault):
                    parts.append(faults.counts[fault] / least)
            return parts

        shown = [kind for kind in PLURALS if faults.does(kind)]

        async def tell() -> None:
            while True:
                figures = (
                    f"{tally.num_sent:,} sent, {tally.right:,} right, {tally.wrong} wrong, "
                    f"{tally.lost} lost, {tally.duplicated} duplicated; "
                    f"{', '.join(f'{faults.counts[kind]} {PLURALS[kind]}' for kind in shown)}"
                )
                screen.show(shown_share(shares(tally)), figures)
                await asyncio.sleep(_TICK_S)

        watching, telling = asyncio.create_task(watch.run()), asyncio.create_task(tell())
        harming = asyncio.create_task(faults.run())
        tasks = (harming, watching, telling)

        def is_over(tally: ChaosTally) -> bool:
            return min(shares(tally)) >= 1 or any(
                task.done() for task in tasks
            )  # done: it has failed

        try:
            await self._load(tally, is_over)
            seconds = time.monotonic() - began
            is_complete = not self._interruption.has_come and self._subject.is_running
            await _end(harming)  # finishes the poisons
            while watch.pending and self._subject.is_running and not self._interruption.has_come:
                if time.monotonic() - began - seconds > _SETTLE_S:
                    break
                await asyncio.sleep(_TICK_S)
        finally:
            for task in tasks:
                await _end(task)
        return seconds, is_complete

    async def _settled_holdings(self, before: Holdings | None) -> Holdings:
        """Return what the service holds once it has noticed that our connections are closed."""
        until = time.monotonic() + _SAME_S
        last: Holdings | None = None
        while True:
            family = [*self._subject.family(), *self._agents.family()]
            now = holdings_of(self._subject.pid, family, self._subject.job_store)
            is_settled = (
                last is not None
                and now.descriptors == last.descriptors
                and (before is None or now.descriptors <= before.descriptors)
            )
            if is_settled or time.monotonic() > until:
                return now
            last = now
            await asyncio.sleep(2 * _TICK_S)

    async def _ledger(self) -> LedgerReading | None:
        with contextlib.suppress(OSError, NoAnswerError):
            async with connected(self._subject.address, key=self._subject.key) as connection:
                return await read_ledger(connection)
        return None


async def _end(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def rows_for(loaded: LoadedSettings, *, can_be_poisoned: bool) -> list[Row]:
    """Return the user's settings as rows, with the changes that the test needs.

    `can_be_poisoned` wraps the models so that an input can kill their worker.
    """
    every = rows_of(loaded)
    rows = [row for row in every if row[0][0] != "models"]
    for name, model in loaded.settings.models.items():
        own = [row for row in every if row[0][:2] == ("models", name)]
        rows += _wrapped(own, name, dict(model.options)) if can_be_poisoned else own
    return [_changed(*row) for row in rows]


def _changed(key: Key, value: object, origin: str) -> Row:
    if key == ("speed_search",):
        return key, False, "chaos"  # we cause neither its process nor its new workers
    if key[-1] == "batch_timeout_s" and origin == "default":
        return key, BATCH_TIMEOUT_S, "chaos"
    return key, value, origin


def _wrapped(rows: Sequence[Row], name: str, options: Mapping[str, object]) -> Iterator[Row]:
    place = ("models", name)
    inner: dict[str, object] = {"options": options}
    for key, value, origin in rows:
        if key[2] in ("source", "weights"):
            inner[key[2]] = value
            outer = POISONABLE if key[2] == "source" else "DEFAULT"
            yield key, outer, "chaos"
        elif key[2] != "options":
            yield key, value, origin
    for option, value in inner.items():
        yield (*place, "options", option), value, "chaos"


def archives_among(models: Mapping[str, ModelSettings]) -> list[str]:
    """Return the names of the models that are archives of TorchServe's."""
    sources = {name: model.source.removeprefix("torchserve:") for name, model in models.items()}
    return [name for name, source in sources.items() if is_archive(Path(source))]


def rows_of_server(protocol: str, folder: Path) -> list[Row]:
    """Return the settings with which a service speaks a protocol; a file of them is in `folder`."""
    if protocol == "sagemaker":
        return [(("sagemaker",), True, "chaos")]
    if protocol == "vertex":
        return [(("vertex_predict_route",), VERTEX_ROUTE, "chaos")]
    file = folder / "config.properties"
    names = ("management_address", "metrics_address")
    lines = [f"{name}=http://127.0.0.1:{free_port()}\n" for name in names]
    file.write_text("".join(lines), encoding="utf-8")
    return [(("torchserve",), str(file), "chaos")]
