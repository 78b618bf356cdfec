"""Kinds of settings with their bounds: no number, text, list or table is without a greatest one.

A slip of the hand, such as three zeros too many, is then refused with a sentence. Otherwise the
service would plan, allocate or wait as it was told.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

MAX_TEXT_LENGTH = 4096
"""Characters of a text: PATH_MAX, the longest path on Linux."""
MAX_PROCESSES = 4096
"""Processes of one model on a host: those that compute, and their decoders."""
MAX_MODELS = 1000
_MAX_ENTRIES = 256
_MAX_LEVELS = 32
_MAX_VALUES = 100_000
_MAX_NESTED = 10_000
_NESTED = (Mapping, list, tuple)
DAY_S = 86_400
YEAR_S = 366 * DAY_S


def _check_tree(table: Mapping[str, object]) -> Mapping[str, object]:
    """Check how many values a table has, and how deep they are.

    A long list of texts or numbers, such as the labels of a large data set, is only counted.
    """
    level: list[Any] = [table]
    num_values = num_nested = num_levels = 0
    while level:
        num_levels += 1
        if num_levels > _MAX_LEVELS + 1:
            raise ValueError(f"has tables in tables over more than {_MAX_LEVELS} levels")
        below: list[Any] = []
        for each in level:
            values = each.values() if isinstance(each, Mapping) else each
            num_values += len(values)
            num_nested += 1
            if num_values > _MAX_VALUES or num_nested > _MAX_NESTED:
                raise ValueError(
                    f"has more than {_MAX_VALUES} values, or {_MAX_NESTED} lists and tables"
                )
            if any(issubclass(kind, _NESTED) for kind in set(map(type, values))):
                below += [value for value in values if isinstance(value, _NESTED)]
        level = below
    return table


Auto = Literal["auto"]
Text = Annotated[str, Field(max_length=MAX_TEXT_LENGTH)]
Texts = Annotated[Sequence[Text], Field(max_length=1000)]
Table = Annotated[Mapping[str, object], Field(max_length=_MAX_ENTRIES), AfterValidator(_check_tree)]
"""Values that the user names."""
Copies = Annotated[int, Field(ge=1, le=1024)]
"""Replicas, devices of one, or threads: more than the largest hosts have cores for."""
Bytes = Annotated[int, Field(ge=1024, le=2**40)]
Length = Annotated[int, Field(ge=1, le=1_000_000)]
Tries = Annotated[int, Field(ge=0, le=1_000_000)]
Ratio = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=DAY_S, allow_inf_nan=False)]
SecondsOrZero = Annotated[float, Field(ge=0, le=DAY_S, allow_inf_nan=False)]
