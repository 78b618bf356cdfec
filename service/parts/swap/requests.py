"""Reads what an operator asks for: the settings of a model, and how to judge another version."""

from collections.abc import Collection, Mapping
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from inferpool.service.errors import ConflictError, InvalidInputError
from inferpool.service.settings.bounds import MAX_MODELS, Ratio, SecondsOrZero, Text
from inferpool.service.settings.model import MODEL_NAME, ModelSettings, SettingsTable
from inferpool.service.settings.model_sources import did_you_mean
from inferpool.service.settings.names import GONE
from inferpool.service.settings.problems import expected, shown

Policy = Literal["verified", "shadow", "canary", "force"]
_MOST_SETTINGS = 100
"""Settings in one request: more than there are."""
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class SwapOptions(SettingsTable):
    """How a version is judged before it serves, and after that."""

    policy: Policy = "verified"
    """`verified` compares it with the version that serves, on the model's example, on made-up
    inputs and on live ones. `shadow` then also gives it a share of the traffic, whose answers are
    compared and thrown away; `canary` lets it answer a share of the calls. Either is refused if no
    traffic comes to it. `force` compares nothing, and never rolls back by itself. Each must load,
    warm up and give finite outputs."""
    min_agreement: Share = 0.99
    """The least share of inputs with the same best label (or text) as now."""
    max_deviation: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = 0.05
    """The largest difference of any number with a fraction, as a part of the largest such number
    of its output. Whole numbers are classes or tokens, which `min_agreement` is for."""
    max_latency_ratio: Ratio = 1.5
    """The most that the median time of an input may be, as a multiple of that of now."""
    max_fault_share: Share = 0.001
    """The largest share of inputs that it may fail on while the version of now does not."""
    num_inputs: Annotated[int, Field(ge=1, le=10_000)] = 100
    """Live inputs to compare on. They are kept in memory until it is decided, and never on disk."""
    wait_s: SecondsOrZero = 10.0
    """How long to wait for so many live inputs; without traffic there are fewer."""
    traffic_share: Share = 0.1
    """The share of the traffic that a shadow or a canary gets."""
    duration_s: SecondsOrZero = 60.0
    """How long a shadow or a canary is watched before it serves."""
    rollback_s: SecondsOrZero = 300.0
    """How long the former version stays loaded, if memory suffices. If errors or latency of the new
    one pass the bounds within that time, the former one serves again."""
    validation: Text | None = None
    """A folder with one subfolder of images for each label, the folder of a training run for those
    that it has held out, a .csv file with the columns path and label, or a file with lines like
    `{"instance": ..., "label": ...}`. All labels are the `label` of an answer, or all are its
    `index`. The version serves if it labels at least as many right as the one of now; agreement
    and deviation are not looked at then."""
    old_first: bool = False
    """Let the last worker of the version of now leave first, if memory is too short for both. Calls
    wait in the queue until the new one is loaded and compared with what the former one had answered
    before. If it is refused, the former one is loaded again, and calls that wait get 503."""
    ephemeral: bool = False
    """Forget the change at the next start of the service."""


def read_swap(
    request: Mapping[str, object], current: ModelSettings
) -> tuple[ModelSettings, SwapOptions]:
    """Read the settings of another version, and how to judge it.

    Raises:
        InvalidInputError: Something cannot be used; says what.
    """
    _check_number(request)
    options = {key: value for key, value in request.items() if key in SwapOptions.model_fields}
    changed = {key: value for key, value in request.items() if key not in options}
    try:
        judged = SwapOptions.model_validate(options)
        return ModelSettings.model_validate(current.model_dump() | changed), judged
    except ValidationError as error:
        raise _invalid(error) from error


def read_add(
    request: Mapping[str, object], present: Collection[str] = ()
) -> tuple[str, ModelSettings, bool]:
    """Read the name and settings of one more model, and whether it is ephemeral.

    Raises:
        ConflictError: There is such a model, or no more can be added to those that are present.
        InvalidInputError: Something cannot be used; says what.
    """
    _check_number(request)
    settings = dict(request)
    name, ephemeral = settings.pop("name", None), settings.pop("ephemeral", False)
    if not isinstance(name, str) or not MODEL_NAME.fullmatch(name):
        raise InvalidInputError(
            f"name: {str(name)[:80]!r} cannot be a model's name; use up to 64 of a-z, 0-9, '.', "
            "'_' and '-', and begin with a letter or a digit"
        )
    if not isinstance(ephemeral, bool):
        raise InvalidInputError("ephemeral: must be true or false")
    settings.setdefault("source", name)
    model = read_model(settings)
    if name in present:
        raise ConflictError(f"there is a model {name!r}; swap it, or remove it first")
    if len(present) >= MAX_MODELS:
        raise ConflictError(f"there are {MAX_MODELS} models, which is the most; remove one first")
    return name, model, ephemeral


def read_model(settings: Mapping[str, object]) -> ModelSettings:
    """Read the settings of a model.

    Raises:
        InvalidInputError: Something cannot be used; says what.
    """
    try:
        return ModelSettings.model_validate(settings)
    except ValidationError as error:
        raise _invalid(error) from error


def request_schemas() -> Mapping[str, object]:
    """Return the JSON schemas of what `read_add` and `read_swap` take, by the operation's id."""
    settings = _properties_of(ModelSettings)
    as_it_was = {
        name: {key: value for key, value in each.items() if key != "default"}
        for name, each in settings.items()
    }
    judged = _properties_of(SwapOptions)
    name = {
        "type": "string",
        "pattern": f"^{MODEL_NAME.pattern}$",
        "description": "The name of the model.",
    }
    return {
        "add_model": {
            "type": "object",
            "description": "Without `source`, the name is the source.",
            "required": ["name"],
            "properties": {"name": name, **settings, "ephemeral": judged["ephemeral"]},
            "additionalProperties": False,
        },
        "swap_model": {
            "type": "object",
            "description": "Settings that are not there stay as they are.",
            "properties": {**as_it_was, **judged},
            "additionalProperties": False,
        },
    }


def _check_number(request: Mapping[str, object]) -> None:
    """Refuse a request with more settings than there are: to name each would take long."""
    if len(request) > _MOST_SETTINGS:
        raise InvalidInputError(f"there are {len(request)} settings; give {_MOST_SETTINGS} at most")


def _properties_of(table: type[SettingsTable]) -> dict[str, dict[str, object]]:
    properties: dict[str, dict[str, object]] = table.model_json_schema()["properties"]
    for each in properties.values():
        each["description"] = " ".join(str(each["description"]).split())
        del each["title"]
    return properties


def _invalid(error: ValidationError) -> InvalidInputError:
    """Name each setting that cannot be used, and say what it accepts."""
    fields = {**ModelSettings.model_fields, **SwapOptions.model_fields}
    texts: dict[str, str] = {}
    for each in error.errors():
        name = str(each["loc"][0])
        reason = each.get("ctx", {}).get("error")
        if name in SwapOptions.model_fields and each["type"] == "extra_forbidden":
            text = "is for another version of a model that is served"
        elif name in GONE:
            text = f"it {GONE[name]}"
        elif name not in fields:
            hint = did_you_mean(name, list(fields)).rstrip()
            text = f"there is no such setting{hint and '; '}{hint}"
        elif each["type"] == "missing":
            text = "is missing"
        else:
            right = str(reason) if reason else f"is not {expected(fields[name])}"
            text = f"{shown(each['input'])} {right}"
        texts.setdefault(name[:80], text)  # a union reports each of its branches
    return InvalidInputError("; ".join(f"{name}: {text}" for name, text in texts.items()))
