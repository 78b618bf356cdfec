"""A model that answers with contents of its own, for tests."""

from collections.abc import Mapping

import torch

from inferpool.models.base import Model
from inferpool.models.content import Content
from inferpool.models.errors import InputError
from inferpool.models.item import Features, Item

PIXEL = b"\x89PNG one pixel"


class Drawing(Model):
    """Draws a number: 1 draws a page, 2 sets a header that it may not set, 3 raises."""

    media_types = ("image/png", "text/html")
    example = 0

    def preprocess(self, item: Item) -> Features:
        value = item.json()
        if not isinstance(value, int):
            raise InputError("instance: must be a whole number")
        return {"x": torch.tensor(value)}

    def forward(self, batch: Features) -> Features:
        return batch

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        number = int(outputs["x"])
        if number == 1:
            return Content(b"<b>1</b>", "text/html; charset=utf-8")
        if number == 3:
            raise InputError("3 cannot be drawn")
        name = "Set-Cookie" if number == 2 else "X-Number"
        return Content(PIXEL * max(1, number), "image/png", {name: str(number)})


class UndeclaredDrawing(Drawing):
    """Draws alike, and does not say which types it has."""

    media_types = ()


class DrawingOrNumber(Drawing):
    """Answers with the number, or draws it for calls that prefer that."""

    media_types = ("image/png",)

    def render(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        return int(outputs["x"])

    def render_content(self, outputs: Features, parameters: Mapping[str, object]) -> object:
        return super().render(outputs, parameters)
