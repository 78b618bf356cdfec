"""Collects the values of all settings, and everything that is wrong with them."""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from inferpool.models.attached import BUILT_IN_SOURCES
from inferpool.models.files.reading import read_file
from inferpool.service.client.keys import keys_in
from inferpool.service.settings.keys import Keys, digest_of
from inferpool.service.settings.model import MODEL_NAME, ModelSettings
from inferpool.service.settings.model_sources import (
    DEFAULT_SOURCE,
    did_you_mean,
    is_source,
    slug,
    source_hint,
)
from inferpool.service.settings.names import (
    FLAGS,
    KEY_SETTINGS,
    PREFIX,
    Key,
    SettingsError,
    dotted,
    is_foreign,
    place_of,
)
from inferpool.service.settings.paths import path_faults
from inferpool.service.settings.problems import (
    PIPE_WAIT_S,
    expected,
    shown,
    unknown,
    unknown_argument,
    unknown_variable,
    unreadable,
    with_ways,
)
from inferpool.service.settings.settings import Settings
from inferpool.service.settings.tracing import (
    HEADER_VARIABLES,
    TraceHeaders,
    asks_for_traces,
    is_switched_off,
    parted,
    values_from,
)

MODELS_LATER = ("watch", "sagemaker_models", "torchserve")
"""Settings with which a service may start without any model."""


_Values = Mapping[str, object]
"""Values of settings by name, as in a file."""


class Draft:
    """The values given so far, the origin of each, and the problems found."""

    def __init__(self) -> None:
        self._values: dict[Key, object] = {}
        self._places: dict[Key, str] = {}
        self._models: dict[str, str] = {}
        """The names of the models, with the place that named each first."""
        self._problems: list[str] = []
        self._warnings: list[str] = []
        self._trace_problem = ""
        """Mistake in the variables of OpenTelemetry, all of which are ignored then."""

    def add_table(self, table: _Values, origin: str, warnings: Sequence[str] = ()) -> None:
        """Add the settings of a file, and warnings about it."""
        self._warnings += warnings
        path = origin.removeprefix("file ")
        for name, value in table.items():
            if name == "models":
                self._add_models(value, path, origin)
            elif name in KEY_SETTINGS:
                self._problems.append(
                    f"{path}: {name}: keys do not belong in this file; name a file of their own in "
                    f"{name}_file, or set {PREFIX}{name.upper()}"
                )
            elif name == "trace_headers":
                self._problems.append(
                    f"{path}: {name}: they may hold a key, which does not belong in this file; set "
                    f"{PREFIX}{name.upper()}"
                )
            elif name in Settings.model_fields:
                self._set((name,), value, origin)
            else:
                self._problems.append(f"{path}: {unknown((name,))}")

    def _add_models(self, models: object, path: str, origin: str) -> None:
        if not isinstance(models, dict):
            self._problems.append(
                f"{path}: models: write a table for each, such as [models.resnet]"
            )
            return
        for name, body in models.items():
            place = f"{path}: {dotted(('models', name))}"
            if not isinstance(body, dict):
                hint = "[models.NAME], with its settings under it"
                self._problems.append(f"{place}: {shown(body)} is not a table; write {hint}")
            elif self._name_model(name, place):
                self._add_model(name, body, path, origin)

    def _add_model(self, name: str, body: Mapping[str, object], path: str, origin: str) -> None:
        for field, value in body.items():
            key = ("models", name, field)
            if field not in ModelSettings.model_fields:
                self._problems.append(f"{path}: {unknown(key)}")
            elif field == "options" and isinstance(value, dict):
                for option, each in value.items():
                    self._set((*key, option), each, origin)
            else:
                self._set(key, value, origin)

    def add_environment(self, environ: Mapping[str, str]) -> None:
        """Add the variables of the environment that are ours."""
        if environ.get("NO_COLOR"):
            self._set(("color",), "never", "environment NO_COLOR")
        if home := environ.get("XDG_CACHE_HOME"):
            self._set(("cache_dir",), f"{home}/inferpool", "environment XDG_CACHE_HOME")
        if (visible := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
            self._set(("cuda_visible_devices",), visible, "environment CUDA_VISIBLE_DEVICES")
        for name in ("CUDA_DEVICE_ORDER", "CUDA_MPS_PIPE_DIRECTORY"):
            if text := environ.get(name):
                self._set((name.lower(),), text, f"environment {name}")
        self._add_tracing(environ)
        for variable, text in environ.items():
            if not variable.startswith(PREFIX) or is_foreign(variable, text):
                continue
            if variable in HEADER_VARIABLES:
                continue  # a secret, which was read above
            if text:
                self._add_variable(variable, text)
            elif variable.removeprefix(PREFIX).lower().removesuffix("_file") in KEY_SETTINGS:
                self._problems.append(f"{variable}: is empty; to do without these keys, unset it")
        if variable := is_switched_off(environ):
            self._set(("trace_endpoint",), None, f"environment {variable}")

    def _add_tracing(self, environ: Mapping[str, str]) -> None:
        try:
            every = list(values_from(environ))
        except ValueError as error:
            if str(error).startswith("OTEL_"):  # it may be meant for others on this host
                self._trace_problem = str(error) if asks_for_traces(environ) else ""
            else:
                self._problems.append(str(error))
            return
        for setting, value, variable in every:
            self._set((setting,), value, f"environment {variable}")

    def _add_variable(self, variable: str, text: str) -> None:
        origin = f"environment {variable}"
        parts = variable.removeprefix(PREFIX).lower().split("__")
        if len(parts) == 1 and parts[0] in KEY_SETTINGS:
            self._add_keys(parts[0], text, variable, origin)
            return
        if len(parts) == 1 and parts[0] in Settings.model_fields and parts[0] != "models":
            self._set((parts[0],), from_text(Settings.model_fields[parts[0]], text), origin)
            return
        if parts[0] != "models" or len(parts) < 3:
            self._problems.append(f"{variable}: {unknown_variable(parts)}")
            return
        name, field = self._model_called(parts[1]), parts[2]
        if len(parts) == 4 and field == "options" and parts[3]:
            if self._name_model(name, variable):
                key = ("models", name, field, _option_called(self._values, name, parts[3]))
                self._set(key, toml_value(text), origin)
        elif field == "options":
            example = "__".join([PREFIX + "MODELS", parts[1].upper(), "OPTIONS__KEY"])
            self._problems.append(f"{variable}: give each option by its own variable, {example}")
        elif len(parts) == 3 and field in ModelSettings.model_fields:
            if self._name_model(name, variable):
                value = from_text(ModelSettings.model_fields[field], text)
                self._set(("models", name, field), value, origin)
        else:
            self._problems.append(f"{variable}: {unknown_variable(parts)}")

    def _add_keys(self, name: str, text: str, place: str, origin: str) -> None:
        """Add keys to those that are there. Problems are reported without showing a key."""
        before = self._values.get((name,))
        try:
            keys = read_keys(text)
        except ValueError as error:
            self._problems.append(f"{place}: {error}")
            return
        if not keys:
            self._problems.append(f"{place}: there is no key in it")
            return
        if isinstance(before, Keys):
            keys, origin = before | keys, f"{self._places[name,]}, {origin}"
        self._set((name,), keys, origin)

    def _model_called(self, spelling: str) -> str:
        """Return the model that a variable means, which has `_` for `-` and `.` in the name."""
        for name in self._models:
            if re.sub(r"[.-]", "_", name) == spelling:
                return name
        return spelling

    def choose(self, model: str) -> None:
        """Serve only this model: one that the settings name, or else a source."""
        if model not in self._models:
            if not is_source(model):
                hint = source_hint(model, [*self._models, *BUILT_IN_SOURCES])
                configured = ", ".join(self._models) or "none"
                self._problems.append(
                    f"MODEL: {shown(model)} is neither a model of the settings (these: "
                    f"{configured}) nor a source; {hint}"
                )
                return
            source, model = model, slug(model)
            self._warn_of_merging(source, model)
            self._models.setdefault(model, "MODEL")
            self._set(("models", model, "source"), source, "argument MODEL")
        self._models = {model: self._models[model]}
        for key in [key for key in self._values if key[0] == "models" and key[1] != model]:
            del self._values[key], self._places[key]
        if self._values.get(("default_model",), model) != model:
            self._set(("default_model",), model, "argument MODEL")

    def _warn_of_merging(self, source: str, model: str) -> None:
        """Warn that a source gets the other settings of a model with the same name."""
        place = self._models.get(model, "")
        more = [dotted(key[2:]) for key in self._values if key[:2] == ("models", model)]
        if others := [name for name in more if name != "source"]:
            self._warnings.append(
                f"{source} is served as {model}, so these settings of that model hold for it too: "
                f"{', '.join(others)} ({place})"
            )

    def add_arguments(self, arguments: Mapping[str, object]) -> None:
        """Add keyword arguments of Python.

        An argument for models applies to each model without a value of its own in `models`.
        """
        if "models" in arguments:
            self._add_models(arguments["models"], "argument", "argument")
        self._add_default_model()
        own = {key[:3] for key, place in self._places.items() if place == "argument"}
        for name, value in arguments.items():
            if name in KEY_SETTINGS:
                text = value if isinstance(value, str) else "\n".join(_words(value))
                self._add_keys(name, text, name, "argument")
            elif name in ModelSettings.model_fields:
                for model in self._models:
                    if ("models", model, name) not in own:
                        self._add_model(model, {name: value}, "argument", "argument")
            elif name not in Settings.model_fields:
                self._problems.append(unknown_argument(name))
            elif name != "models":
                self._set((name,), value, "argument")

    def add_flags(self, flags: Mapping[str, str]) -> None:
        """Add the command line flags. A flag for models applies to each model."""
        if "watch" not in flags:
            self._add_default_model()
        for field, flag in FLAGS.items():
            if field not in flags:
                continue
            origin, text = f"flag {flag}", flags[field]
            if field in Settings.model_fields:
                self._set((field,), from_text(Settings.model_fields[field], text), origin)
            elif field == "weights" and len(self._models) > 1:
                self._problems.append(
                    f"{flag}: say whose weights: inferpool serve MODEL {flag} ..."
                )
            else:
                value = from_text(ModelSettings.model_fields[field], text)
                for name in self._models:
                    self._set(("models", name, field), value, origin)

    @property
    def _may_be_empty(self) -> bool:
        """Models are to come later."""
        return any(self._values.get((name,)) for name in MODELS_LATER)

    def _add_default_model(self) -> None:
        if not self._models and not self._may_be_empty:
            self._models[slug(DEFAULT_SOURCE)] = "default"
            self._set(("models", slug(DEFAULT_SOURCE), "source"), DEFAULT_SOURCE, "default")

    def _complete(self) -> None:
        """Fill in what follows from the other settings."""
        for name, place in self._models.items():
            if ("models", name, "source") in self._values:
                continue
            if name in BUILT_IN_SOURCES:
                self._set(("models", name, "source"), name, "default")
            else:
                hint = source_hint(name, [other for other in self._models if other != name])
                self._problems.append(f"{place}: the model {shown(name)} has no source; {hint}")
        self._values.setdefault(("default_model",), next(iter(self._models), ""))
        self._part_endpoint()
        for key, fault in path_faults(self._values):
            self._problems.append(f"{self._place(key)}: {shown(self._values[key])} {fault}")
        chosen = self._values["default_model",]
        if isinstance(chosen, str) and chosen not in self._models and not self._may_be_empty:
            hint = did_you_mean(chosen, list(self._models))
            self._problems.append(
                f"{self._place(('default_model',))}: {shown(chosen)} is not one of the models; "
                f"{hint}there are {', '.join(self._models)}"
            )

    def _part_endpoint(self) -> None:
        """Move the password of a collector's URL to the headers, which no printed settings show."""
        endpoint = self._values.get(("trace_endpoint",))
        if not isinstance(endpoint, str) or parted(endpoint)[0] == endpoint:
            return
        self._values["trace_endpoint",], told = parted(endpoint)
        origin = self._places["trace_endpoint",]
        if origin.startswith("file "):
            self._problems.append(
                f"{self._place(('trace_endpoint',))}: a password does not belong in this file; set "
                f"{PREFIX}TRACE_HEADERS=authorization=Basic%20..., or the whole URL as "
                f"{PREFIX}TRACE_ENDPOINT"
            )
        given = self._values.get(("trace_headers",))
        if not isinstance(given, TraceHeaders):
            self._set(("trace_headers",), told, origin)
        elif "authorization" not in dict(given.pairs):
            both = f"{self._places['trace_headers',]}, {origin}"
            self._set(("trace_headers",), TraceHeaders((*given.pairs, *told.pairs)), both)

    def _add_key_files(self, cwd: Path, pipe_wait_s: float) -> None:
        for name in KEY_SETTINGS:
            setting = f"{name}_file"
            path = self._values.get((setting,))
            if not isinstance(path, str):
                continue
            place = self._place((setting,))
            try:
                text = read_file(cwd / path, wait_s=pipe_wait_s).decode("utf-8-sig")
            except (OSError, ValueError) as error:
                # Do not show the path: it may be a key that was put here by mistake.
                self._problems.append(f"{place}: {unreadable(error)}")
                continue
            self._add_keys(name, text, place, f"file {path}")

    def finish(
        self, cwd: Path, *, pipe_wait_s: float = PIPE_WAIT_S
    ) -> tuple[Settings, Mapping[str, str], Sequence[str]]:
        """Complete the values, check and freeze them.

        Args:
            cwd: The folder that the files of keys are relative to.
            pipe_wait_s: How long to wait for data if one of them is a pipe.

        Returns:
            The settings; the origin of each given one, by dotted key; warnings.

        Raises:
            SettingsError: A setting is unknown or invalid.
        """
        self._complete()
        self._add_key_files(cwd, pipe_wait_s)
        tree: dict[str, object] = {"models": {name: {} for name in self._models}}
        for key, value in self._values.items():
            _plant(tree, key, value)
        warnings = self._warnings
        if self._trace_problem and self._values.get(("trace_endpoint",)) is not None:
            self._problems.append(self._trace_problem)
        elif self._trace_problem:
            warnings.append(f"calls are not traced: {self._trace_problem}")
        settings: Settings | None = None
        try:
            settings = Settings.model_validate(tree)
        except ValidationError as error:
            self._problems.extend(self._explained(error.errors(include_url=False)))
        if settings is None or self._problems:
            raise SettingsError(self._problems)
        origins = {dotted(k): v for k, v in self._places.items()}
        return settings, origins, warnings

    def _explained(self, errors: Sequence[ErrorDetails]) -> Iterator[str]:
        seen = set()
        for error in errors:
            key = tuple(str(part) for part in error["loc"])
            key = key[:3] if key[0] == "models" else key[:1]
            # A union reports each of its branches, and a default may need another field.
            if key in seen or error["type"] in ("missing", "default_factory_not_called"):
                continue
            seen.add(key)
            raw = error.get("ctx", {}).get("error")
            right = with_ways(str(raw)) if raw else f"is not {expected(_field(key))}"
            value = self._values.get(key, error["input"])
            what = right if raw and value is True else f"{shown(value)} {right}"
            yield f"{self._place(key)}: {what}"

    def _place(self, key: Key) -> str:
        place = place_of(key, self._places.get(key, "default"))
        # Nobody has given it, so say how it is given.
        return with_ways(place) if place == key[0] else place

    def _name_model(self, name: str, place: str) -> bool:
        if not MODEL_NAME.fullmatch(name):
            rule = "up to 64 of a-z, 0-9, '.', '_' and '-', the first a letter or digit"
            self._problems.append(f"{place}: {shown(name)} is not a model's name: {rule}")
            return False
        self._models.setdefault(name, place)
        return True

    def _set(self, key: Key, value: object, origin: str) -> None:
        self._values[key] = value
        self._places[key] = origin


def from_text(field: FieldInfo, text: str) -> object:
    """Convert a text to a field's type, or return it as it is. It is checked later."""
    assert field.annotation is not None
    adapter: TypeAdapter[object] = TypeAdapter(field.annotation)
    try:
        return adapter.validate_strings(text)
    except ValidationError:
        return text


def toml_value(text: str) -> object:
    """Parse a text as a TOML value (3, 0.5, true, [1, 2]), or return it as it is."""
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return table["value"] if len(table) == 1 else text


def _option_called(keys: Iterable[Key], model: str, spelling: str) -> str:
    for key in keys:
        if key[:3] == ("models", model, "options") and key[-1].lower() == spelling:
            return key[-1]
    return spelling


def _words(value: object) -> list[str]:
    """Return the keys of a sequence. What is not a string becomes an empty, invalid key."""
    if isinstance(value, Sequence):
        return [each if isinstance(each, str) else "" for each in value]
    return []


def _field(key: Key) -> FieldInfo:
    fields = ModelSettings.model_fields if len(key) > 1 else Settings.model_fields
    return fields[key[-1]]


def _plant(tree: dict[str, object], key: Key, value: object) -> None:
    """Put a value at its place in nested tables."""
    *way, last = key
    for part in way:
        below = tree.setdefault(part, {})
        if not isinstance(below, dict):
            return  # `options = 3` in the file is reported already
        tree = below
    tree[last] = value


def read_keys(text: str) -> Keys:
    """Read keys as `keys_in` does.

    Raises:
        ValueError: One cannot be a key. The message holds none of the text.
    """
    return Keys(frozenset(digest_of(key.encode()) for key in keys_in(text)))
