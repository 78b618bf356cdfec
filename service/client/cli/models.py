"""The verb `models`: requests a change of models, and follows it to its end."""

import contextlib
import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from ..usage import COMMAND, FAILED, INTERRUPTED, FlagError
from .access import context_of, key_of, parameters_of, url_of
from .admin import (
    AdminConnection,
    ChangeSeen,
    ModelSeen,
    ModelsSeen,
    OperatorError,
    UnknownNameError,
    UnreachedError,
    WrongRequestError,
)
from .flags import ADMIN_KEY_VARIABLE
from .model_report import failure_text, models_table, success_text, versions_table

_UNUSABLE = 2
"""Exit status if the service cannot use the settings."""
_LOST = "the service knows nothing of this change any more: it may have been restarted meanwhile"


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowPace:
    """Timing of following a change."""

    poll_s: float = 0.25
    """Time between two requests."""
    lost_s: float = 60.0
    """How long the service may be silent."""


_PACE = FollowPace()


def run(args: Namespace) -> int:
    """Run the command; return the exit status. The service checks the settings.

    Raises:
        FlagError: The flags make no sense, or the service cannot use them.
    """
    body: dict[str, object] = {}
    if args.what in ("add", "swap"):
        given = vars(args)
        body |= {"name": args.name} if args.what == "add" else {}
        names = ("source", "weights", "ephemeral")
        body |= {name: given[name] for name in names if given[name] is not None}
        body |= parameters_of(args.set, "--set")
    return ask_service(args, body)


def ask_service(args: Namespace, body: Mapping[str, object]) -> int:
    """Send a request to a service, and show its result; return the exit status.

    Raises:
        FlagError: The flags make no sense, or the service cannot use the request.
    """
    url, key = url_of(args.url), key_of(args.key_file, os.environ, ADMIN_KEY_VARIABLE)
    operator = AdminConnection(url, key, context_of(args))
    try:
        return operate(operator, args, body)
    finally:
        operator.close()


def operate(
    operator: AdminConnection, args: Namespace, body: Mapping[str, object], pace: FollowPace = _PACE
) -> int:
    """Send a request, and show its result; return the exit status.

    Raises:
        FlagError: The service cannot use the request.
    """
    try:
        return _ask(operator, args, body, pace)
    except WrongRequestError as error:
        _show_problem(error, args)
        raise FlagError(str(error)) from error
    except OperatorError as error:
        _show_problem(error, args)
        hint = operator.nearest(args.name) if isinstance(error, UnknownNameError) else ""
        sys.stderr.write(f"{COMMAND} models: {error}{hint and f'; {hint}'}\n")
        return FAILED


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
    """Show the progress and the end of a change; return the exit status."""
    model = operator.read(answer, ModelSeen)
    if not model.changes:
        raise OperatorError(_LOST)
    change = model.changes[0]
    try:
        with _progress(f"{args.what} {args.name}") as show:
            while change.state == "going_on":
                show(model.change)
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
            f"{COMMAND} models: the {args.what} of {args.name} goes on; `{COMMAND} models versions "
            f"{args.name}` shows how\n"
        )
        return INTERRUPTED
    if args.json:
        sys.stdout.write(f"{answer.decode()}\n")
    if change.state == "failed":
        sys.stderr.write(f"{COMMAND} models: {failure_text(model, change)}\n")
        return _UNUSABLE if change.code == WrongRequestError.code else FAILED
    if not args.json:
        sys.stdout.write(f"{success_text(model, change)}\n")
    return 0


def _look(operator: AdminConnection, args: Namespace, pace: FollowPace) -> bytes:
    """Return the state of a model while it is changed; nothing if it is removed.

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


@contextlib.contextmanager
def _progress(title: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the step of a change on a terminal; elsewhere nothing."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda step: None
        return
    started = time.monotonic()
    with console.status(Text(title)) as status:

        def show(step: str) -> None:
            elapsed_s = time.monotonic() - started
            status.update(Text(f"{title} ({elapsed_s:.0f} s): {step}"))

        yield show


def _write(answer: bytes, args: Namespace, table: Callable[[], str]) -> int:
    sys.stdout.write(f"{answer.decode()}\n" if args.json else table())
    return 0


def _show_problem(error: OperatorError, args: Namespace) -> None:
    if args.json and error.problem is not None:
        sys.stdout.write(json.dumps(error.problem) + "\n")
