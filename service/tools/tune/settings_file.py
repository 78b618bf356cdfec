"""The settings file that tuning writes: the user's settings with those that were found."""

import io
from collections.abc import Iterable

from inferpool.service.settings.loader import LoadedSettings, Row, write_toml
from inferpool.service.tools.tune.knobs import Changes, key_of


def settings_text(
    loaded: LoadedSettings, whole: LoadedSettings, changes: Changes, comments: Iterable[str]
) -> str:
    """Return the text of the file.

    `loaded` has the settings with which the one model was tuned; `whole` is what the user's file
    says, with all of its models.
    """
    (model,) = loaded.settings.models
    values = {key_of(name, model): value for name, value in changes.items()}
    rows: list[Row] = []
    for key, value, origin in _merged(loaded, whole, model):
        if key in values:
            rows.append((key, values[key], "tuned"))
        elif _is_said(key, origin):
            rows.append((key, value, "default"))  # which leaves no note in the file
    file = io.StringIO()
    file.writelines(f"# {line}\n" for line in comments)
    if len(rows[0][0]) == 1:  # a table begins with an empty line of its own
        file.write("\n")
    write_toml(rows, file)
    return file.getvalue()


def _merged(loaded: LoadedSettings, whole: LoadedSettings, model: str) -> list[Row]:
    """Return the rows of the user's file, with those of the tuned model as they were tuned."""
    if not any(origin.startswith("file") for origin in whole.origins.values()):
        return loaded.rows()
    own = [row for row in loaded.rows() if row[0][:2] == ("models", model)]
    others = [row for row in whole.rows() if row[0][:2] != ("models", model)]
    return [*others, *own]


def _is_said(key: tuple[str, ...], origin: str) -> bool:
    if key[0] == "models" and key[2] == "source":
        return True
    return origin != "default" and (key[0] == "models" or not origin.startswith("environment"))
