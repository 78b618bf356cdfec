"""Forms that are one instance, as models read them in a worker."""

import numpy as np
import pytest
import torch

from inferpool.models.base import Model
from inferpool.models.errors import InputError
from inferpool.models.example import own_example
from inferpool.models.inputs import features_of
from inferpool.models.item import Item
from inferpool.models.spec import TensorSpec
from inferpool.models.upload import Upload, pack_form
from inferpool.models.vision.images import decode_image
from tests.models.items import jpeg

TWO = (
    TensorSpec(name="a", dtype="float32", shape=(-1, 2)),
    TensorSpec(name="b", dtype="int64", shape=(-1,)),
)


def item_of(**fields: bytes | Upload) -> Item:
    pieces, headers = pack_form(fields.items())
    return Item(kind="form", payload=memoryview(b"".join(pieces)), headers=headers)


def test_a_picture_in_a_form_is_decoded_like_its_bytes():
    photo = jpeg("chelsea")
    item = item_of(text=b'"cat"', image=Upload(data=photo, media_type="image/jpeg"))
    form = item.json()
    assert isinstance(form, dict)
    assert form["text"] == "cat"
    assert decode_image(form["image"]).tobytes() == decode_image(photo).tobytes()


def test_a_form_fills_the_declared_inputs_of_a_model():
    raw = np.array([1.5, 2.5], "<f4").tobytes()
    for a in (b"[1.5, 2.5]", Upload(data=raw)):
        found = features_of(item_of(a=a, b=b'"3"'), TWO)
        assert torch.equal(found["a"], torch.tensor([1.5, 2.5]))
        assert torch.equal(found["b"], torch.tensor(3))
    with pytest.raises(InputError, match="'b' missing"):
        features_of(item_of(a=b"[1, 2]"), TWO)
    with pytest.raises(InputError, match=r"instance.b: expected a whole number"):
        features_of(item_of(a=b"[1, 2]", b=b'"three"'), TWO)
    with pytest.raises(InputError, match=r"instance.a: a file of numpy.save"):
        features_of(item_of(a=Upload(data=b"\x93NUMPY"), b=b"1"), TWO)


def test_an_example_of_a_form_is_one_with_its_files():
    photo = Upload(data=b"jpg", filename="a.jpg")
    fields = {"text": "cat", "image": photo, "k": [1], "more": [photo, photo]}

    class Described(Model):
        form = "instance"
        example = fields

    found = own_example(Described())
    assert found is not None
    assert found.item is not None
    assert found.item.json() == fields
    assert found.text == b'{"text":"cat","image":{"b64":"anBn"},"k":[1],"more":[%b,%b]}' % (
        (b'{"b64":"anBn"}',) * 2
    )


def test_an_example_without_an_upload_is_json_with_the_uploads_in_it():
    class Captioned(Model):
        form = "instance"
        example = property(lambda self: {"image": {"b64": "anBn"}})

    found = own_example(Captioned())
    assert found is not None
    assert found.item is not None
    assert (found.item.kind, found.item.json()) == ("json", {"image": Upload(data=b"jpg")})


def test_an_example_is_read_as_the_model_says_that_bodies_are():
    value = {"x": {"b64": "AAAA"}}

    class Bare(Model):
        envelope = False
        example = value

    class Pictures(Model):
        accepts = "image"
        example = "AAAA"

    bare, picture = own_example(Bare()), own_example(Pictures())
    assert bare is not None
    assert picture is not None
    assert bare.item is not None
    assert picture.item is not None
    assert bare.item.json() == value
    assert (picture.item.kind, bytes(picture.item.payload)) == ("image", b"\0\0\0")


def test_nothing_in_a_document_becomes_bytes_of_a_tensor():
    text = memoryview(b'{"x":{"b64":"AAAA"}}')
    spec = TensorSpec(name="x", dtype="uint8", shape=(-1, 3))
    assert features_of(Item(kind="json", payload=text), [spec])["x"].tolist() == [0, 0, 0]
    with pytest.raises(InputError):
        features_of(Item(kind="json", payload=text, is_document=True), [spec])
