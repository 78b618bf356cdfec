"""The verb `batch`: predictions for whole folders and files."""

import asyncio
import contextlib
import json
import os
import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from multiprocessing.forkserver import ensure_running, set_forkserver_preload
from pathlib import Path
from typing import TYPE_CHECKING

from inferpool.service.batch.flags import KEY_VARIABLE, SETTINGS
from inferpool.service.batch.inputs import RunLostError
from inferpool.service.batch.outputs import Journal, LineStream, format_of
from inferpool.service.batch.sources import open_source
from inferpool.service.errors import StartError
from inferpool.service.settings.address import key_of, url_of
from inferpool.service.settings.names import FlagError

if TYPE_CHECKING:
    from inferpool.service.batch.target import BatchTarget

_LOST = 1
"""Exit status if the model could not be started, or was lost."""
_SOME_FAILED = 4
_TOO_MANY_FAILED = 5
_CHUNK = 8


def run(args: Namespace) -> int:
    """Compute all inputs; return the exit status.

    Raises:
        FlagError: The flags make no sense, or the inputs or the output cannot be used.
        SettingsError: The settings cannot be used.
    """
    if args.resume and args.output == "-":
        raise FlagError("--resume needs a file: give --output")
    for name in ("max_errors", "readers"):
        if (value := getattr(args, name)) is not None and value < 0:
            raise FlagError(f"--{name.replace('_', '-')}: must be 0 or more")
    if args.concurrency < 1 or not args.timeout_s > 0:
        raise FlagError("--concurrency and --timeout-s: must be more than 0")
    parameters = _parameters(args.parameter)
    source = open_source(args.input, column=args.column)
    format = format_of(args.output, args.format)
    with contextlib.ExitStack() as stack:
        output: Journal | LineStream
        if args.output == "-":
            output = LineStream(format)
        else:
            journal = Journal(args.output, format, resumes=args.resume, overwrites=args.overwrite)
            output = stack.enter_context(journal)
        if args.readers != 0:
            _start_forkserver()
        from inferpool.service.batch.report import BatchReport
        from inferpool.service.batch.run import BatchRun, Stopwatch, TooManyErrorsError

        report = BatchReport(sys.stderr, len(source), is_quiet=args.quiet)
        run = BatchRun(
            source,
            output,
            report,
            keeps_order=args.order == "kept",
            max_errors=args.max_errors,
        )
        missing = run.missing()
        watch = Stopwatch()
        status = 0

        async def compute() -> None:
            nonlocal watch
            async with _target(args, parameters) as target:
                watch = Stopwatch()  # the model's start is not part of the rate
                report.start()
                readers = min(4, len(os.sched_getaffinity(0))) if args.readers is None else None
                await run.run(
                    target,
                    missing,
                    num_readers=args.readers if readers is None else readers,
                    chunk=_CHUNK,
                )

        try:
            if missing:
                asyncio.run(compute())
            output.finish()
        except (StartError, RunLostError) as error:
            report.stop()
            sys.stderr.write(f"inferpool batch: {error}\n")
            status = _LOST
        except TooManyErrorsError as error:
            report.stop()
            sys.stderr.write(f"inferpool batch: {error}\n")
            status = _TOO_MANY_FAILED
        finally:
            report.stop()
        if not args.quiet:
            report.tell(watch.elapsed_s)
        if status and args.output != "-":
            sys.stderr.write("inferpool batch: the same command with --resume goes on\n")
        return status or (_SOME_FAILED if report.num_failed else 0)


@asynccontextmanager
async def _target(args: Namespace, parameters: dict[str, object]) -> "AsyncIterator[BatchTarget]":
    async with AsyncExitStack() as stack:
        if args.url is not None:
            from inferpool.service.batch.remote import RemoteTarget
            from inferpool.service.client import AsyncClient

            client = AsyncClient(
                url_of(args.url),
                key=key_of(args.key_file, os.environ, KEY_VARIABLE),
                timeout_s=args.timeout_s,
                max_concurrency=args.concurrency,
                verify=not args.insecure and (str(args.ca_file) if args.ca_file else True),
            )
            await stack.enter_async_context(client)
            yield RemoteTarget(
                client, room=args.concurrency, model=args.model, parameters=parameters
            )
            return
        from inferpool.service.batch.local import local_target
        from inferpool.service.settings.loader import load
        from inferpool.service.settings.sources import modules_to_preload
        from inferpool.workers.host.local import guest_forkserver

        flags = {name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None}
        loaded = load(flags, os.environ, Path.cwd())
        stack.enter_context(
            guest_forkserver(modules_to_preload(loaded.settings.sources(), Path.cwd()))
        )
        encoded = json.dumps(parameters).encode() if parameters else b""
        yield await stack.enter_async_context(local_target(loaded, encoded))


def _start_forkserver() -> None:
    """Let the forkserver of the readers import torch while this process does, and the model."""
    set_forkserver_preload(["torch", "inferpool.service.batch.reading"])
    ensure_running()


def _parameters(texts: Sequence[str]) -> dict[str, object]:
    parameters: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise FlagError(f"--parameter: {text!r} is not NAME=VALUE")
        try:
            parameters[name] = json.loads(value)
        except ValueError:
            parameters[name] = value
    return parameters
