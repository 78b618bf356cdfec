"""Models from files of other libraries, beside one that is damaged."""

import time

import pytest

from tests.e2e.running import Running, running
from tests.models.onnx_files.files import TwoLayers, write_classifier, write_two

pytest.importorskip("onnxruntime")


def settled(service: Running) -> dict[str, str]:
    """Wait until each model is ready or given up; return why not, or an empty text."""
    until = time.monotonic() + 120
    while True:
        models = service.get("/health").json()["models"]
        if all(each["ready"] or "cannot" in each["reason"] for each in models):
            return {each["name"]: "" if each["ready"] else each["reason"] for each in models}
        assert time.monotonic() < until, models
        time.sleep(0.1)


def test_files_of_onnx_are_served_and_a_damaged_one_takes_nothing_down(tmp_path):
    reference = f"{TwoLayers.__module__}:{TwoLayers.__name__}"
    write_two(tmp_path / "net.onnx", 2)
    write_classifier(tmp_path / "iris.onnx")
    whole = (tmp_path / "net.onnx").read_bytes()
    (tmp_path / "cut.onnx").write_bytes(whole[: len(whole) // 2])
    models = {
        "net": {"source": f"{tmp_path}/net.onnx", "options": {"reference": reference}},
        "iris": {"source": f"{tmp_path}/iris.onnx"},
        "cut": {"source": f"{tmp_path}/cut.onnx"},
    }
    with running(settings={"front_ends": 1, "models": models}, ready=False) as service:
        service.wait_until_listening()
        reasons = settled(service)
        assert [name for name, reason in reasons.items() if not reason] == ["net", "iris"]
        assert "cut.onnx cannot be read by onnxruntime" in reasons["cut"]
        for number in (1, 3):
            rows = [{"x_1": [i, 0, 0, 0], "y_0": [1, 1, 1, 1]} for i in range(number)]
            answer = service.post("/predict/net", json={"instances": rows})
            assert answer.status_code == 200, answer.text
            sums = [each["sum"] for each in answer.json()["predictions"]]
            assert sums == [[i + 1, 1, 1, 1] for i in range(number)]
        answer = service.post("/predict/iris", json={"instances": [[9, 0, 0]]})
        (found,) = answer.json()["predictions"]
        assert (found["label"], [*found["probability"]]) == ("a", ["a", "b", "c"])
        said = [str(line["message"]) for line in service.log]
        assert any("net.onnx agrees with" in each for each in said)
