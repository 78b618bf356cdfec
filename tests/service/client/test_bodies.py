"""Forms and whole documents, as the client writes them and the service reads them."""

import io
import json
from pathlib import Path

import pytest
from PIL import Image

from inferpool.models.spec import Interface
from inferpool.models.upload import Upload
from inferpool.service.api.codecs.requests import decode
from inferpool.service.client.bodies import RequestBody, make_body
from inferpool.service.client.errors import UnsendableError
from tests.models.items import jpeg
from tests.service.api.codecs.test_whole import item_in
from tests.service.api.fakes import head


def read(body: RequestBody, **says: object) -> object:
    """Return the only instance of a body, as a model with such an interface gets it."""
    asked = head(interface=Interface(**says))  # type: ignore[arg-type]
    content = b"".join(body)
    assert body.headers["Content-Length"] == str(len(content))
    return item_in(decode(body.headers["Content-Type"].encode(), [content], asked)).json()


def test_a_dict_with_a_file_in_it_is_a_form(tmp_path: Path):
    photo = tmp_path / 'my "cat".jpg'
    photo.write_bytes(jpeg("chelsea"))
    fields = {
        "image": photo,
        "open": io.BytesIO(b"GIF8"),
        "raw": b"\x00\x01",
        "both": [photo, photo],
        "text": "hello",
        "like": " [not json",
        "numbers": [1, 2.5],
        "number": 3,
        "nothing": None,
    }
    body = make_body(fields, {"top_k": 2})
    assert body.query == {"top_k": "2"}
    cat = Upload(data=photo.read_bytes(), media_type="image/jpeg", filename='my "cat".jpg')
    assert read(body, form="instance") == {
        **fields,
        "image": cat,
        "open": Upload(data=b"GIF8", media_type="image/gif", filename="open"),
        "raw": Upload(data=b"\x00\x01", media_type="application/octet-stream", filename="raw"),
        "both": [cat, cat],
    }


def test_a_picture_in_a_dict_is_a_file_of_a_form():
    body = make_body({"image": Image.new("RGB", (2, 3)), "text": "red"}, None)
    found = read(body, form="instance")
    assert isinstance(found, dict)
    assert Image.open(io.BytesIO(found["image"].data)).size == (2, 3)
    assert found["image"].media_type == "image/png"


def test_a_form_of_the_client_has_parameters_for_models_that_read_forms_as_ever():
    body = make_body({"file": io.BytesIO(jpeg("chelsea")), "top_k": 3, "name": "x"}, None)
    decoded = decode(body.headers["Content-Type"].encode(), [b"".join(body)], head())
    assert [payload.kind for payload in decoded.payloads] == ["image"]
    assert json.loads(decoded.parameters) == {"top_k": 3, "name": "x"}


@pytest.mark.parametrize("value", [{"instances": 1}, "text", [1, [2]], None, 3.5])
def test_without_an_envelope_a_value_is_the_whole_body(value: object, tmp_path: Path):
    for given in (value, tmp_path / "it.json"):
        (tmp_path / "it.json").write_text(json.dumps(value))
        body = make_body(given, {"k": 1}, envelope=False)
        assert body.query == {"k": "1"}
        assert b"".join(body) == json.dumps(value, separators=(",", ":")).encode()
        assert read(body, envelope=False) == value


def test_a_file_that_cannot_be_read_is_told_as_such(tmp_path: Path):
    with pytest.raises(UnsendableError, match="cannot be read"):
        make_body({"image": tmp_path / "gone.jpg"}, None)
