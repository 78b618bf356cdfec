"""Runs `inferpool models`: checks the request before it is sent to the service."""

import json
import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from inferpool.models.files.run_folder import is_run, why_no_run
from inferpool.service.client.cli.models import ask_service
from inferpool.service.errors import InvalidInputError
from inferpool.service.parts.swap.requests import SwapOptions, read_add
from inferpool.service.settings.draft import from_text
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.names import FlagError
from inferpool.service.settings.problems import expected, shown, unknown


def run(args: Namespace) -> int:
    """Run the command; return the exit status.

    Raises:
        FlagError: The flags make no sense, or the service cannot use them.
    """
    return ask_service(args, body_of(args))


def body_of(args: Namespace) -> Mapping[str, object]:
    """Return the body of the request.

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
    """Return the settings for the folder of a training run; none without one."""
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
    # The old source's settings would not fit this one.
    settings: dict[str, object] = {"source": path, "weights": "DEFAULT", "options": {}}
    if args.policy == "force":
        return settings
    return {**settings, "validation": path}


def _setting(text: str) -> tuple[str, object]:
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
