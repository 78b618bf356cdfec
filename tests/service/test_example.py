from types import SimpleNamespace

import pytest

from models.spec import TensorSpec
from service.example import command_to_try


def test_there_is_no_command_to_try_where_nobody_knows_what_the_model_takes():
    inputs = (TensorSpec(name="input", dtype="float32", shape=()),)
    pool = SimpleNamespace(name="m", example=None, inputs=inputs)
    assert command_to_try("http://127.0.0.1:1", pool) == ""  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("example", "inputs", "data"),
    [
        ("Where's it?", (), """'{"instances": ["Where'"'"'s it?"]}'"""),
        (None, (), "hello"),
        (
            None,
            (TensorSpec(name="x", dtype="float32", shape=(-1, 2)),),
            """'{"instances": [[0, 0]]}'""",
        ),
    ],
)
def test_the_command_to_try_sends_what_the_model_takes(example, inputs, data):
    pool = SimpleNamespace(name="m", example=example, inputs=inputs)
    command = command_to_try("http://127.0.0.1:1", pool)  # type: ignore[arg-type]
    assert command.startswith("curl http://127.0.0.1:1/predict/m -H ")
    assert command.endswith(f" {data}")


@pytest.mark.parametrize(
    ("url", "asked"),
    [
        ("https://0.0.0.0:8000", "https://127.0.0.1:8000"),
        ("http://[::]:80", "http://[::1]:80"),
        ("http://10.0.0.0:80", "http://10.0.0.0:80"),
    ],
)
def test_the_command_to_try_can_be_given_on_this_host(url, asked):
    pool = SimpleNamespace(name="m", example=None, inputs=())
    assert f" {asked}/predict/m " in command_to_try(url, pool)  # type: ignore[arg-type]
