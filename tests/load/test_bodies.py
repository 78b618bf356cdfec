import io
import json

import numpy as np
import pytest
from PIL import Image

from inferpool.service.tools.trial.connection import TrialError
from tests.load.bodies import BodySource


def test_a_file_of_unknown_suffix_needs_a_type(tmp_path):
    file = tmp_path / "x.raw"
    file.write_bytes(b"1")
    with pytest.raises(TrialError, match="--content-type"):
        BodySource(path=file).bodies()
    body = BodySource(path=file, content_type="application/octet-stream").bodies()[0]
    assert body.content_type == "application/octet-stream"


def test_synthetic_images_have_their_size_and_are_the_same_for_a_seed():
    first, second = BodySource(image=(90, 50)).bodies(), BodySource(image=(90, 50)).bodies()
    assert first == second
    assert len({each.body for each in first}) == len(first) > 1
    with Image.open(io.BytesIO(first[0].body)) as image:
        assert image.size == (90, 50)
    assert BodySource(image=(90, 50), seed=1).bodies() != first


def test_synthetic_texts_are_of_many_lengths_around_the_median_and_the_same_for_a_seed():
    bodies = BodySource(text_words=20, instances=4).bodies()
    assert bodies == BodySource(text_words=20, instances=4).bodies()
    assert bodies != BodySource(text_words=20, instances=4, seed=1).bodies()
    batches = [json.loads(body.body)["instances"] for body in bodies]
    assert {len(batch) for batch in batches} == {4}
    lengths = sorted(len(text.split()) for batch in batches for text in batch)
    assert 15 < lengths[len(lengths) // 2] < 25
    assert lengths[0] < 5 < 80 < lengths[-1]


def test_instances_of_json_are_repeated():
    body = BodySource(
        json_text='{"instances": [1, 2], "parameters": {"a": 1}}', instances=5
    ).bodies()[0]
    assert json.loads(body.body) == {"instances": [1, 2, 1, 2, 1], "parameters": {"a": 1}}
    with pytest.raises(TrialError, match="instances"):
        BodySource(json_text="[1]", instances=2).bodies()


def test_instances_of_files_become_a_form_that_the_service_reads(tmp_path):
    from inferpool.service.api.codecs.body import BodyContext, Limits
    from inferpool.service.api.codecs.requests import decode

    file = io.BytesIO()
    np.save(file, np.zeros(3, np.float32))
    (tmp_path / "x.npy").write_bytes(file.getvalue())
    body = BodySource(path=tmp_path / "x.npy", instances=3).bodies()[0]
    head = BodyContext({}, b"", (), Limits())
    assert len(decode(body.content_type.encode(), [body.body], head).payloads) == 3


def test_safetensors_are_not_repeated(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"1")
    with pytest.raises(TrialError, match="stack"):
        BodySource(path=tmp_path / "x.safetensors", instances=2).bodies()
