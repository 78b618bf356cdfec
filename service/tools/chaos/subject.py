"""The settings of the service under test: the user's, with changes that the test needs."""

from collections.abc import Iterator, Mapping, Sequence

from inferpool.service.settings.loader import LoadedSettings, Row
from inferpool.service.settings.names import Key
from inferpool.service.tools.trial.service import rows_of

BATCH_TIMEOUT_S = 5.0
"""Time after which a stopped worker is found, unless the user has set another."""
POISONABLE = "inferpool.models.sources.poisonable:Poisonable"


def rows_for(loaded: LoadedSettings, *, can_be_poisoned: bool) -> list[Row]:
    """Return the user's settings as rows, with the changes that the test needs.

    `can_be_poisoned` wraps the models so that an input can kill their worker.
    """
    every = rows_of(loaded)
    rows = [row for row in every if row[0][0] != "models"]
    for name, model in loaded.settings.models.items():
        own = [row for row in every if row[0][:2] == ("models", name)]
        rows += _wrapped(own, name, dict(model.options)) if can_be_poisoned else own
    return [_changed(*row) for row in rows]


def _changed(key: Key, value: object, origin: str) -> Row:
    if key == ("speed_search",):
        return key, False, "chaos"  # its process and its change of workers are no fault of ours
    if key[-1] == "batch_timeout_s" and origin == "default":
        return key, BATCH_TIMEOUT_S, "chaos"
    return key, value, origin


def _wrapped(rows: Sequence[Row], name: str, options: Mapping[str, object]) -> Iterator[Row]:
    place = ("models", name)
    inner: dict[str, object] = {"options": options}
    for key, value, origin in rows:
        if key[2] in ("source", "weights"):
            inner[key[2]] = value
            outer = POISONABLE if key[2] == "source" else "DEFAULT"
            yield key, outer, "chaos"
        elif key[2] != "options":
            yield key, value, origin
    for option, value in inner.items():
        yield (*place, "options", option), value, "chaos"
