import base64
import json

import pytest

from inferpool.models.spec import USUAL_INTERFACE, Interface
from inferpool.service.batch.inputs import as_spoken, input_of
from inferpool.service.errors import InvalidInputError

ENCODED = base64.b64encode(b"bytes").decode()


@pytest.mark.parametrize(
    ("value", "interface", "expected"),
    [
        ({"b64": ENCODED}, USUAL_INTERFACE, ("bytes", b"bytes")),
        ({"b64": ENCODED}, Interface(envelope=False), ("document", None)),
        (ENCODED, Interface(accepts="image"), ("image", b"bytes")),
        (ENCODED, Interface(accepts="bytes", envelope=False), ("bytes", b"bytes")),
        (ENCODED, USUAL_INTERFACE, ("json", None)),
        ([1, 2], Interface(envelope=False), ("document", None)),
    ],
)
def test_an_input_is_read_as_its_model_says_that_bodies_are(
    value: object, interface: Interface, expected: tuple[str, bytes | None]
):
    text = json.dumps(value).encode()
    given = input_of(0, "a.json", text)
    kind, data = as_spoken(given, given.data, interface)
    assert (kind, bytes(data)) == (expected[0], text if expected[1] is None else expected[1])


def test_a_text_that_is_to_be_base64_is_refused():
    given = input_of(0, "a.json", b'"no!"')
    with pytest.raises(InvalidInputError, match="must be an encoded picture in base64"):
        as_spoken(given, given.data, Interface(accepts="image"))
