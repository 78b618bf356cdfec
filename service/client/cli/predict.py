"""The verb `predict`: calls a service from the command line, with the client."""

import asyncio
import json
import sys
import warnings
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from ..async_client import AsyncClient
from ..contents import content_in
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
    if args.output is not None and len([*args.inputs, *args.text]) > 1:
        _make_folder(args.output)
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
        is_plain = not (args.json or args.accept or args.output)
        if len(names) == 1 and is_plain and await _is_streaming(client, args.model):
            return await _show_parts(client, names[0], inputs[0], args)
        results = client.predict_many(
            inputs,
            model=args.model,
            version=args.model_version,
            parameters=parameters_of(args.parameter),
            envelope=args.envelope,
            accept=args.accept,
            return_errors=True,
        )
        left = iter(names)
        async for result in results:
            name = next(left)
            failures = [result] if isinstance(result, InferpoolError) else result.errors
            saved = _save(result, args.output, len(names))
            status = FAILED if failures else status
            was_lost = was_lost or isinstance(result, ConnectError)
            if args.json:
                sys.stdout.write(json.dumps(_document(name, result, saved)) + "\n")
                continue
            for failure in failures:
                sys.stderr.write(f"{COMMAND} predict: {name}: {failure}\n")
            if not isinstance(result, InferpoolError):
                said = [
                    f"{_format(each)}{f', saved as {saved[i]}' if i in saved else ''}"
                    for i, each in enumerate(result.predictions)
                    if not isinstance(each, InferpoolError)
                ]
                sys.stdout.writelines(f"{name}: {each}\n" for each in said)
    if was_lost:
        sys.stderr.write(lost_text("predict", url_of(args.url)))
    return status


async def _is_streaming(client: AsyncClient, model: str | None) -> bool:
    """Return whether a model answers in parts, as far as `/health` says it to this key."""
    try:
        models = (await client.health()).document["models"]
        shown = [each for each in models if each["name"] == model]
        if model is None and len(models) == 1:
            shown = models
        return bool(shown and shown[0]["interface"]["streams"])
    except (InferpoolError, KeyError, TypeError):
        return False


async def _show_parts(client: AsyncClient, name: str, value: object, args: Namespace) -> int:
    """Print each part as it comes; return the exit status."""
    parts = client.stream(
        value,
        model=args.model,
        version=args.model_version,
        parameters=parameters_of(args.parameter),
    )
    try:
        async for part in parts:
            sys.stdout.write(f"{name}: {_format(part)}\n")
            sys.stdout.flush()
    except InferpoolError as error:
        sys.stderr.write(f"{COMMAND} predict: {name}: {error}\n")
        if isinstance(error, ConnectError):
            sys.stderr.write(lost_text("predict", url_of(args.url)))
        return FAILED
    return 0


def _make_folder(path: str) -> None:
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FlagError(f"--output: {path}: {error.strerror}") from error


def _save(
    result: Prediction | InferpoolError, output: str | None, num_inputs: int
) -> dict[int, Path]:
    """Save the contents of an answer; return their files by the place of their instances.

    Raises:
        FlagError: A file cannot be written.
    """
    saved: dict[int, Path] = {}
    if output is None or isinstance(result, InferpoolError):
        return saved
    for place, value in enumerate(result.predictions):
        if (content := content_in(value)) is None:
            continue
        path = Path(output)
        if num_inputs > 1 or len(result.predictions) > 1 or path.is_dir():
            _make_folder(output)
            among = f".{place}" if len(result.predictions) > 1 else ""
            path /= f"{result.index}{among}{content.ending}"
        try:
            saved[place] = content.save(path)
        except OSError as error:
            raise FlagError(f"--output: {path}: {error.strerror}") from error
    if not saved and result.is_whole:
        sys.stderr.write(f"{COMMAND} predict: the answer is JSON, so nothing is saved\n")
    return saved


def _document(
    name: str, result: Prediction | InferpoolError, saved: Mapping[int, Path]
) -> dict[str, object]:
    if isinstance(result, InferpoolError):
        return {"input": name, "error": _error(result), "request_id": result.request_id}
    timing = asdict(result.timing)
    return {
        "input": name,
        "predictions": [_shown(each, saved.get(i)) for i, each in enumerate(result.predictions)],
        "request_id": result.request_id,
        "version": result.version,
        "timing": {name: value for name, value in timing.items() if name != "elapsed_s"},
        "num_attempts": result.num_attempts,
    }


def _shown(value: Json, file: Path | None) -> Json:
    if isinstance(value, InferpoolError):
        return {"error": _error(value)}
    content = content_in(value)
    if content is None:
        return value
    if file is None:
        return content.document
    return {"file": str(file), "media_type": content.media_type}


def _error(error: InferpoolError) -> dict[str, object]:
    return {"code": error.code, "message": error.detail, "status": error.status}


def _format(value: Json) -> str:
    """Format a prediction: the best labels of a classifier, or else JSON."""
    match value:
        case [{"label": str(), "score": float()}, *_]:
            best = value[:_NUM_LABELS]
            return ", ".join(f"{each['label']} {each['score']:.2f}" for each in best)
    if content := content_in(value):
        return str(content)
    return json.dumps(value, ensure_ascii=False)
