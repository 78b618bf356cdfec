import io
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from inferpool.service.client import (
    AnswerError,
    AsyncClient,
    Client,
    ConnectError,
    DeadlineExceededError,
    InvalidInputError,
    OverloadedError,
    Prediction,
    Retry,
    UnavailableError,
    UnsendableError,
)
from inferpool.service.client.errors import ModelFailedError, UnknownModelError
from tests.e2e.running import running
from tests.models.items import jpeg
from tests.ports import free_port
from tests.service.client.conftest import open_client

FORKING = """
import os, sys
from inferpool.service.client import Client

with Client(sys.argv[1], retries=0, timeout_s=60) as client:
    client.predict("to have a connection")
    child = os.fork()
    own = os.getpid()
    is_right = all(client.predict(own).value == own for _ in range(50))
    if child == 0:
        os._exit(not is_right)
    print(is_right, os.waitpid(child, 0)[1])
"""


def test_every_form_of_a_picture_gets_the_same_answer(client, tmp_path: Path):
    photo = jpeg("chelsea")
    path = tmp_path / "cat"
    path.write_bytes(photo)
    expected = client.predict(path, model="classes")
    picture = Image.open(io.BytesIO(photo))
    array = np.asarray(picture)
    forms = [
        photo,
        memoryview(photo),
        io.BytesIO(photo),
        picture,
        array,
        np.asfortranarray(array),
        torch.from_numpy(array.copy()),
        {"image": array},
        {"b64": photo},
    ]
    for form in forms:
        assert client.predict(form, model="classes").value == expected.value, type(form)
    assert expected.top.label.startswith("label ")
    assert expected.top == expected.labels[0]
    assert [each.score for each in expected.labels] == sorted(
        (each.score for each in expected.labels), reverse=True
    )


def test_picture_is_turned_by_its_exif_data(client, tmp_path: Path):
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "turned.png"
    Image.open(io.BytesIO(jpeg("coffee"))).resize((60, 40)).save(path, exif=exif)
    assert client.predict(path, model="classes").value == (
        client.predict(Image.open(path), model="classes").value
    )


def test_json_is_sent_as_one_instance_with_its_parameters(client, tmp_path: Path):
    like_an_error = {"error": {"code": "invalid_input", "message": "mine", "status": 422}}
    for instance in ("a text", ["a", ["list"]], 1.5, None, like_an_error):
        assert client.predict(instance, model="echo").value == instance
    with_array = client.predict({"k": None, "x": np.arange(3)}, model="echo")
    assert with_array.value == {"k": None, "x": [0, 1, 2]}
    with pytest.raises(InvalidInputError, match="this parameter"):
        client.predict({"n": 1}, model="fault", parameters={"fail": True})
    (tmp_path / "a.txt").write_text("über den Wolken", encoding="utf-8")
    assert client.predict(tmp_path / "a.txt", model="echo").value == "über den Wolken"
    (tmp_path / "one.json").write_text('{"n": 1}')
    assert client.predict(tmp_path / "one.json", model="fault").value["twice"] == 2


def test_parameters_are_sent_with_a_picture_too(client):
    photo = jpeg("chelsea")
    assert len(client.predict(photo, model="classes", parameters={"top_k": 2}).labels) == 2
    with pytest.raises(UnsendableError, match="'name'"):
        client.predict(photo, model="classes", parameters={"name": "x"})


def test_arrays_and_tensors_come_back_as_they_were_sent(client):
    a, b = np.float32([[1, 2, 3], [4, 5, 6]]), torch.ones(2, 3)
    prediction = client.predict({"a": a, "b": b}, model="pair", as_arrays=True)
    assert prediction.arrays["sum"].tolist() == (a + 1).tolist()
    assert prediction.arrays["half"].dtype == np.float32
    assert prediction.tensors["half"].dtype == torch.bfloat16
    assert (
        prediction.tensors["half"].tolist()
        == prediction.arrays["half"].tolist()
        == (a / 2).tolist()
    )
    prediction.arrays["sum"][0, 0] = 7  # is the caller's own
    with pytest.raises(ValueError, match="choose from"):
        _ = prediction.array
    for value in (
        np.arange(6, dtype=">i8").reshape(2, 3),
        np.array(True),
        np.zeros((0, 3)),
        torch.arange(3).to(torch.bfloat16),
        torch.ones(2, 2, requires_grad=True).T,
    ):
        echoed = client.predict(value, model="echo", as_arrays=True)
        if isinstance(value, torch.Tensor):
            assert torch.equal(echoed.tensor, value)
            assert echoed.tensor.dtype == value.dtype
        else:
            assert np.array_equal(echoed.array, value)
            assert echoed.array.shape == value.shape


def test_large_file_is_sent_piece_by_piece(client, tmp_path: Path):
    path = tmp_path / "large.bin"
    path.write_bytes(b"8 bytes." + bytes(5 << 20))
    assert client.predict(path, model="echo").value == {
        "num_bytes": (5 << 20) + 8,
        "head": b"8 bytes.".hex(),
    }


def test_prediction_has_its_timing_and_request_id(client):
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    options = {"request_id": "mine-1", "traceparent": trace, "priority": 1}
    prediction = client.predict({"n": 2, "do": "sleep"}, model="fault", **options)
    assert (prediction.request_id, prediction.model) == ("mine-1", "fault")
    assert prediction.headers["traceparent"].split("-")[1] == trace.split("-")[1]
    timing = prediction.timing
    assert timing.inference_s >= 0.3
    assert timing.queue_s >= 0
    assert timing.total_s >= timing.inference_s
    assert timing.elapsed_s >= timing.round_trip_s >= timing.total_s
    assert prediction.num_attempts == 1


def test_errors_are_typed_and_have_the_detail_of_the_service(client):
    with pytest.raises(UnknownModelError, match="no model is called 'nope'") as raised:
        client.predict("x", model="nope")
    assert (raised.value.status, raised.value.code) == (404, "unknown_model")
    with pytest.raises(ModelFailedError) as raised:
        client.predict({"n": 1, "do": "raise"}, model="fault", request_id="mine-2")
    error = raised.value
    assert (error.status, error.code, error.is_retryable) == (500, "model_error", False)
    assert (error.request_id, error.num_attempts) == ("mine-2", 1)
    with pytest.raises(AnswerError, match="request mine-3"):
        client.predict({"n": None}, model="fault", request_id="mine-3")


def test_text_that_names_a_file_raises_a_question(client):
    for name in ("README.md", "no_such_photo.JPG"):
        question = re.escape(f"did you mean the file, pathlib.Path({name!r})?")
        with (
            pytest.warns(UserWarning, match=question),
            pytest.raises(InvalidInputError, match=question),
        ):
            client.predict(name, model="fault")
        with pytest.warns(UserWarning, match=question):
            assert client.predict(name, model="echo").value == name
    for text in ("a photo.jpg of mine", "photo", "one.two", ""):
        assert client.predict(text, model="echo").value == text


def test_unsendable_input_is_an_error_before_anything_is_sent(client, tmp_path: Path):
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "broken.json").write_text("{")
    bad = (
        tmp_path / "missing.jpg",
        tmp_path / "empty.jpg",
        tmp_path / "broken.json",
        b"",
        io.StringIO("text"),
        float("nan"),
        {"x": object()},
        np.array(["text"]),
        torch.ones(2, dtype=torch.complex64),
    )
    for value in bad:
        with pytest.raises(UnsendableError) as raised:
            client.predict(value)
        assert raised.value.num_attempts == 0


def test_failed_instances_are_errors_in_their_places(client, tmp_path: Path):
    path = tmp_path / "several.json"
    path.write_text(json.dumps({"instances": [{"n": 1}, {"n": 2, "do": "raise"}, {"n": 3}]}))
    prediction = client.predict(path, model="fault")
    first, failed, last = prediction.predictions
    assert (first["twice"], last["twice"]) == (2, 6)
    assert isinstance(failed, ModelFailedError)
    assert failed.index == 1
    assert prediction.errors == [failed]
    assert not prediction.is_whole
    with pytest.raises(ModelFailedError):
        prediction.raise_for_errors()
    with pytest.raises(ValueError, match="3 predictions"):
        _ = prediction.value
    path.write_text(json.dumps({"instances": [{"n": 1, "do": "raise"}, {"n": "x"}]}))
    with pytest.raises(ModelFailedError) as raised:
        client.predict(path, model="fault")
    assert [(each.code, each.index) for each in raised.value.errors] == [
        ("model_error", 0),
        ("invalid_input", 1),
    ]


def test_deadline_is_kept(client):
    with pytest.raises(DeadlineExceededError):
        client.predict({"n": 1, "do": "sleep"}, model="fault", timeout_s=0.1)
    for timeout_s in (0, -1):
        with pytest.raises(ValueError, match="timeout_s"):
            client.predict({"n": 1}, timeout_s=timeout_s)


def test_overload_is_retried_after_the_time_that_the_service_asks_for(client, service):
    """Ask ten at a time; the worker, busy for over a second, holds two, the queue three."""
    asked = [{"n": n, "do": "sleep" if n < 5 else "ok"} for n in range(10)]
    results = list(client.predict_many(asked, model="fault"))
    assert [each.value["twice"] for each in results] == [2 * n for n in range(10)]
    late = [each for each in results if each.num_attempts > 1]
    assert late
    assert all(each.timing.elapsed_s >= 1 for each in late)  # Retry-After is in whole seconds
    with Client(service.url, retries=0) as impatient:
        results = list(impatient.predict_many(asked, model="fault", return_errors=True))
    refused = [each for each in results if isinstance(each, OverloadedError)]
    assert refused
    assert all(each.retry_after_s >= 1 and each.num_attempts == 1 for each in refused)
    assert [each.index for each in results] == list(range(10))


def test_dying_worker_fails_one_input_only(client, kind):
    before = client.predict({"n": 1}, model="fault").value["pid"]
    deadly = {"n": len(kind), "do": "exit"}  # the other client's input is in quarantine
    asked = ({"n": 1} if n != 3 else deadly for n in range(6))
    results = list(client.predict_many(asked, model="fault", max_concurrency=2, return_errors=True))
    lost = [each for each in results if isinstance(each, AnswerError)]
    assert [(each.index, each.code) for each in lost] == [(3, "worker_crashed")]
    assert client.predict({"n": 1}, model="fault").value["pid"] != before


def test_health_is_typed(client):
    health = client.health()
    assert health.is_ready
    assert not health.is_draining
    models = {each.name: each for each in client.models()}
    assert set(models) == {"echo", "classes", "counts", "fault", "pair"}
    assert [each.name for each in models["pair"].inputs] == ["a", "b"]
    assert models["fault"].workers[0].device == "cpu"
    assert client.is_ready()
    client.wait_until_ready(60)


def test_missing_service_is_a_connect_error(kind):
    url = "http://127.0.0.1:9"  # discard: nobody listens
    with open_client(kind, url, timeout_s=3.0) as client:
        assert not client.is_ready()
        with pytest.raises(ConnectError, match=r"127\.0\.0\.1") as raised:
            client.predict("x")
        assert "past the deadline" in raised.value.__notes__[0]
        with pytest.raises(ConnectError) as raised:
            client.wait_until_ready(0.2)
        assert "not ready in 0.2 s" in raised.value.__notes__[0]


@pytest.mark.slow
def test_service_may_start_and_stop_under_load():
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    patient = Retry(max_attempts=1000, max_backoff_s=0.2)
    with running("echo", "--replicas", "1", port=port, ready=False) as service:
        with Client(url, retries=patient, timeout_s=120) as client:
            prediction = client.predict("early")
            assert (prediction.value, prediction.num_attempts > 1) == ("early", True)
        with Client(url, retries=0) as client:
            results = client.predict_many(range(10**9), max_concurrency=4, return_errors=True)
            assert next(results).value == 0
            service.signal(signal.SIGTERM)
            while isinstance(last := next(results), Prediction):
                assert last.value == last.index
            results.close()
        assert isinstance(last, ConnectError | UnavailableError)
        assert service.wait() == 0


def test_key_and_password_are_never_shown(caplog):
    with pytest.raises(ValueError, match="key") as refused:
        Client(key="geheim\nX-More: 1")
    client = Client("http://someone:geheim@127.0.0.1:9", key="geheim", retries=0)
    with client, pytest.raises(ConnectError) as raised:
        client.predict("x")
    assert "geheim" not in f"{refused.value} {client!r} {raised.value}"
    sent = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request.headers["Authorization"])
        return httpx.Response(200, json={"predictions": [1]})

    url, transport = "http://someone:se%40ret@127.0.0.1:9", httpx.MockTransport(answer)
    with caplog.at_level("DEBUG"), Client(url, transport=transport) as client:
        client.predict("x")
    assert sent == ["Basic c29tZW9uZTpzZUByZXQ="]
    assert "127.0.0.1:9/predict" in caplog.text
    assert "someone" not in caplog.text


def test_forked_process_reads_only_its_own_answers(service):
    done = subprocess.run(
        [sys.executable, "-c", FORKING, service.url], capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr) == ("True 0\n", "")


def test_a_call_may_ask_for_a_version_and_each_result_says_which_it_is_of(client):
    assert client.predict("x", model="echo").version == 1
    assert client.predict("x", model="echo", version=1).version == 1
    (many,) = client.predict_many(["x"], model="echo", version=1)
    assert many.version == 1
    with pytest.raises(UnknownModelError, match="no version '7' loaded; there are: 1"):
        client.predict("x", model="echo", version=7)


def test_unknown_option_is_refused(client):
    with pytest.raises(TypeError, match="did you mean 'timeout_s'"):
        Client(timeout=5)  # type: ignore[call-arg]  # the name in httpx
    with pytest.raises(TypeError, match="no option 'modle'"):
        client.predict("x", modle="echo")
    with pytest.raises(TypeError, match="no option 'concurrency'"):
        list(client.predict_many(["x"], concurrency=2))


def test_invalid_url_is_refused():
    for url in (
        "localhost:8000",
        "ftp://x",
        "http://",
        "http://me:sec/ret@x",
        "me:sec ret@x",
        "http://me:secret@\N{SNOWMAN}.example",
        "http://me:secret@xn--a",
        "http://me:secret@h:0",
    ):
        with pytest.raises(ValueError, match="no URL") as raised:
            Client(url)
        assert "sec" not in str(raised.value)


async def test_closed_client_says_so():
    client = Client("http://127.0.0.1:9")
    client.close()
    with pytest.raises(UnsendableError, match="this client is closed"):
        client.predict(1)
    async with AsyncClient("http://127.0.0.1:9") as waiting:
        pass
    with pytest.raises(UnsendableError, match="this client is closed"):
        await waiting.predict(1)
