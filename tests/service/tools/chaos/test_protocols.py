import asyncio
import itertools
from contextlib import closing
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from inferpool.service.client.health import ServiceHealth
from inferpool.service.tools.chaos.load import ChaosTally, NumberedLoad
from inferpool.service.tools.chaos.plan import CallKind
from inferpool.service.tools.chaos.protocols import Open, opener
from inferpool.service.tools.chaos.questions import (
    EchoQuestion,
    KnownQuestion,
    Question,
    learn,
)
from inferpool.service.tools.chaos.run import rows_of_server
from inferpool.service.tools.chaos.servers import SERVER_FORMS
from inferpool.service.tools.chaos.texts import TEXT_FORMS
from inferpool.service.tools.trial import inputs
from inferpool.service.tools.trial.connection import Address, connected
from inferpool.service.tools.trial.inputs import TrialInput
from tests.clients.models import SETTINGS
from tests.e2e.running import running
from tests.fault_archive import make_fault_archive
from tests.ports import free_port
from tests.service.tools.fake_service import answer, serving

MODELS = ("types", "halves")
_NUM, _ODD = 12, 7


async def asked(
    address: Address, opened: Open, questions: list[Question], num: int = _NUM
) -> ChaosTally:
    """Return how the answers to numbered questions were judged."""
    tally = ChaosTally()
    load = NumberedLoad(
        address=address,
        questions=questions,
        tally=tally,
        timeout_s=60.0,
        is_over=lambda: tally.num_sent >= num,
        open=opened,
    )
    await load.run(itertools.count(), 2)
    return tally


@pytest.mark.slow
async def test_questions_are_asked_and_judged_alike_by_all_protocols():
    grpc_port = free_port()
    models = {"echo": {"source": "echo"}, **{name: SETTINGS[name] for name in MODELS}}
    with running(settings={"grpc_port": grpc_port, "models": models}) as service:
        async with connected(service.address) as connection:
            health = await connection.read_health()
        for protocol in set(get_args(CallKind)) - {*TEXT_FORMS, *SERVER_FORMS}:
            opened = opener(protocol, health, grpc_port)
            questions: list[Question] = [EchoQuestion("/predict/echo", 1)]
            with closing(await opened(service.address, lambda: None)) as chaos_connection:
                for model in health.models:
                    if model.name in MODELS:
                        given = inputs.made_up(model, 1, 2)
                        path = f"/predict/{model.name}"
                        questions += [
                            await learn(chaos_connection, path, each, 1e-3) for each in given
                        ]
            tally = await asked(service.address, opened, questions, 3 * len(questions))
            assert tally.right == tally.num_sent, (protocol, tally.examples)
            tally = await asked(service.address, opened, [EchoQuestion("/predict/nobody", 1)], 2)
            assert tally.wrong == 2, protocol
            assert " is wrong: 40" in tally.examples[0], "the status and the reason are shown"


@pytest.mark.slow
@pytest.mark.parametrize("protocols", [("torchserve",), ("sagemaker", "vertex")])
async def test_questions_are_asked_as_other_servers_are(
    protocols: tuple[CallKind, ...], tmp_path: Path
):
    settings: dict[str, object] = {"default_model": "echo", "models": {"echo": {"replicas": 1}}}
    is_torchserve = "torchserve" in protocols
    if is_torchserve:
        archive = {"source": str(make_fault_archive(tmp_path / "archive.mar")), "replicas": 1}
        settings["models"] = {"echo": {"replicas": 1}, "archive": archive}
    for protocol in protocols:
        settings |= {key: value for (key,), value, _ in rows_of_server(protocol, tmp_path)}
    body = msgspec.json.encode({"instances": [{"n": 21, "do": "ok"}]})
    given = TrialInput(name="one", body=body, content_type="application/json")
    right = msgspec.json.encode({"predictions": [{"twice": 42}]})
    with running(settings=settings) as service:
        async with connected(service.address) as connection:
            health = await connection.read_health()
        for protocol in protocols:
            opened = opener(protocol, health, 0, ["archive"])
            questions: list[Question] = [EchoQuestion("/predict/echo", 1)]
            if is_torchserve:
                questions.append(KnownQuestion("/predict/archive", given, right, 0))
            tally = await asked(service.address, opened, questions, 8)
            assert tally.right == 8, (protocol, tally.examples)
            if protocol != "vertex":  # which asks the default model, whatever the name is
                missing = EchoQuestion("/predict/nobody", 1)
                tally = await asked(service.address, opened, [missing], 2)
                assert tally.wrong == 2, protocol
                assert " is wrong: 404" in tally.examples[0]


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (503, {"code": 503, "message": "Prediction failed"}, (500, "model_error")),
        (500, {"code": 500, "message": "3 workers died while they"}, (500, "worker_crashed")),
        (
            400,
            {"code": 400, "message": "2 workers have died while they computed this very input"},
            (422, "quarantined"),
        ),
        (503, {"code": 503, "message": "the queue is full"}, (503, "")),
        (500, {"error": "it failed", "code": "model_error"}, (500, "model_error")),
    ],
)
def test_errors_of_other_servers_are_read_as_those_of_predict(
    status: int, body: dict[str, object], expected: tuple[int, str]
):
    form = SERVER_FORMS["torchserve"]
    assert form.problem(status, msgspec.json.encode(body))[:2] == expected


TEXTS = "tests.text_model:TextFaultModel"
TEXT_MODELS = {
    "encoder": {"source": TEXTS},
    "reranker": {"source": TEXTS, "options": {"task": "reranking"}},
}
_TEXT_PROTOCOLS = {"embeddings": "encoder", "rerank": "reranker", "tei": "encoder"}


@pytest.mark.slow
async def test_questions_about_texts_are_asked_and_judged_by_the_protocols_of_texts():
    models: dict[str, dict[str, object]] = {
        name: {**model, "replicas": 1} for name, model in TEXT_MODELS.items()
    }
    with running(settings={"tei": True, "models": models}) as service:
        async with connected(service.address) as connection:
            health = await connection.read_health()
        states = {model.name: model for model in health.models}
        for protocol, name in _TEXT_PROTOCOLS.items():
            opened = opener(protocol, health, 0)  # type: ignore[arg-type]  # they are such
            given = inputs.made_up(states[name], 1, 3)
            path = f"/predict/{name}"
            async with connected(service.address) as plain:
                own = [await learn(plain, path, each, 1e-3) for each in given]
            tally = await asked(service.address, opened, [*own], 6)
            assert tally.right == 6, (protocol, tally.examples)  # as `/predict` says
            other = next(each for each in states if each != name)
            (unfit,) = inputs.made_up(states[other], 1, 1)
            for one in (given[0], unfit):
                question = KnownQuestion(f"/predict/{other}", one, b"{}", 0)
                tally = await asked(service.address, opened, [question], 2)
                assert tally.wrong == 2, protocol
                assert "is wrong: 4" in tally.examples[0]  # 400, or 424


def answer_of(number: int, texts: list[bytes], id: str) -> bytes:
    """Return an answer of version 2 with these elements."""
    data = b"".join(len(each).to_bytes(4, "little") + each for each in texts)
    parameters = {"binary_data_size": len(data), "content_type": "application/json"}
    output = {"name": "output", "datatype": "BYTES", "shape": [1, 1], "parameters": parameters}
    head = msgspec.json.encode({"model_name": "echo", "id": id, "outputs": [output]})
    line = b"HTTP/1.1 200 OK\r\nx-request-id: %d\r\ncontent-length: %d\r\n"
    length = b"inference-header-content-length: %d\r\n\r\n" % len(head)
    return line % (number, len(head + data)) + length + head + data


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        ("right", (_NUM, 0, 0)),
        ("of another", (_NUM - 1, 1, 0)),
        ("two", (_NUM - 1, 1, 0)),
        ("other id", (_NUM - 1, 1, 0)),
        ("failed", (_NUM - 1, 1, 0)),
        ("lost", (_NUM - 1, 0, 1)),
    ],
)
async def test_a_wrong_answer_of_another_protocol_is_seen(act: str, expected: tuple[int, ...]):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            fields = dict(line.split(": ", 1) for line in head.decode().splitlines()[1:] if line)
            body = await reader.readexactly(int(fields["Content-Length"]))
            number = int(fields["X-Request-ID"])
            element = body[int(fields["inference-header-content-length"]) + 4 :]
            answers = {
                "of another": answer_of(number, [b'{"n":1}'], str(number)),
                "two": answer_of(number, [element, element], str(number)),
                "other id": answer_of(number, [element], "9"),
                "failed": answer(number, {"error": "-", "code": "worker_crashed"}, 500),
            }
            if number == _ODD and act == "lost":
                return
            right = answer_of(number, [element], str(number))
            writer.write(answers.get(act, right) if number == _ODD else right)

    async with serving(serve) as address:
        opened = opener("v2", ServiceHealth(models=[]), 0)
        tally = await asked(address, opened, [EchoQuestion("/predict/echo", 1)])
    assert (tally.right, tally.wrong, tally.lost) == expected, tally.examples
