"""Every number, text, list and table among settings has a greatest one, which errors name."""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from inferpool.service.errors import ConflictError, InvalidInputError
from inferpool.service.parts.swap.requests import SwapOptions, read_add, read_swap
from inferpool.service.settings.bounds import MAX_MODELS
from inferpool.service.settings.loader import load, load_arguments
from inferpool.service.settings.model import ModelSettings, SettingsTable
from inferpool.service.settings.names import SettingsError, StateFileError
from inferpool.service.settings.problems import expected
from inferpool.service.settings.settings import Settings
from inferpool.service.train.settings import TrainSettings
from tests.counted_steps import StepCounter

ECHO = ModelSettings(source="echo")
TABLES = (Settings, ModelSettings, SwapOptions, TrainSettings)
SECRETS = {"predict_keys", "metrics_keys", "admin_keys", "cluster_keys", "trace_headers"}
"""They come only from the environment and from files; see `Keys`."""
DEEP: list[object] = []
for _ in range(400):
    DEEP = [DEEP]
EXTREMES = (
    *(10**9, 2**31, 2**63, 10**30, -1, 0, -(10**9), -(10**30)),
    *(float("nan"), float("inf"), float("-inf"), 1e308, -1e308, 5e-324),
    *(True, None, "", "x" * 5000, "9" * 5000, "cuda:0," * 3000, "\0", "\ud800"),
    *([], ["x"] * 5000, [10**30], {}, {str(i): i for i in range(5000)}, {"a": DEEP}, DEEP),
)
MOST_STEPS = 20_000
"""Lines of Python that one request or one setting may take."""
NUMBER = st.integers() | st.floats() | st.sampled_from(EXTREMES)


def unbounded(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a JSON schema allows without a bound."""
    if reference := schema.get("$ref"):
        schema = definitions[reference.rpartition("/")[2]]
    for each in (*schema.get("anyOf", ()), *schema.get("allOf", ())):
        yield from unbounded(each, definitions)
    bounds = {
        "integer": ("maximum", "exclusiveMaximum"),
        "number": ("maximum", "exclusiveMaximum"),
        "string": ("maxLength", "enum", "const", "pattern"),
        "array": ("maxItems",),
        "object": ("maxProperties", "properties"),
    }
    kind = schema.get("type", "")
    if kind in bounds and not schema.keys() & {*bounds[kind]}:
        yield kind
    if kind == "array":
        yield from unbounded(schema["items"], definitions)


@pytest.mark.parametrize("table", TABLES)
def test_every_setting_has_a_greatest_value(table: type[SettingsTable]):
    schema = table.model_json_schema()
    for name in table.model_fields.keys() - SECRETS:
        found = [*unbounded(schema["properties"][name], schema.get("$defs", {}))]
        assert not found, f"{table.__name__}.{name} has no bound for its {found}"


@pytest.mark.parametrize("table", TABLES)
def test_the_description_of_a_setting_names_its_bound(table: type[SettingsTable]):
    for name, field in table.model_fields.items():
        text = expected(field)
        if "number" in text or "text in" in text or "list" in text:
            assert re.search(r"(to|below|of up to) [\d.]+\b", text), f"{name}: {text}"


def answered(table: type[SettingsTable], name: str, value: object) -> str:
    """Ask for a change of a model with one setting; return the error, or an empty text."""
    request = {name: value}
    with StepCounter(MOST_STEPS):
        try:
            if table is SwapOptions:
                read_swap(request, ECHO)
            else:
                read_add({"name": "m", "source": "echo", **request})
        except InvalidInputError as error:
            return error.message
    return ""


FIELDS = [(table, name) for table in (ModelSettings, SwapOptions) for name in table.model_fields]


@pytest.mark.parametrize(("table", "name"), FIELDS, ids=[name for _, name in FIELDS])
def test_an_extreme_value_of_an_admin_field_is_refused_with_its_bound(table, name):
    field = table.model_fields[name]
    for value in EXTREMES:
        error = answered(table, name, value)
        assert len(error) < 600, error[:700]
        if error:
            assert error.startswith(f"{name}: "), error
        elif isinstance(value, int | float) and not isinstance(value, bool):
            assert str(expected(field)).count(" to ") or value == 0


@settings(max_examples=150)
@given(st.sampled_from(FIELDS), NUMBER)
def test_any_number_in_an_admin_field_is_within_bounds_or_refused(field, value):
    error = answered(*field, value)
    assert not error or error.startswith(f"{field[1]}: ")


def test_more_settings_than_there_are_take_no_time_to_refuse():
    request = {"name": "m"} | {f"replicas{i}": 1 for i in range(40_000)}
    with StepCounter(MOST_STEPS):
        for read in (read_add, lambda asked: read_swap(asked, ECHO)):
            with pytest.raises(InvalidInputError, match="settings; give 100 at most"):
                read(request)


SETTINGS = [name for name in Settings.model_fields if name not in {*SECRETS, "models"}]


@pytest.mark.parametrize("names", [SETTINGS, ["job_store"], ["state_file"]], ids=len)
def test_extreme_values_of_settings_are_refused_with_their_places(names, tmp_path):
    """They are given all at once, and those alone that become files if all else is right."""
    for value in EXTREMES:
        arguments = dict.fromkeys(names, value)
        with StepCounter(10 * MOST_STEPS):
            error = error_of(partial(load_arguments, arguments, {}, tmp_path, model="echo"))
        for problem in error.splitlines():
            assert problem.startswith(tuple(names)), problem
            assert len(problem) < 1000
    for text in ("1" * 400, "-1", "nan", "1e308", "inf"):
        variables = {f"INFERPOOL_{name.upper()}": text for name in names}
        error = error_of(partial(load, {"model": "echo"}, variables, tmp_path))
        for problem in error.splitlines():
            assert problem.startswith((*variables, str(tmp_path))), problem


def error_of(call: Callable[[], object]) -> str:
    """Return the error that a call raises about settings, or an empty text."""
    try:
        call()
    except (SettingsError, StateFileError) as error:
        return str(error)
    return ""


def test_a_table_of_very_many_values_is_refused_without_a_long_search_of_its_text():
    many = {str(number): number for number in range(300_000)}
    with pytest.raises(InvalidInputError, match=r"options: .* is not a table of up to 256"):
        read_add({"name": "m", "source": "echo", "options": many})


def test_the_number_of_models_has_a_bound():
    models = {f"m{number}": ECHO for number in range(MAX_MODELS + 1)}
    with pytest.raises(ValidationError, match=f"at most {MAX_MODELS}"):
        Settings(models=models, default_model="m0")
    with pytest.raises(ConflictError, match=f"there are {MAX_MODELS} models, which is the most"):
        read_add({"name": "n", "source": "echo"}, [*models][1:])
