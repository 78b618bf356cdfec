import io
import json
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image

from inferpool.service.api.codecs.body import BodyContext, Limits
from inferpool.service.api.codecs.requests import decode
from inferpool.service.tools.trial.connection import TrialError
from tests.load.bodies import bodies_of
from tests.load.capacity import rates
from tests.load.options import plan_for, read_options

pytestmark = pytest.mark.slow


def _bodies(*words):
    return bodies_of(read_options(["closed", "h", *words]))


@pytest.mark.parametrize(
    ("url", "model", "path"),
    [
        ("http://host:8000", [], b"/predict"),
        ("https://host", ["--model", "a b"], b"/predict/a%20b"),
        ("host/v2/models/x/infer?a=1", [], b"/v2/models/x/infer?a=1"),
    ],
)
def test_a_host_is_enough_of_a_url(url, model, path):
    plan = plan_for(read_options(["closed", url, *model, "--json", "{}"]))
    assert not callable(plan.requests)
    assert plan.requests[0].startswith(b"POST " + path + b" HTTP/1.1")


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30), ("1.5s", 1.5), ("10m", 600), ("2h", 7200), ("1d", 86400)]
)
def test_durations_have_units(text, seconds):
    assert read_options(["open", "h", "--rate", "1", "-d", text]).duration == seconds


def test_ramp_has_an_objective_of_its_own_unless_one_is_given():
    assert read_options(["ramp", "h"]).thresholds.p99_ms == 50
    given = read_options(["ramp", "h", "--p50-ms", "5", "--errors", "1%"]).thresholds
    assert (given.p99_ms, given.p50_ms, given.errors.allowed(1000)) == (None, 5, 10)


@pytest.mark.parametrize(
    "words",
    [
        ["closed", "ftp://host"],
        ["closed", "http://host/x", "--model", "m"],
        ["closed", "host", "--header", "nonsense"],
        ["closed", "host", "--key-file", "/nowhere"],
        ["closed", "host", "--body", "/nowhere"],
        ["closed", "host", "--json", "[1]", "--instances", "2"],
    ],
)
def test_unusable_options_are_an_error(words):
    with pytest.raises(TrialError):
        plan_for(read_options(words))


@pytest.mark.parametrize(
    "words", [["open", "h"], ["closed", "h", "-d", "soon"], ["ramp", "h", "-n", "3"], ["closed"]]
)
def test_wrong_options_exit_with_status_2(words):
    with pytest.raises(SystemExit) as error:
        read_options(words)
    assert error.value.code == 2


def test_synthetic_images_have_their_size_and_are_the_same_for_a_seed():
    first = _bodies("--image", "90x50")
    assert first == _bodies("--image", "90x50") != _bodies("--image", "90x50", "--seed", "1")
    assert len({each.body for each in first}) == len(first) > 1
    with Image.open(io.BytesIO(first[0].body)) as image:
        assert image.size == (90, 50)


def test_synthetic_texts_are_of_many_lengths_around_the_median():
    bodies = _bodies("--text", "20", "--instances", "4")
    batches = [json.loads(body.body)["instances"] for body in bodies]
    assert {len(batch) for batch in batches} == {4}
    lengths = sorted(len(text.split()) for batch in batches for text in batch)
    assert 15 < lengths[len(lengths) // 2] < 25
    assert lengths[0] < 5 < 80 < lengths[-1]


def test_instances_are_repeated_in_json_and_as_a_form_that_the_service_reads(tmp_path):
    text = '{"instances": [1, 2], "parameters": {"a": 1}}'
    (body,) = _bodies("--json", text, "--instances", "3")
    assert json.loads(body.body) == {"instances": [1, 2, 1], "parameters": {"a": 1}}
    np.save(tmp_path / "x.npy", np.zeros(3, np.float32))
    (body,) = _bodies("--body", str(tmp_path / "x.npy"), "--instances", "3")
    head = BodyContext({}, b"", (), Limits())
    assert len(decode(body.content_type.encode(), [body.body], head).payloads) == 3


@pytest.mark.parametrize("capacity", [3.0, 777.0, 60_000.0])
def test_the_capacity_is_found_to_the_precision(capacity):
    search = rates(20.0, 0.05)
    rate, held = next(search), 0.0
    with suppress(StopIteration):
        for _ in range(20):
            held = max(held, rate if rate <= capacity else 0.0)
            rate = search.send(rate <= capacity)
        pytest.fail("the search goes on")
    assert capacity / 1.05 <= held <= capacity
