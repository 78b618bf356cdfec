"""The verb `agent`: offers the devices of this host to a front end, and runs workers for it."""

import asyncio
import logging
import multiprocessing
import os
import platform
import signal
import socket
import ssl
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop

from inferpool.models.attached import modules_of
from inferpool.service.api.wire.descriptors import raise_limit
from inferpool.service.cli.flags import CLUSTER_KEY_VARIABLE
from inferpool.service.cli.starting import CANNOT_START, NoRoomError, prepared
from inferpool.service.client.cli.access import key_of
from inferpool.service.settings.address import address_of
from inferpool.service.settings.keys import digest_of
from inferpool.service.settings.loader import secret_variables
from inferpool.service.settings.model_sources import DEFAULT_SOURCE
from inferpool.service.settings.names import FlagError
from inferpool.service.settings.settings import auto_arena_bytes
from inferpool.service.settings.tls import TlsError, TlsNames, mutual_context
from inferpool.service.signals import stop_signals
from inferpool.service.telemetry.logs import configure
from inferpool.service.telemetry.raw_output import RawOutput
from inferpool.service.telemetry.versions import version_of
from inferpool.workers.host.devices import Host, called, find_host, parse_devices
from inferpool.workers.host.gpu_watch import GpuWatch
from inferpool.workers.host.local import LocalEngine
from inferpool.workers.host.mps import DEFAULT_FOLDER
from inferpool.workers.remote.agent import Agent, Dialing
from inferpool.workers.remote.hosted import HostedWorkers
from inferpool.workers.remote.joining import Address, Dialer, make_instance
from inferpool.workers.remote.wire import HostFacts
from inferpool.workers.shared.arena import Arena
from inferpool.workers.shared.memory import SharedMemoryError

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 16 << 20
"""The largest body that front ends accept by default."""
_LEAST_ARENA_BYTES = 1 << 20
_NAMES = TlsNames(certificate="--certificate", key="--key", authority="--authority")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlan:
    """The work of an agent, from the command line."""

    addresses: Sequence[Address]
    key: bytes
    tls: ssl.SSLContext | None
    name: str
    host: Host
    arena_bytes: int
    cache_dir: str | None


def run(args: Namespace) -> int:
    """Work for front ends until a signal; return the exit status.

    Raises:
        FlagError: The flags make no sense.
    """
    plan = _plan_of(args)
    for name in secret_variables(os.environ):  # so that model code cannot read them there
        del os.environ[name]
    # CUDA reads this variable in the workers.
    os.environ.setdefault("CUDA_MPS_PIPE_DIRECTORY", DEFAULT_FOLDER)
    try:
        with prepared(args.log_format, modules_of([DEFAULT_SOURCE])) as raw:
            return _run(plan, args, raw)
    except NoRoomError as error:
        sys.stderr.write(f"inferpool: {error}\n")
        return CANNOT_START


def _plan_of(args: Namespace) -> AgentPlan:
    try:
        addresses = [address_of(each.strip()) for each in args.join.split(",")]
    except ValueError as error:
        raise FlagError(f"--join: {error}") from error
    key = key_of(args.key_file, os.environ, CLUSTER_KEY_VARIABLE)
    if not key:
        raise FlagError(
            f"the front end asks for a key: name a file of it in --key-file, or put it into "
            f"{CLUSTER_KEY_VARIABLE}"
        )
    if args.arena_bytes is not None and args.arena_bytes < _LEAST_ARENA_BYTES:
        raise FlagError(f"--arena-bytes: at least {_LEAST_ARENA_BYTES} are needed")
    return AgentPlan(
        addresses=addresses,
        key=digest_of(key.encode()),
        tls=_tls_of(args),
        name=args.name or socket.gethostname(),
        host=_devices_of(args.devices),
        arena_bytes=args.arena_bytes or auto_arena_bytes(_MAX_BODY_BYTES),
        cache_dir=_cache_of(args.cache_dir),
    )


def _run(plan: AgentPlan, args: Namespace, raw: RawOutput | None) -> int:
    logs = configure(args.log_format, args.log_level, raw.stderr if raw else None)
    if raw is not None:
        raw.start()
    raise_limit()
    try:
        arena = Arena(plan.arena_bytes)
    except SharedMemoryError as error:
        logger.critical("%s (--arena-bytes)", error)
        return CANNOT_START
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_work(plan, args, arena))
    finally:
        arena.close()
        for process in multiprocessing.active_children():
            process.kill()  # only a hurried end leaves any
        if raw is not None:
            raw.close()
        logs.close()


async def _work(plan: AgentPlan, args: Namespace, arena: Arena) -> int:
    host = plan.host
    logger.info("host %s offers %s", plan.name, ", ".join(host.describe()))
    if host.problem:
        logger.warning("%s", host.problem)
    watch = GpuWatch(host.gpus, host.accelerator.library)
    facts = HostFacts(
        name=plan.name,
        instance=make_instance(),
        pid=os.getpid(),
        version=version_of(),
        torch=version_of("torch"),
        python=platform.python_version(),
        devices=host,
    )
    agent = Agent(
        addresses=plan.addresses,
        dialer=Dialer(plan.key, plan.tls, facts, insecure=args.insecure),
        arena=arena,
        workers=HostedWorkers(LocalEngine(arena), plan.cache_dir),
        gpus=watch.vitals,
        grace_s=args.drain_timeout_s,
        dialing=Dialing(once=args.once),
    )
    stop = _Stop(agent)
    for signum in stop_signals():
        asyncio.get_running_loop().add_signal_handler(signum, stop, signum)
    watch.start()
    try:
        return await agent.run()
    finally:
        watch.stop()
        logger.info("stopped")


class _Stop:
    """Stops an agent: it may finish after the first signal, and ends at once at the second."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._is_stopping = False

    def __call__(self, signum: signal.Signals) -> None:
        how = "at once" if self._is_stopping else "once the workers have finished what they hold"
        logger.info("ending %s (%s)", how, signum.name)
        self._agent.stop(at_once=self._is_stopping)
        self._is_stopping = True


def _tls_of(args: Namespace) -> ssl.SSLContext | None:
    if args.certificate is None:
        if args.key is not None or args.authority is not None:
            raise FlagError("--key and --authority need --certificate: TLS has one on both sides")
        return None
    if args.authority is None:
        raise FlagError("--certificate needs --authority, which has signed the front end's")
    try:
        return mutual_context(args.certificate, args.key, args.authority, _NAMES, is_server=False)
    except TlsError as error:
        raise FlagError(str(error)) from error


def _devices_of(text: str) -> Host:
    """Return the devices of this host that a text names.

    Raises:
        FlagError: One of them is not there.
    """
    order = os.environ.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    try:
        names = parse_devices(text)
    except ValueError as error:
        raise FlagError(f"--devices: {text!r} {error}") from error
    host = find_host(os.environ.get("CUDA_VISIBLE_DEVICES"), order)
    if names == ("auto",):
        return host
    if names == ("cpu",):
        return replace(host, gpus=(), problem="")
    chosen = []
    for name in names:
        if name == host.accelerator.kind:
            found = list(host.gpus)
        else:
            found = called(host.gpus, name.rpartition(":")[2])
        if not found:
            there = ", ".join(map(str, host.gpus)) or "none"
            raise FlagError(f"--devices: {name} is none of the GPUs of this host: {there}")
        chosen += found
    return replace(host, gpus=tuple(dict.fromkeys(chosen)))


def _cache_of(text: str | None) -> str | None:
    """Return the folder of measured speeds; None for none."""
    if text is None:
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        text = f"{home}/inferpool"
    if text.lower() == "none":
        return None
    try:
        folder = Path(text).expanduser().absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # it is not writable, or the user has no home
        return None
    return str(folder)
