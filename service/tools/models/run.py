"""Runs `inferpool models`: asks for a change, and follows it until it is decided."""

import json
import os
import ssl
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.text import Text

from inferpool.models.files.run_folder import is_run, why_no_run
from inferpool.service.errors import InvalidInputError
from inferpool.service.parts.swap.requests import SwapOptions, read_add
from inferpool.service.settings.address import key_of, url_of
from inferpool.service.settings.draft import from_text
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.names import FlagError
from inferpool.service.settings.problems import expected, shown, unknown
from inferpool.service.tools.models.operator import (
    AdminConnection,
    ChangeSeen,
    ModelSeen,
    ModelsSeen,
    OperatorError,
    UnknownNameError,
    UnreachedError,
    WrongRequestError,
)
from inferpool.service.tools.models.plan import KEY_VARIABLE
from inferpool.service.tools.models.report import (
    failure_text,
    models_table,
    success_text,
    versions_table,
)
from inferpool.service.tools.trial.load import tls_context

_FAILED = 1
_UNUSABLE = 2
"""Exit status if the service cannot use the settings."""
_LOST = "the service knows nothing of this change any more: it may have been restarted meanwhile"
_INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells (128 + SIGINT)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowPace:
    """How a change is followed."""

    poll_s: float = 0.25
    """Time between two looks."""
    lost_s: float = 60.0
    """How long the service may not answer."""


_PACE = FollowPace()


def run(args: Namespace) -> int:
    """Do what was asked for; return the exit status.

    Raises:
        FlagError: The flags make no sense, or the service cannot use them.
    """
    body = body_of(args)
    url, key = url_of(args.url), key_of(args.key_file, os.environ, KEY_VARIABLE)
    operator = AdminConnection(url, key, _tls_context(args))
    try:
        return operate(operator, args, body)
    finally:
        operator.close()


def operate(
    operator: AdminConnection, args: Namespace, body: Mapping[str, object], pace: FollowPace = _PACE
) -> int:
    """Ask for something, and show what came of it; return the exit status.

    Raises:
        FlagError: The service cannot use what it was asked for.
    """
    try:
        return _ask(operator, args, body, pace)
    except WrongRequestError as error:
        _show_problem(error, args)
        raise FlagError(str(error)) from error
    except OperatorError as error:
        _show_problem(error, args)
        hint = operator.nearest(args.name) if isinstance(error, UnknownNameError) else ""
        sys.stderr.write(f"inferpool models: {error}{hint and f'; {hint}'}\n")
        return _FAILED


def _ask(
    operator: AdminConnection, args: Namespace, body: Mapping[str, object], pace: FollowPace
) -> int:
    match args.what:
        case "list":
            answer = operator.ask("GET")
            return _write(answer, args, lambda: models_table(operator.read(answer, ModelsSeen)))
        case "versions":
            answer = operator.ask("GET", args.name)
            return _write(answer, args, lambda: versions_table(operator.read(answer, ModelSeen)))
        case "add":
            answer = operator.ask("POST", body=body)
        case "remove":
            answer = operator.ask("DELETE", args.name, "?ephemeral=true" if args.ephemeral else "")
        case "swap":
            answer = operator.ask("POST", args.name, "/versions", body)
        case _:
            answer = operator.ask("POST", args.name, "/rollback")
    return _follow(operator, args, answer, pace)


def _follow(operator: AdminConnection, args: Namespace, answer: bytes, pace: FollowPace) -> int:
    """Show how a change goes on, and how it ends; return the exit status."""
    model = operator.read(answer, ModelSeen)
    if not model.changes:
        raise OperatorError(_LOST)
    change = model.changes[0]
    try:
        with _Progress(f"{args.what} {args.name}") as progress:
            while change.state == "going_on":
                progress.show(model.change)
                time.sleep(pace.poll_s)
                answer = _look(operator, args, pace)
                if not answer:
                    said = '{"removed": true}' if args.json else f"{args.name} is removed"
                    sys.stdout.write(f"{said}\n")
                    return 0
                model = operator.read(answer, ModelSeen)
                change = _found(change.id, model)
    except KeyboardInterrupt:
        sys.stderr.write(
            f"inferpool models: the {args.what} of {args.name} goes on; `inferpool models versions "
            f"{args.name}` shows how\n"
        )
        return _INTERRUPTED
    if args.json:
        sys.stdout.write(f"{answer.decode()}\n")
    if change.state == "failed":
        sys.stderr.write(f"inferpool models: {failure_text(model, change)}\n")
        return _UNUSABLE if change.code == WrongRequestError.code else _FAILED
    if not args.json:
        sys.stdout.write(f"{success_text(model, change)}\n")
    return 0


def _look(operator: AdminConnection, args: Namespace, pace: FollowPace) -> bytes:
    """Return how a model is while it is changed; nothing if it is removed.

    Raises:
        OperatorError: The service has not answered for long, or has lost the model.
    """
    until = time.monotonic() + pace.lost_s
    while True:
        try:
            return operator.ask("GET", args.name)
        except UnknownNameError as error:
            if args.what == "remove":
                return b""
            raise OperatorError(_LOST) from error
        except UnreachedError as error:
            if time.monotonic() > until:
                raise OperatorError(f"{error}; the {args.what} may go on") from error
            time.sleep(pace.poll_s)


def _found(id: str, model: ModelSeen) -> ChangeSeen:
    for change in model.changes:
        if change.id == id:
            return change
    raise OperatorError(_LOST)


class _Progress:
    """Shows on a terminal how a change goes on; elsewhere nothing."""

    def __init__(self, title: str) -> None:
        console = Console(stderr=True)
        self._title = title
        self._started = time.monotonic()
        self._status = console.status(Text(title)) if console.is_terminal else None

    def __enter__(self) -> Self:
        """Begin to show."""
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing on the terminal."""
        if self._status is not None:
            self._status.stop()

    def show(self, text: str) -> None:
        """Show what is being done now."""
        if self._status is not None:
            elapsed_s = time.monotonic() - self._started
            self._status.update(Text(f"{self._title} ({elapsed_s:.0f} s): {text}"))


def body_of(args: Namespace) -> Mapping[str, object]:
    """Return what to ask for.

    Raises:
        FlagError: A setting or an option cannot be used.
    """
    if args.what not in ("add", "swap"):
        return {}
    given = vars(args)
    options = {name: given[name] for name in SwapOptions.model_fields if name in given}
    options = {name: value for name, value in options.items() if value is not None}
    body = _run_settings(args)
    body |= {name: given[name] for name in ("source", "weights") if given[name] is not None}
    body |= dict(_setting(text) for text in args.set)
    try:
        SwapOptions.model_validate(options)
        if args.what == "add":
            read_add({"name": args.name, **body})
    except ValidationError as error:
        each = error.errors()[0]
        flag = "--" + str(each["loc"][0]).replace("_", "-")
        raise FlagError(f"{flag}: {each['msg']}") from error
    except InvalidInputError as error:
        raise FlagError(error.message) from error
    return {**({"name": args.name} if args.what == "add" else {}), **body, **options}


def _run_settings(args: Namespace) -> dict[str, object]:
    """Return what the folder of a training run stands for; its images judge it, but for others."""
    folder = args.run_folder
    if folder is None:
        return {}
    if args.source is not None:
        raise FlagError(f"--source: {folder} is the source already; give one of them")
    path = os.path.abspath(folder)
    if os.path.isdir(path):
        if not is_run(Path(path)):
            raise FlagError(f"RUN: {why_no_run(Path(folder))}")
    elif not os.path.isabs(folder):  # an absolute path may be one of the service's host
        raise FlagError(f"RUN: there is no folder {folder!r} here; --source takes other sources")
    if args.what == "add":
        return {"source": path}
    # What was for the source of before would not fit this one.
    settings: dict[str, object] = {"source": path, "weights": "DEFAULT", "options": {}}
    if args.policy == "force":
        return settings
    return {**settings, "validation": path}


def _setting(text: str) -> tuple[str, object]:
    """Read `KEY=VALUE`."""
    name, equals, value = text.partition("=")
    if not equals:
        raise FlagError(f"--set: {text!r} is not KEY=VALUE")
    if name not in ModelSettings.model_fields:
        raise FlagError(f"--set: {unknown(('models', 'NAME', name)).removeprefix('models.NAME.')}")
    if name != "options":
        field = ModelSettings.model_fields[name]
        given = from_text(field, value)
        try:
            kind: Any = Annotated[field.annotation, field]
            TypeAdapter(kind).validate_python(given)
        except ValidationError as error:
            raise FlagError(f"--set: {name}: {shown(value)} is not {expected(field)}") from error
        return name, given
    try:
        options = json.loads(value)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise FlagError(f'--set: options: {value!r} is not a JSON object such as {{"width": 2}}')
    return name, options


def _write(answer: bytes, args: Namespace, table: Callable[[], str]) -> int:
    sys.stdout.write(f"{answer.decode()}\n" if args.json else table())
    return 0


def _show_problem(error: OperatorError, args: Namespace) -> None:
    if args.json and error.problem is not None:
        sys.stdout.write(json.dumps(error.problem) + "\n")


def _tls_context(args: Namespace) -> ssl.SSLContext:
    try:
        return tls_context(False if args.insecure else str(args.ca_file or "") or True)
    except (OSError, ssl.SSLError) as error:
        raise FlagError(f"--ca-file: {args.ca_file}: {error}") from error
