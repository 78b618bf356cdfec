"""The docstrings under the fields of dataclasses, as descriptions of a schema's properties."""

import ast
import inspect
import re
from collections import ChainMap
from collections.abc import Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any

from inferpool.service.api.routes import admin, events, health


def describe(schemas: Mapping[str, Any]) -> None:
    """Describe, in place, the properties of those schemas that are made from our dataclasses."""
    for module in (health, events, admin):
        for name, fields in _docstrings_of(module).items():
            for field, text in fields.items():
                if name in schemas and field in schemas[name]["properties"]:
                    schemas[name]["properties"][field]["description"] = text


@lru_cache
def _docstrings_of(module: ModuleType) -> Mapping[str, Mapping[str, str]]:
    """By class and field, with a space for each line break."""
    tree = ast.parse(inspect.getsource(module))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    found: dict[str, dict[str, str]] = {}
    for node in classes:
        bases = [found.get(base.id, {}) for base in node.bases if isinstance(base, ast.Name)]
        found[node.name] = dict(ChainMap(dict(_fields_of(node)), *bases))
    return found


def _fields_of(node: ast.ClassDef) -> list[tuple[str, str]]:
    found = []
    for field, after in zip(node.body, node.body[1:], strict=False):
        match field, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found.append((name, re.sub(r"\s+", " ", text)))
    return found
