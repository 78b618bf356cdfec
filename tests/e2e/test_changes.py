"""Changes of a real service by its admin API: validations, and answers that come at once."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from inferpool.models.vision.photos import sample_jpegs
from inferpool.service.cli.main import run
from tests.e2e.running import Running, running, until
from tests.e2e.swapping import ADMIN, KEYS, SwapOperator, serving

LABELS = "tests.worse_model:Worse"
QUICK = {"wait_s": 0, "rollback_s": 0, "max_latency_ratio": 1e6}


@pytest.fixture(scope="module")
def photographs() -> Iterator[Running]:
    """A service of a classifier of images, named m."""
    model = {"source": "tests.small_classifier:SmallClassifier", "replicas": 1}
    with running("--front-ends", "1", settings={"models": {"m": model}}, env=KEYS) as service:
        yield service


@pytest.fixture(scope="module")
def numbers() -> Iterator[Running]:
    """A service of a model that labels numbers."""
    with serving("--front-ends", "1", source=LABELS) as service:
        yield service


def swap(service: Running, **request: object) -> tuple[int, Mapping[str, Any]]:
    return asyncio.run(SwapOperator(service.address).post("versions", {**QUICK, **request}))


def look(service: Running) -> Mapping[str, Any]:
    return asyncio.run(SwapOperator(service.address).look())


@pytest.fixture
def images(photographs: Running, tmp_path: Path) -> Path:
    """A folder of images by the labels that the service gives them."""
    for number, data in enumerate(sample_jpegs()[:8]):
        answer = photographs.post(
            "/predict/m", content=data, headers={"Content-Type": "image/jpeg"}
        )
        folder = tmp_path / "images" / answer.json()["predictions"][0][0]["label"]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(data)
    return tmp_path / "images"


def test_a_folder_of_images_decides_between_versions(photographs: Running, images: Path):
    before = look(photographs)["version"]
    moved = {"source": "tests.worse_model:SmallShuffled"}
    status, answer = swap(photographs, validation=str(images), **moved)
    assert (status, answer["code"]) == (422, "version_refused")
    figures = answer["figures"]
    assert (figures["num_validated"], figures["accuracy"], figures["accuracy_before"]) == (8, 0, 1)
    assert look(photographs)["version"] == before
    status, answer = swap(photographs, validation=str(images))
    assert status == 200, answer
    assert answer["versions"][0]["figures"]["accuracy"] == 1


def test_a_validation_that_cannot_be_used_is_named_in_one_sentence_and_changes_nothing(
    photographs: Running, images: Path, tmp_path: Path
):
    before = look(photographs)["version"]
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    unknown = tmp_path / "unknown" / "cat"
    unknown.mkdir(parents=True)
    (unknown / "1.jpg").write_bytes(sample_jpegs()[0])
    for path, said in (
        (str(tmp_path / "nowhere"), "there is no file or folder"),
        (str(tmp_path / "empty"), "has no labelled inputs; give the folder of"),
        (str(tmp_path / "unknown"), "neither it nor the version of now labels any of the 1 inputs"),
    ):
        status, answer = swap(photographs, validation=path)
        assert status == 422, answer
        assert said in answer["detail"]
        assert "\n" not in answer["detail"]
    broken = next(images.glob("*/*.jpg"))
    broken.write_bytes(broken.read_bytes()[:300])
    status, answer = swap(photographs, validation=str(images))
    assert (status, answer["code"]) == (422, "invalid_input")
    assert str(broken) in answer["detail"]
    assert "\n" not in answer["detail"]
    asyncio.run(SwapOperator(photographs.address).until_quiet())
    assert look(photographs)["version"] == before
    assert not {each["state"] for each in look(photographs)["versions"]} & {"comparing", "loading"}


SLIPS = (10**9, 10**30, -1, 1e308, True, "many", [1] * 9999, None)


@pytest.mark.parametrize("field", ["replicas", "threads_per_replica", "decoders", "num_inputs"])
def test_a_slip_of_an_operator_is_answered_at_once_and_the_service_goes_on(
    numbers: Running, field: str
):
    before = look(numbers)["version"]
    for slip in SLIPS:
        status, answer = swap(numbers, **{field: slip})
        assert (status, answer["code"]) == (422, "invalid_input")
        assert answer["detail"].startswith(f"{field}: "), answer
        assert " to " in answer["detail"]
        numbers.predict({"n": 1})
    assert look(numbers)["version"] == before


def test_more_workers_than_there_is_memory_for_are_refused_before_any_starts(numbers: Running):
    body = {"name": "n", "source": LABELS, "replicas": 1024, "decoders": 3}
    answer = numbers.post("/admin/models", json=body, headers={"X-API-Key": ADMIN})
    assert answer.status_code == 422, answer.text
    assert answer.json()["code"] == "version_refused"
    assert "lower replicas" in answer.json()["detail"]
    assert numbers.predict({"n": 1})


@pytest.mark.measures
def test_calls_wait_for_no_slip_of_an_operator(numbers: Running):
    longest_s = [0.0]
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            began = time.perf_counter()
            numbers.predict({"n": 1})
            longest_s[0] = max(longest_s[0], time.perf_counter() - began)

    asker = threading.Thread(target=ask)
    asker.start()
    try:
        for slip in SLIPS:
            for field in ("replicas", "max_batch_size", "wait_s", "options"):
                assert swap(numbers, **{field: slip})[0] == 422
    finally:
        is_over.set()
        asker.join()
    assert longest_s[0] < 2


@pytest.mark.slow
def test_a_file_of_lines_decides_between_versions_by_the_command(
    numbers: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setenv("INFERPOOL_ADMIN_KEYS", ADMIN)
    file = tmp_path / "right.jsonl"
    rows = [{"instance": {"n": n}, "label": f"rest {n % 5}"} for n in range(20)]
    file.write_text("\n".join(map(json.dumps, rows)))
    flags = ("--validation", str(file), "--wait-s", "0", "--max-latency-ratio", "1000000")
    worse = ("--set", 'options={"nan_in": 10}')
    command = ("models", "swap", "m", "--url", numbers.url, *flags)
    before = look(numbers)["version"]
    assert run([*command, *worse]) == 1
    said = capsys.readouterr().err
    assert "it labels 90.00% of the 20 inputs of the validation right" in said
    assert f"version {before} serves on" in said
    assert run(command) == 0
    assert "serves (" in capsys.readouterr().out
    assert look(numbers)["version"] > before
    file.write_text('{"instance": {"n": 1}, "label": "rest 1"}\nno JSON\n')
    assert run(command) == 2
    assert f"validation: {file}, line 2: " in capsys.readouterr().err


def test_a_version_whose_outputs_are_not_finite_is_refused_even_if_it_is_forced(numbers: Running):
    before = look(numbers)["version"]
    spoilt = {"policy": "force", "options": {"nan_in": 1}}
    status, answer = swap(numbers, **spoilt)
    assert (status, answer["code"]) == (422, "version_refused")
    assert "did not come up: Worse gives NaN or an infinity in 'share'" in answer["detail"]
    assert "say `finite_outputs = False`" in answer["detail"]
    status, answer = swap(numbers, **spoilt, check="warn")
    assert (status, answer["code"]) == (422, "version_refused")
    assert "its outputs cannot be used: non_finite_output" in answer["detail"]
    assert answer["figures"]["num_faults"] == 1
    assert look(numbers)["version"] == before


def test_an_answer_at_once_says_where_the_change_is_shown_to_its_end(numbers: Running):
    headers = {"X-API-Key": ADMIN, "Prefer": "respond-async"}
    body = {
        "wait_s": 600,
        "num_inputs": 5,
        "max_latency_ratio": 1e6,
        "options": {"mark": 7},
        "rollback_s": 0,
    }
    begun = numbers.post("/admin/models/m/versions", json=body, headers=headers)
    assert begun.status_code == 202, begun.text
    assert begun.headers["preference-applied"] == "respond-async"
    (change, *_) = begun.json()["changes"]
    for second in (body, {"policy": "force"}):
        refused = numbers.post("/admin/models/m/versions", json=second, headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (409, "conflict")
        assert "is being changed already" in refused.json()["detail"]
    assert int(refused.headers["retry-after"]) > 0
    place = begun.headers["location"]

    def now() -> Mapping[str, Any]:
        (found,) = (
            each
            for each in numbers.get(place, headers=headers).json()["changes"]
            if each["id"] == change["id"]
        )
        return dict(found)

    until(lambda: numbers.ask({"n": 1}, path="/predict/m") and now()["state"] != "going_on")
    assert now()["state"] == "done"
    assert look(numbers)["version"] == now()["version"]
    assert numbers.predict({"n": 1}, path="/predict/m")[0]["mark"] == 7
