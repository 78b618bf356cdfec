"""What would be right for a setting, in words: for messages and for the list of all settings."""

from collections.abc import Sequence
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic.fields import FieldInfo

from inferpool.service.settings.keys import Keys
from inferpool.service.settings.tracing import TraceHeaders


def expected(field: FieldInfo) -> str:
    """What would be right for a field, for people."""
    return _expected_of(field.annotation, field.metadata)


def _expected_of(annotation: object, metadata: Sequence[object]) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " or ".join(_expected_of(arg, metadata) for arg in args if arg is not type(None))
    if origin is Annotated:
        return _expected_of(args[0], [each for info in args[1:] for each in info.metadata])
    if origin is Literal:
        return " or ".join(f'"{choice}"' for choice in args)
    if annotation is bool:
        return "true or false"
    if annotation is str:
        return "a text in quotes that is not empty"
    if annotation is Keys:
        return "keys"
    if annotation is TraceHeaders:
        return "headers"
    if origin is Sequence:
        return "a list of texts"
    if annotation not in (int, float):
        return "a table"
    noun = "a whole number" if annotation is int else "a number"
    low = next((each.ge for each in metadata if isinstance(each, Ge)), None)
    high = next((each.le for each in metadata if isinstance(each, Le)), None)
    if any(isinstance(each, Gt) for each in metadata):
        return f"{noun} above 0" if high is None else f"{noun} above 0 and up to {high}"
    if low is not None and high is not None:
        return f"{noun} from {low} to {high}"
    return noun if low is None else f"{noun} of at least {low}"
