"""The verb `predict`: asks a service from the command line, with the client."""

import asyncio
import json
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from inferpool.service.cli.flags import PREDICT_KEY_VARIABLE
from inferpool.service.client import AsyncClient, ConnectError, InferpoolError, Prediction
from inferpool.service.client.results import Json
from inferpool.service.client.retries import Retry
from inferpool.service.settings.address import key_of, url_of
from inferpool.service.settings.names import FlagError
from inferpool.service.settings.urls import without_password

_FAILED = 1
"""Exit status if an input has no prediction."""
_STDIN = "-"
_NUM_LABELS = 3


def run(args: Namespace) -> int:
    """Ask for predictions on all inputs, and print them in order; return the exit status.

    Raises:
        FlagError: The flags make no sense.
    """
    if not (args.inputs or args.text):
        raise FlagError("name a file, or give a --text")
    for name in args.inputs:
        if "://" in name:
            shown = without_password(name)
            is_service = shown.startswith(("http://", "https://"))
            hint = f"a service is named by --url {shown}" if is_service else "download it first"
            raise FlagError(f"{shown!r} is not a file; {hint}")
    if not args.timeout_s > 0:
        raise FlagError("--timeout-s: must be more than 0")
    warnings.filterwarnings("ignore", message="a str is sent as a text")  # --text asks for it
    return asyncio.run(_run(args))  # so that Ctrl-C ends it at once


async def _run(args: Namespace) -> int:
    names = [*args.inputs, *args.text]
    inputs = [
        sys.stdin.buffer.read() if name == _STDIN else Path(name) for name in args.inputs
    ] + args.text
    status = 0
    was_lost = False
    try:
        client = AsyncClient(
            url_of(args.url),
            key=key_of(args.key_file, os.environ, PREDICT_KEY_VARIABLE),
            timeout_s=args.timeout_s,
            on_retry=_retry_printer(args.timeout_s),
            verify=not args.insecure and (str(args.ca_file) if args.ca_file else True),
        )
    except OSError as error:
        raise FlagError(f"--ca-file: {args.ca_file}: {error}") from error
    async with client:
        results = client.predict_many(
            inputs,
            model=args.model,
            version=args.model_version,
            parameters=_parameters(args.parameter),
            return_errors=True,
        )
        left = iter(names)
        async for result in results:
            name = next(left)
            failures = [result] if isinstance(result, InferpoolError) else result.errors
            status = _FAILED if failures else status
            was_lost = was_lost or isinstance(result, ConnectError)
            if args.json:
                sys.stdout.write(json.dumps(_document(name, result)) + "\n")
                continue
            for failure in failures:
                sys.stderr.write(f"inferpool predict: {name}: {failure}\n")
            if not isinstance(result, InferpoolError):
                said = [_format(each) for each in result.predictions if each not in failures]
                sys.stdout.writelines(f"{name}: {each}\n" for each in said)
    if was_lost:
        sys.stderr.write(
            f"inferpool predict: is a service running at {without_password(url_of(args.url))}? "
            "`inferpool serve` starts one, --url names another\n"
        )
    return status


def _retry_printer(timeout_s: float) -> Callable[[InferpoolError, float], None]:
    """Return a function that prints why there is no answer yet, each kind of reason once."""
    told = set()

    def tell(error: InferpoolError, _: float) -> None:
        if error.code not in told:
            told.add(error.code)
            sys.stderr.write(
                f"inferpool predict: {error.detail}; trying again, up to "
                f"{Retry().max_attempts - 1} times within {timeout_s:g} s\n"
            )

    return tell


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


def _document(name: str, result: Prediction | InferpoolError) -> dict[str, object]:
    if isinstance(result, InferpoolError):
        return {"input": name, "error": _error(result), "request_id": result.request_id}
    timing = asdict(result.timing)
    return {
        "input": name,
        "predictions": [
            {"error": _error(each)} if isinstance(each, InferpoolError) else each
            for each in result.predictions
        ],
        "request_id": result.request_id,
        "version": result.version,
        "timing": {name: value for name, value in timing.items() if name != "elapsed_s"},
        "num_attempts": result.num_attempts,
    }


def _error(error: InferpoolError) -> dict[str, object]:
    return {"code": error.code, "message": error.detail, "status": error.status}


def _format(value: Json) -> str:
    """Format a prediction: the best labels of a classifier, or else JSON."""
    match value:
        case [{"label": str(), "score": float()}, *_]:
            best = value[:_NUM_LABELS]
            return ", ".join(f"{each['label']} {each['score']:.2f}" for each in best)
    return json.dumps(value, ensure_ascii=False)
