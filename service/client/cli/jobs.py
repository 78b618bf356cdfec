"""The verb `jobs`: submits jobs to a service, and shows their results."""

import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, TextIO

from ..contents import content_in
from ..errors import (
    ConnectError,
    DeadlineExceededError,
    ForbiddenError,
    InferpoolError,
    NotFoundError,
    UnauthorizedError,
)
from ..jobs.documents import JobInfo
from ..jobs.handles import Job
from ..sync_client import Client
from ..texts import moment, table
from ..usage import COMMAND, FAILED, INTERRUPTED, FlagError
from .access import access_of, check_is_file, lost_text, parameters_of, retry_printer, url_of
from .flags import PREDICT_KEY_VARIABLE

if TYPE_CHECKING:
    from rich.progress import Progress

_LATE = 3
"""Exit status if the waiting time ended first."""
_SOME_FAILED = 4
_STDIN = "-"
_WHOLE = (".jsonl", ".ndjson", ".tar")
"""Endings of files that hold all inputs of a job."""
_TELL_S = 10.0
"""Pause between lines about a job's progress, if there is no terminal."""


def run(args: Namespace) -> int:
    """Run the command; return the exit status.

    Raises:
        FlagError: The flags make no sense.
    """
    for name, least in (("limit", 1), ("first", 0)):
        if getattr(args, name, least) < least:
            raise FlagError(f"--{name}: must be at least {least}")
    if (timeout_s := getattr(args, "timeout_s", None)) is not None and not timeout_s > 0:
        raise FlagError("--timeout-s: must be more than 0")
    url = url_of(args.url)
    key, verify = access_of(args)
    with Client(url, key=key, verify=verify, on_retry=retry_printer("jobs", "")) as client:
        try:
            return _do(client, args)
        except InferpoolError as error:
            _say(error)
            if isinstance(error, ConnectError):
                sys.stderr.write(lost_text("jobs", url))
            return _LATE if _is_late(error) else FAILED


def _do(client: Client, args: Namespace) -> int:
    match args.what:
        case "submit":
            return _submit(client, args)
        case "list":
            return _list(client, args)
        case "show":
            return _show(client.job(args.id).info, args)
        case "result":
            return _print_result(client.job(args.id), args)
        case "wait":
            return _wait(client, args.id, args.timeout_s, sys.stdout)
        case "cancel":
            return max([_end(client, id, deletes=False) for id in args.id])
    return max([_end(client, id, deletes=True) for id in args.id])


def _submit(client: Client, args: Namespace) -> int:
    with _inputs_of(args.inputs) as inputs:
        job = client.submit(
            inputs,
            model=args.model,
            parameters=parameters_of(args.parameter),
            priority=args.priority,
            webhook=args.webhook,
            id=args.id,
        )
    (sys.stderr if args.result else sys.stdout).write(f"{job.id}\n")
    sys.stdout.flush()
    if not (args.wait or args.result):
        return 0
    status = _wait(client, [job.id], args.timeout_s, sys.stderr)
    if args.result and status != INTERRUPTED:
        _write_lines(job, sys.stdout.buffer)
    return status


@contextlib.contextmanager
def _inputs_of(names: Sequence[str]) -> Iterator[object]:
    """Return the inputs to submit: a file that is a whole job, a file, or several files."""
    paths = [Path(name) for name in names]
    for name, path in zip(names, paths, strict=True):
        check_is_file(name)
        if os.path.isdir(path):  # it never raises
            raise FlagError(f"{name} is a folder; name its files, such as {name.rstrip('/')}/*")
        if len(names) > 1 and (name == _STDIN or path.suffix.lower() in _WHOLE):
            raise FlagError(f"{name} is a whole job: submit it alone")
    if names == [_STDIN]:
        with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
            file.flush()
            yield Path(file.name)
        return
    yield paths[0] if len(paths) == 1 else paths


def _list(client: Client, args: Namespace) -> int:
    found = [job.info for job in client.jobs(states=args.state, limit=args.limit + 1)]
    shown = found[: args.limit]
    if args.json:
        sys.stdout.writelines(f"{json.dumps(each.document)}\n" for each in shown)
    else:
        rows = [("ID", "STATE", "MODEL", "DONE", "FAILED", "CREATED")]
        for each in shown:
            done = f"{each.num_done} of {each.num_instances}"
            created = moment(each.created_at)
            rows.append((each.id, each.state, each.model, done, str(each.num_failed), created))
        sys.stdout.write(table(rows))
    if len(found) > len(shown):
        sys.stderr.write(f"{COMMAND} jobs: there are more; --limit N lists them\n")
    return 0


def _show(info: JobInfo, args: Namespace) -> int:
    if args.json:
        sys.stdout.write(f"{json.dumps(info.document)}\n")
        return 0
    versions = ", ".join(map(str, info.versions))
    facts = {
        "id": info.id,
        "state": info.state,
        "error": info.error.detail if info.error else "",
        "model": info.model + (f", version {versions}" if versions else ""),
        "instances": f"{info.num_done} of {info.num_instances} done, {info.num_failed} failed",
        "priority": str(info.document.get("priority", "")),
        "webhook": info.document.get("webhook") or "",
        "created": moment(info.created_at),
        "started": moment(info.started_at),
        "ended": moment(info.ended_at),
        "expires": moment(info.expires_at),
        "request": info.request_id,
    }
    sys.stdout.writelines(f"{name:<11}{value}\n" for name, value in facts.items() if value)
    return 0


def _print_result(job: Job, args: Namespace) -> int:
    info = job.info
    if not (info.is_over or args.follow):
        sys.stderr.write(
            f"{COMMAND} jobs: {info.id} is {info.state}, with {_counts(info)}; --follow prints "
            f"predictions as they come, `{COMMAND} jobs wait {info.id}` waits for the end\n"
        )
        return FAILED
    with _output(args.output) as output:
        _write_lines(job, output, first=args.first, flushes=args.follow, path=args.output)
    return _status_of(job.info)


def _write_lines(
    job: Job, output: IO[bytes], *, first: int = 0, flushes: bool = False, path: Path | None = None
) -> None:
    """Write a line for each prediction; contents get files of their own beside a file of lines."""
    try:
        for line in job.lines(first=first):
            output.write((line if path is None else _with_file(line, path)) + b"\n")
            if flushes:
                output.flush()
    finally:
        sys.stdout.flush()


def _with_file(line: bytes, path: Path) -> bytes:
    """Write the content that a line has, if it has one, to a file beside `path`."""
    if b'"b64"' not in line:
        return line
    document = json.loads(line)
    content = content_in(document.get("prediction"))
    if content is None:
        return line
    try:
        document["prediction"] = content.file_beside(path, document["index"])
    except OSError as error:
        raise FlagError(f"--output: {path}: {error.strerror}") from error
    return json.dumps(document, ensure_ascii=False).encode()


@contextlib.contextmanager
def _output(path: Path | None) -> Iterator[IO[bytes]]:
    if path is None:
        yield sys.stdout.buffer
        return
    try:
        file = path.open("wb")
    except OSError as error:
        raise FlagError(f"--output: {path}: {error.strerror}") from error
    with file:
        yield file


def _wait(client: Client, ids: Sequence[str], timeout_s: float | None, stream: TextIO) -> int:
    """Wait until jobs are over; write each result to the stream."""
    end = None if timeout_s is None else time.monotonic() + timeout_s
    statuses = []
    try:
        for id in ids:
            left_s = None if end is None else max(end - time.monotonic(), 1e-3)
            try:
                job = client.job(id)
                with _progress(job.info) as show:
                    info = job.wait(left_s, show)
            except NotFoundError as error:  # the others may be there
                _say(error)
                statuses.append(FAILED)
                continue
            reason = f" ({info.error.detail})" if info.error else ""
            stream.write(f"{id}: {info.state}, {_counts(info)}{reason}\n")
            stream.flush()
            statuses.append(_status_of(info))
    except KeyboardInterrupt:
        sys.stderr.write(f"{COMMAND} jobs: the jobs go on; `{COMMAND} jobs list` shows them\n")
        return INTERRUPTED
    return FAILED if FAILED in statuses else max(statuses)


def _end(client: Client, id: str, *, deletes: bool) -> int:
    try:
        job = client.job(id)
        if deletes:
            job.delete()
            sys.stdout.write(f"{id}: deleted\n")
            return 0
        info = job.cancel()
    except NotFoundError as error:
        _say(error)
        return FAILED
    if info.state == "cancelled":
        sys.stdout.write(f"{id}: cancelled, {_counts(info)}\n")
    else:
        sys.stdout.write(f"{id}: had {info.state} already\n")
    return 0


@contextlib.contextmanager
def _progress(info: JobInfo) -> Iterator[Callable[[JobInfo], None]]:
    """Yield a function that shows a job: as a bar on a terminal, else on a line now and then."""
    bar = _bar(info) if sys.stderr.isatty() else None
    told_at = time.monotonic()

    def tell(info: JobInfo) -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= _TELL_S and not info.is_over:
            told_at = time.monotonic()
            sys.stderr.write(f"{info.id}: {info.state}, {_counts(info)}\n")

    if bar is None:
        yield tell
        return

    def draw(info: JobInfo) -> None:
        (task,) = bar.tasks
        rate = f"{task.speed:,.1f}/s" if task.speed else info.state
        bar.update(task.id, completed=info.num_done, rate=rate)

    with bar:
        yield draw


def _bar(info: JobInfo) -> "Progress | None":
    try:
        from rich import console, progress
    except ModuleNotFoundError:  # only the client is installed
        return None
    bar = progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[rate]}"),
        progress.TimeRemainingColumn(),
        console=console.Console(stderr=True),
        transient=True,
    )
    bar.add_task(info.id, total=info.num_instances, completed=info.num_done, rate=info.state)
    return bar


def _status_of(info: JobInfo) -> int:
    if info.state != "succeeded":
        return FAILED
    return _SOME_FAILED if info.num_failed else 0


def _counts(info: JobInfo) -> str:
    done = f"{info.num_done:,} of {info.num_instances:,} done"
    return f"{done}, {info.num_failed:,} failed" if info.num_failed else done


def _say(error: InferpoolError) -> None:
    """Print an error, and what to do about it."""
    hint = ""
    if isinstance(error, UnauthorizedError | ForbiddenError):
        hint = f"; --key-file PATH or the variable {PREDICT_KEY_VARIABLE} gives another key"
    elif error.code == NotFoundError.code:
        hint = '; the service may have no jobs (job_store = "none"), or be another server'
    sys.stderr.write(f"{COMMAND} jobs: {error.detail}{hint}\n")


def _is_late(error: InferpoolError) -> bool:
    return isinstance(error, DeadlineExceededError) and error.status is None
