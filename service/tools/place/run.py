"""Runs `inferpool place`: a process that uses Ray, and this one, which restarts it.

Ray terminates the process of a driver if its GCS is gone, so the driver is a child of ours. Agents
go on meanwhile: their actors are detached.
"""

import contextlib
import importlib.util
import logging
import multiprocessing
import os
import signal
import ssl
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from multiprocessing import connection
from types import FrameType

from inferpool.service.client.cli.access import tls_context
from inferpool.service.settings.names import FlagError
from inferpool.service.signals import stop_signals
from inferpool.service.telemetry.logs import configure
from inferpool.service.tools.place.load import FrontLoad, LoadError
from inferpool.service.tools.place.placer import Placer
from inferpool.service.tools.place.plan import PlacePlan, plan_of
from inferpool.service.tools.place.ray_nodes import NoRayError, RayNodes, VersionsError, versions
from inferpool.service.tools.place.scaling import Scaling
from inferpool.workers.shared.backoff import Backoff
from inferpool.workers.shared.guard import die_with_parent

logger = logging.getLogger(__name__)

NOT_INSTALLED = 1
HOPELESS = 3
_AGAIN = 4
"""Exit status of the driver if a later try may succeed."""
_STEP_S = 1.0
_LOOK_S = 5.0
"""Between requests to the front end."""
_MIN_PAUSE_S = 1.0
_MAX_PAUSE_S = 30.0
_STEADY_S = 60.0
_END_S = 15.0
"""How long the driver may take to end."""


def run(args: Namespace) -> int:
    """Place agents until a signal to stop; return the exit status.

    Raises:
        FlagError: The flags make no sense.
    """
    plan = plan_of(args, os.environ)
    try:
        tls_context(plan.verify)
    except (OSError, ssl.SSLError) as error:
        raise FlagError(f"--ca-file: {args.ca_file}: {error}") from error
    if importlib.util.find_spec("ray") is None:
        sys.stderr.write(
            "inferpool place: ray is not installed here: `pip install '.[ray]'` in the clone does\n"
        )
        return NOT_INSTALLED
    logs = configure()
    try:
        return supervise(plan)
    finally:
        logs.close()


def supervise(plan: PlacePlan) -> int:
    """Run drivers, one after the other, until a signal comes or one reports the end."""
    pauses = Backoff(_MIN_PAUSE_S, _MAX_PAUSE_S)
    with _wakeup() as woken:
        while True:
            began = time.monotonic()
            status = _run_driver(plan, woken)
            if status is None or status == 0:
                return 0
            if status == HOPELESS:
                return 1
            if time.monotonic() - began > _STEADY_S:
                pauses.reset()
            if status != _AGAIN:
                logger.warning(
                    "the process that speaks to Ray has ended (%s), as it does when the head is "
                    "gone. Agents go on while their nodes do",
                    f"signal {-status}" if status < 0 else f"status {status}",
                )
            pause_s = pauses.next_s()
            logger.info("trying again in %.0f s", pause_s)
            if connection.wait([woken], pause_s):
                return 0


def _run_driver(plan: PlacePlan, woken: int) -> int | None:
    """Return the exit status of a driver; None if a signal has ended it."""
    context = multiprocessing.get_context("spawn")
    driver = context.Process(target=drive, args=(plan, os.getpid()), name="driver")
    driver.start()
    try:
        ready = connection.wait([driver.sentinel, woken])
        if woken in ready:
            driver.terminate()
            driver.join(_END_S)
            return None
        driver.join()
        return driver.exitcode
    finally:
        if driver.is_alive():
            driver.kill()
        driver.join()
        driver.close()


def drive(plan: PlacePlan, parent_pid: int) -> None:
    """Place agents until a signal comes, or Ray is gone. The main function of the driver."""
    die_with_parent(parent_pid)
    logs = configure()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Ray prints the last lines of lost raylets
    cluster = RayNodes(plan.address, plan.namespace, plan.cpus_per_host, plan.gpus_per_host)
    status = 0
    with _wakeup() as woken:
        try:
            cluster.connect()
            logger.info("connected to Ray at %s (%s)", plan.address, versions())
            _place(plan, cluster, woken)
        except VersionsError as error:
            logger.error("%s", error)
            status = HOPELESS
        except NoRayError as error:
            logger.warning("%s", error)
            status = _AGAIN
        finally:
            logs.close()
    # Without Ray's exit handlers, which wait for a GCS that may be gone.
    os._exit(status)


def _place(plan: PlacePlan, cluster: RayNodes, woken: int) -> None:
    """Run steps until a signal comes; with `--stop`, until no agent is left."""
    placer = Placer(cluster, plan.arguments, plan.environ, plan.drain_timeout_s)
    placer.survey(time.monotonic())
    decider = _Decider(plan, placer.num_seats)
    while True:
        now = time.monotonic()
        placer.step(now, *decider.decide(now))
        if plan.stop and placer.num_seats == 0:
            logger.info("no agent is left")
            return
        if connection.wait([woken], _STEP_S):
            return


class _Decider:
    """Decides how many hosts there should be."""

    def __init__(self, plan: PlacePlan, num_hosts: int) -> None:
        """Store the plan, and the number of hosts that have agents."""
        self._plan = plan
        most = plan.min_hosts if plan.max_hosts is None else plan.max_hosts
        self._scaling = Scaling(num_hosts, min_hosts=plan.min_hosts, max_hosts=most)
        self._load = FrontLoad(
            plan.front_end or "",
            plan.metrics_key,
            tls_context(plan.verify),
            plan.objective_p99_ms / 1000,
        )
        self._next_look = 0.0
        self._trouble = ""

    def decide(self, now: float) -> tuple[int | None, int]:
        """Return the wanted hosts (None for all there are), and how many to request from Ray."""
        if self._plan.stop:
            return 0, 0
        if not self._plan.front_end:
            return self._plan.max_hosts, self._plan.min_hosts
        if now >= self._next_look:
            self._next_look = now + _LOOK_S
            self._look(now)
        return self._scaling.wanted, self._scaling.wanted

    def _look(self, now: float) -> None:
        before = self._scaling.wanted
        try:
            demand = self._load.read(now)
        except LoadError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                logger.warning("as many hosts as before, since %s", error)
            return
        self._trouble = ""
        if demand is not None and self._scaling.decide(now, demand) != before:
            wanted = self._scaling.wanted
            logger.info("%d hosts are wanted, not %d: %s", wanted, before, self._scaling.reason)


@contextlib.contextmanager
def _wakeup() -> Iterator[int]:
    """Yield a descriptor that is readable once a signal to stop has come."""
    woken, waker = os.pipe()
    os.set_blocking(waker, False)

    def wake(_: int, __: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(waker, b"x")

    before = {number: signal.signal(number, wake) for number in stop_signals()}
    try:
        yield woken
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(woken)
        os.close(waker)
