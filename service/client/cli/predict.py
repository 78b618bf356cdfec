"""The verb `predict`: calls a service from the command line, with the client."""

import asyncio
import json
import sys
import warnings
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

from ..async_client import AsyncClient
from ..errors import ConnectError, InferpoolError
from ..results import Json, Prediction
from ..retries import Retry
from ..usage import COMMAND, FAILED, FlagError
from .access import access_of, check_is_file, lost_text, parameters_of, retry_printer, url_of

_STDIN = "-"
_NUM_LABELS = 3


def run(args: Namespace) -> int:
    """Print the predictions for all inputs in order; return the exit status.

    Raises:
        FlagError: The flags make no sense.
    """
    if not (args.inputs or args.text):
        raise FlagError("name a file, or give a --text")
    for name in args.inputs:
        check_is_file(name)
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
    how_long = f", up to {Retry().max_attempts - 1} times within {args.timeout_s:g} s"
    key, verify = access_of(args)
    client = AsyncClient(
        url_of(args.url),
        key=key,
        timeout_s=args.timeout_s,
        on_retry=retry_printer("predict", how_long),
        verify=verify,
    )
    async with client:
        results = client.predict_many(
            inputs,
            model=args.model,
            version=args.model_version,
            parameters=parameters_of(args.parameter),
            return_errors=True,
        )
        left = iter(names)
        async for result in results:
            name = next(left)
            failures = [result] if isinstance(result, InferpoolError) else result.errors
            status = FAILED if failures else status
            was_lost = was_lost or isinstance(result, ConnectError)
            if args.json:
                sys.stdout.write(json.dumps(_document(name, result)) + "\n")
                continue
            for failure in failures:
                sys.stderr.write(f"{COMMAND} predict: {name}: {failure}\n")
            if not isinstance(result, InferpoolError):
                said = [_format(each) for each in result.predictions if each not in failures]
                sys.stdout.writelines(f"{name}: {each}\n" for each in said)
    if was_lost:
        sys.stderr.write(lost_text("predict", url_of(args.url)))
    return status


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
