"""The verb `batch`: predictions for whole folders and files."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.forkserver import ensure_running, set_forkserver_preload
from pathlib import Path
from typing import TYPE_CHECKING

from inferpool.service.batch.flags import SETTINGS
from inferpool.service.batch.inputs import RunLostError
from inferpool.service.batch.outputs import Journal, LineStream, files_of, format_of
from inferpool.service.batch.sources import BatchSource, digest_of, open_source
from inferpool.service.client.cli.access import access_of, parameters_of, url_of
from inferpool.service.client.usage import INTERRUPTED
from inferpool.service.errors import StartError
from inferpool.service.settings.names import FlagError

if TYPE_CHECKING:
    from inferpool.service.batch.report import BatchReport
    from inferpool.service.batch.run import BatchTarget
    from inferpool.service.settings.loader import LoadedSettings

_LOST = 1
"""Exit status if the model did not start, or was lost."""
_SOME_FAILED = 4
_TOO_MANY_FAILED = 5
_CHUNK = 8
_MAX_READERS = 4


def run(args: Namespace) -> int:
    """Compute all inputs; return the exit status.

    Raises:
        FlagError: The flags make no sense, or the inputs or the output cannot be used.
        SettingsError: The settings cannot be used.
    """
    _check(args)
    warnings.filterwarnings("ignore", module="PIL")  # about damaged pictures, amid the bar
    warnings.filterwarnings("ignore", message="This DataLoader")  # about many readers
    loaded = None if args.url is not None else _load(args)
    parameters = parameters_of(args.parameter)
    is_stream = args.output == "-"
    without = () if is_stream else files_of(args.output)
    source = open_source(args.input, column=args.column, without=without)
    format = format_of(args.output, args.format)
    with contextlib.ExitStack() as stack:
        output: Journal | LineStream
        if is_stream:
            output = LineStream(format)
        else:
            about = {"inputs": digest_of(source), **_about(args, loaded, parameters)}
            journal = Journal(
                args.output, format, about=about, resumes=args.resume, overwrites=args.overwrite
            )
            output = stack.enter_context(journal)
        return _run(args, source, output, partial(_target, args, loaded, parameters))


def _run(
    args: Namespace,
    source: BatchSource,
    output: Journal | LineStream,
    open_target: Callable[[], AbstractAsyncContextManager["BatchTarget"]],
) -> int:
    if args.readers != 0:
        _start_forkserver()
    from inferpool.service.batch.report import BatchReport

    report = BatchReport(sys.stderr, len(source), is_quiet=args.quiet)
    report.start()
    try:
        return _compute(args, source, output, open_target, report)
    finally:
        report.stop()


def _compute(
    args: Namespace,
    source: BatchSource,
    output: Journal | LineStream,
    open_target: Callable[[], AbstractAsyncContextManager["BatchTarget"]],
    report: "BatchReport",
) -> int:
    from inferpool.service.batch.run import BatchRun, TooManyErrorsError  # imports torch

    run = BatchRun(
        source,
        output,
        report,
        keeps_order=args.order == "kept",
        max_errors=args.max_errors,
    )
    missing = run.missing()
    readers = args.readers
    if readers is None:
        readers = min(_MAX_READERS, len(os.sched_getaffinity(0)))
    elapsed_s = 0.0

    async def compute() -> None:
        nonlocal elapsed_s
        async with open_target() as target:
            report.begin()
            began = time.monotonic()  # the model's start is not part of the rate
            try:
                await run.run(target, missing, num_readers=readers, chunk=_CHUNK)
            finally:
                elapsed_s = time.monotonic() - began

    status, reason = 0, ""
    try:
        run.check_errors()
        if not missing:
            report.begin()
        else:
            if args.url is None:
                report.wait_for_model()
            asyncio.run(compute())
        output.finish()
    except (StartError, RunLostError) as error:
        status, reason = _LOST, str(error)
    except TooManyErrorsError as error:
        status, reason = _TOO_MANY_FAILED, str(error)
    except KeyboardInterrupt:
        status = INTERRUPTED
    except SystemExit as stopped:  # SIGTERM or SIGHUP
        status = stopped.code if isinstance(stopped.code, int) else _LOST
    finally:
        report.stop()
    if not args.quiet:
        report.tell(elapsed_s)
    if reason:
        sys.stderr.write(f"inferpool batch: {reason}\n")
    if status and report.num_done and args.output != "-":
        raised = " and a larger --max-errors" if status == _TOO_MANY_FAILED else ""
        sys.stderr.write(f"inferpool batch: the same command with --resume{raised} goes on\n")
    return status or (_SOME_FAILED if report.num_failed else 0)


def _check(args: Namespace) -> None:
    if args.resume and args.output == "-":
        raise FlagError("--resume needs a file: give --output")
    for name in ("max_errors", "readers"):
        if (value := getattr(args, name)) is not None and value < 0:
            raise FlagError(f"--{name.replace('_', '-')}: must be 0 or more")
    if args.concurrency < 1 or not args.timeout_s > 0:
        raise FlagError("--concurrency and --timeout-s: must be more than 0")


def _load(args: Namespace) -> "LoadedSettings":
    from inferpool.service.settings.loader import load
    from inferpool.service.settings.unloadable import check_loadable

    flags = {
        name: getattr(args, name)
        for name in ("config", "model", *SETTINGS)
        if getattr(args, name) is not None
    }
    loaded = load(flags, os.environ, Path.cwd())
    sys.stderr.writelines(f"inferpool batch: {each}\n" for each in loaded.warnings)
    check_loadable(loaded.settings, loaded.origins)
    return loaded


def _about(
    args: Namespace, loaded: "LoadedSettings | None", parameters: Mapping[str, object]
) -> dict[str, str]:
    """Return the flags that decide the answers, for --resume to compare."""
    about = {"--parameter": json.dumps(parameters, sort_keys=True)}
    if loaded is None:
        return {**about, "--model": args.model or "none and --url"}
    model = loaded.settings.models[loaded.settings.default_model]
    return {
        **about,
        "--model": model.source,
        "--weights": model.weights,
        "--speed": model.speed,
        "--decode": model.decode,
        "options": json.dumps(model.options, sort_keys=True, default=str),
    }


@asynccontextmanager
async def _target(
    args: Namespace, loaded: "LoadedSettings | None", parameters: dict[str, object]
) -> "AsyncIterator[BatchTarget]":
    async with AsyncExitStack() as stack:
        if loaded is None:
            from inferpool.service.batch.remote import RemoteTarget
            from inferpool.service.client import AsyncClient

            stack.enter_context(warnings.catch_warnings(action="ignore"))  # texts stay texts
            key, verify = access_of(args)
            client = AsyncClient(
                url_of(args.url),
                key=key,
                timeout_s=args.timeout_s,
                max_concurrency=args.concurrency,
                verify=verify,
            )
            await stack.enter_async_context(client)
            yield RemoteTarget(
                client, room=args.concurrency, model=args.model, parameters=parameters
            )
            return
        from inferpool.service.batch.local import local_target
        from inferpool.service.settings.model_sources import modules_to_preload
        from inferpool.workers.host.local import guest_forkserver

        stack.enter_context(
            guest_forkserver(modules_to_preload(loaded.settings.sources(), Path.cwd()))
        )
        encoded = json.dumps(parameters).encode() if parameters else b""
        yield await stack.enter_async_context(local_target(loaded, encoded))


def _start_forkserver() -> None:
    """Start the readers' forkserver, so that it imports torch while this process does."""
    set_forkserver_preload(["torch", "inferpool.service.batch.reading"])
    resource_tracker.ensure_running()  # else the forkserver starts it, and it unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        ensure_running()  # it keeps the mask: on Ctrl-C this process ends the readers
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
