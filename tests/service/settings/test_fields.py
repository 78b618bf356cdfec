import sys

from inferpool.service.settings.fields import fields_of

SOURCE = '''
from typing import Literal
from pydantic import Field

Colour = Literal["red", "green"]
raise RuntimeError("this module is read, never imported")

class Other:
    number: int = 1
    """A field of another class."""

class Wanted:
    colour: Colour = "red"
    """The colour
    of 50 % of it."""
    num_parts: int = Field(3, ge=1)
    """How many."""
    options: dict = Field(default_factory=dict)
    """More."""
    is_new: bool = False
    """New."""
    untold: int = 1
    needed: int
    """Has no default."""
    place: Annotated[str, "PLACE"] = "here"
    """Where it is. It may be anywhere."""
'''


def test_fields_are_read_from_the_source_without_an_import(tmp_path, monkeypatch):
    (tmp_path / "wanted_fields.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    fields = list(fields_of("wanted_fields", "Wanted"))
    assert [(each.name, each.default, each.kind, each.choices) for each in fields] == [
        ("colour", "red", "Colour", ("red", "green")),
        ("num_parts", 3, "int", None),
        ("options", {}, "dict", None),
        ("is_new", False, "bool", None),
        ("needed", None, "int", None),
        ("place", "here", "str", None),
    ]
    assert [(each.flag, each.help) for each in fields] == [
        ("--colour", "The colour of 50 %% of it. (default: red)"),
        ("--num-parts", "How many. (default: 3)"),
        ("--options", "More."),
        ("--is-new", "New."),
        ("--needed", "Has no default."),
        ("--place", "Where it is. It may be anywhere. (default: here)"),
    ]
    assert (fields[-1].brief, fields[-1].metavar) == ("Where it is. (default: here)", "PLACE")
    assert [each.name for each in fields if each.is_required] == ["needed"]
    assert "wanted_fields" not in sys.modules
