import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inferpool.models.spec import USUAL_INTERFACE, ArchiveFacts, Interface, TensorSpec
from inferpool.service.api.openapi.predict import PIXEL
from inferpool.service.example import try_or_ask
from inferpool.service.settings.settings import Settings
from tests.certificates import make_authority, make_certificate, make_signed
from tests.service.api.fakes import spec

URL = "http://127.0.0.1:1"
ARCHIVE = Interface(archive=ArchiveFacts(name="Iris", version="1.0", handler="h.py"))


def pool_of(
    inputs: Sequence[TensorSpec] = (),
    example: object = None,
    *,
    reads_own_form: bool = True,
    interface: Interface = USUAL_INTERFACE,
) -> Any:
    return SimpleNamespace(
        name="m",
        example=example,
        inputs=inputs,
        reads_own_form=reads_own_form,
        interface=interface,
    )


def told(
    *inputs: TensorSpec,
    example: object = None,
    reads_own_form: bool = False,
    url: str = URL,
    interface: Interface = USUAL_INTERFACE,
) -> tuple[str, str]:
    pool = pool_of(inputs, example, reads_own_form=reads_own_form, interface=interface)
    return try_or_ask(url, pool, Settings.model_construct(predict_keys=()))


@pytest.mark.parametrize(
    ("example", "inputs", "data"),
    [
        ("Where's it?", (), """'{"instances": ["Where'"'"'s it?"]}'"""),
        (None, (spec(-1, 2),), """'{"instances": [[0, 0]]}'"""),
        (None, (spec(-1, -1, dtype="bool"),), """'{"instances": [[false]]}'"""),
        (
            None,
            (spec(-1), spec(-1, 2, name="y")),
            """'{"instances": [{"x": 0, "y": [0, 0]}]}'""",
        ),
    ],
)
def test_the_command_fits_the_model(example: object, inputs: tuple[TensorSpec, ...], data: str):
    kind, command = told(*inputs, example=example)
    assert kind == "try"
    assert command == f"curl {URL}/predict/m -H 'Content-Type: application/json' -d {data}"


def test_a_model_of_pictures_gets_the_packaged_one_or_a_pixel_where_that_is_gone(tmp_path: Path):
    image = spec(-1, -1, -1, 3, name="image", dtype="uint8")
    kind, command = told(image)
    assert kind == "try"
    (photo,) = re.findall(r" -H 'Content-Type: image/jpeg' --data-binary @(\S+)$", command)
    assert Path(photo).read_bytes().startswith(b"\xff\xd8")
    pool = pool_of((image,), reads_own_form=False)
    settings = Settings.model_construct(predict_keys=())
    assert PIXEL in try_or_ask(URL, pool, settings, photo=tmp_path / "gone.jpg")[1]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_a_certificate_of_ones_own_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pool = pool_of(example=1)
    authority = make_authority(tmp_path)
    pairs = make_certificate(tmp_path), make_signed(tmp_path, "signed", authority)
    for certificate, key in pairs:
        settings = Settings.model_construct(
            predict_keys=(), tls_certificate=str(certificate), tls_key=str(key)
        )
        assert try_or_ask(URL, pool, settings)[1].endswith(f" --cacert {certificate}")
    elsewhere = Settings.model_construct(
        predict_keys=(), tls_certificate=str(authority[0]), tls_key=str(authority[1])
    )
    assert try_or_ask(URL, pool, elsewhere)[1].endswith(" --insecure"), "it is for another host"
    monkeypatch.setenv("SSL_CERT_FILE", str(authority[0]))  # as if the system knew it
    assert "--cacert" not in try_or_ask(URL, pool, settings)[1]


def test_zeros_that_are_too_many_to_write_out_are_sent_as_bytes():
    assert told(spec(-1, 3, 224, 224)) == (
        "try",
        f"head -c 602112 /dev/zero | curl '{URL}/predict/m?dtype=float32&shape=3,224,224' "
        "-H 'Content-Type: application/octet-stream' --data-binary @-",
    )


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (told(), "what its `preprocess` reads; the model shows no `example`"),
        (told(spec(-1, 3), reads_own_form=True), "what its `preprocess` reads"),
        (told(interface=ARCHIVE), "what its handler reads"),
        (told(spec()), "'x' (float32) as application/safetensors, or as JSON"),
        (told(spec(-1, 99), spec(-1, name="y")), "'x' (float32) and 'y' (float32) as "),
        (told(example="x" * 2000), "its example is too long for a line, and on the page"),
    ],
)
def test_it_says_how_to_ask_if_no_command_is_known(kind: tuple[str, str], sentence: str):
    assert kind[0] == "ask"
    assert kind[1].startswith(f"POST to {URL}/predict/m")
    assert sentence in kind[1]


@pytest.mark.parametrize(
    ("url", "asked"),
    [
        ("https://0.0.0.0:8000", "https://127.0.0.1:8000"),
        ("http://[::]:80", "http://[::1]:80"),
        ("http://10.0.0.0:80", "http://10.0.0.0:80"),
    ],
)
def test_the_command_to_try_works_on_this_host(url: str, asked: str):
    assert f" {asked}/predict/m " in told(example=1, url=url)[1]


def test_a_key_is_not_shown():
    pool = pool_of(example=1)
    settings = Settings.model_construct(predict_keys=("digest",), predict_keys_file="a b")
    assert try_or_ask(URL, pool, settings)[1].endswith(""" -H "X-API-Key: $(head -n 1 'a b')\"""")
    settings = Settings.model_construct(predict_keys=("digest",), predict_keys_file=None)
    assert try_or_ask(URL, pool, settings)[1].endswith('{INFERPOOL_PREDICT_KEYS%%,*}"')


def test_a_model_is_asked_at_its_own_path_and_without_an_envelope_as_it_says():
    interface = Interface(envelope=False, path="/classify", accepts="bytes")
    asked = f"curl {URL}/classify -H 'Content-Type: application/json' -d"
    for example, data in (({"x": 1}, '{"x": 1}'), ({"b64": "AAAA"}, '"AAAA"'), (3, "3")):
        command = f"{asked} {shlex.quote(data)}"
        assert told(example=example, interface=interface) == ("try", command)


def test_an_archive_is_asked_at_torchserves_path_where_that_is_served():
    settings = Settings.model_construct(predict_keys=(), torchserve="config.properties")
    _, text = try_or_ask(URL, pool_of(interface=ARCHIVE), settings)
    assert text == f"POST to {URL}/predictions/Iris what its handler reads"
