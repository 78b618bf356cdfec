"""Workers, in processes of their own, that run an archive's handler."""

import json
from pathlib import Path

import pytest

from inferpool.models.spec import Placement
from inferpool.workers.host.local import LocalEngine
from inferpool.workers.shared.errors import WorkerStartError
from inferpool.workers.shared.messages import ContentBlob, ItemError
from tests.models.torchserve.archives import make_folder
from tests.workers.conftest import arena, engine, no_process_left, put  # noqa: F401 - fixtures
from tests.workers.contract import started

CODE = """
import os
import torch

class Handler:
    def initialize(self, context):
        self.where = os.getcwd()
        self.properties = context.system_properties
        self.scale = torch.ones((), requires_grad=True)

    def handle(self, data, context):
        rows = [row["body"] for row in data]
        if "bad" in rows:
            raise ValueError("a bad row")
        loss = (self.scale * 3) ** 2
        loss.backward()  # under inference mode this would raise
        return [[row, self.where, self.properties["gpu_id"], len(rows)] for row in rows]
"""


def archive(folder: Path, code: str = CODE) -> str:
    make_folder(folder)
    (folder / "handler.py").write_text(code)
    return str(folder)


@pytest.mark.parametrize(
    ("device", "gpu"),
    [("cpu", None), pytest.param("sim:0", 0, marks=pytest.mark.simulated)],
)
async def test_a_worker_answers_all_requests_but_those_that_the_handler_fails_on(
    engine: LocalEngine,  # noqa: F811 - the fixture
    put,  # noqa: F811 - the same
    tmp_path: Path,
    device: str,
    gpu: int | None,
):
    folder = archive(tmp_path / "toy")
    worker = await started(
        engine, source=f"torchserve:{folder}", placement=Placement(devices=(device,))
    )
    assert worker.ready.interface.archive.name == "toy"

    rows = [put("a"), put("bad"), put("b", parameters=b'{"envelope": true}'), put("c")]
    done = await worker.run(rows)

    first, bad, content, last = done.outcomes
    assert json.loads(first) == ["a", folder, gpu, 1]
    assert isinstance(bad, ItemError)
    assert (bad.code, "a bad row" in bad.message) == ("model_error", False)
    assert isinstance(content, ContentBlob)
    assert bytes(content.data).endswith(b"\n  2\n]")
    assert json.loads(last) == ["c", folder, gpu, 2]
    await worker.stop(60)


async def test_a_handler_that_cannot_be_initialised_is_refused_with_its_line(
    engine: LocalEngine,  # noqa: F811 - the fixture
    tmp_path: Path,
):
    code = "def handle(data, context):\n    raise OSError('no licence')\n"
    folder = archive(tmp_path / "toy", code)

    with pytest.raises(WorkerStartError, match=r"no licence \(.*handler.py:2\)"):
        await started(engine, source=f"torchserve:{folder}")
