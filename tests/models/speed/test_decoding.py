import pytest
import torch

from inferpool.models.base import Model
from inferpool.models.errors import ModelError
from inferpool.models.label_tolerance import LabelTolerance
from inferpool.models.sources.echo import Echo
from inferpool.models.speed.choose import choose
from inferpool.models.speed_names import SpeedReport
from inferpool.models.vision.transforms import ImageTransform
from tests.models.items import loaded, run
from tests.models.speed.pace import PHOTOS, Encoded, Untried, options, quietly


class Harsh(Encoded):
    """A model whose answers may not change at all."""

    tolerance = LabelTolerance(max_deviation=0.0)


class Turned(Encoded):
    """A model with a transform of its own, which has no fast way."""

    def transform_image(self, image):
        return super().transform_image(image.rotate(90))


@pytest.fixture
def faster(pace):
    """Let the fast way take half the time by the fake clock."""
    pace.decode_gains = {"fast": 2.0}


@pytest.mark.usefixtures("faster")
def test_auto_decodes_fast_where_the_answers_agree(pace):
    model = pace.of(loaded(Encoded()))
    report = choose(model, pace.options("folded", decode="auto"), quietly)
    assert (model.decode, report.decode) == ("fast", "fast")
    assert report.decode_gain == pytest.approx(2.0)
    assert 0 < report.deviation < 0.05
    assert "decoding fast, 2.00 x" in report.text()


@pytest.mark.usefixtures("faster")
def test_auto_decodes_exactly_where_answers_would_change(pace):
    model = pace.of(loaded(Harsh()))
    report = choose(model, pace.options("folded", decode="auto"), quietly)
    assert (model.decode, report.decode, report.decode_gain) == ("exact", "exact", 1.0)
    assert "fast decoding 2.00 x, refused: the best label is kept for" in report.note


@pytest.mark.parametrize(("gain", "decode"), [(1.09, "exact"), (1.12, "fast")])
def test_a_way_that_gains_hardly_anything_is_not_taken(pace, gain, decode):
    pace.decode_gains = {"fast": gain}
    model = pace.of(loaded(Encoded()))
    report = choose(model, pace.options("folded", decode="auto"), quietly)
    assert (model.decode, report.decode) == (decode, decode)


@pytest.mark.parametrize(("speed", "decode"), [("exact", "auto"), ("auto", "exact")])
def test_exact_speed_and_exact_decoding_are_not_put_to_the_test(speed, decode, pace):
    model = pace.of(loaded(Untried()))
    report = choose(model, pace.options(speed, decode=decode), quietly)
    assert (model.decode, report.decode) == ("exact", "exact")


@pytest.mark.usefixtures("faster")
def test_fast_by_name_is_taken_with_a_warning_that_says_what_it_changes(pace, caplog):
    model = pace.of(loaded(Harsh()))
    report = choose(model, pace.options("exact", decode="fast"), quietly)
    assert (model.decode, report.preset, report.decode) == ("fast", "exact", "fast")
    assert "the best label is kept for" in caplog.text
    assert report.text().startswith("exact, decoding fast")


@pytest.mark.parametrize("model", [Turned(), Echo()], ids=["own transform", "no images"])
def test_fast_by_name_is_refused_where_there_is_no_such_way(model: Model):
    loaded(model)
    assert choose(model, options("exact", decode="auto"), quietly).decode == "exact"
    with pytest.raises(ModelError, match='decode = "fast" cannot be used'):
        choose(model, options("exact", decode="fast"), quietly)


@pytest.mark.usefixtures("faster")
def test_verdicts_are_kept_for_this_network_and_transform(tmp_path, pace):
    stages = []

    def chosen(model):
        stages.clear()
        kept = pace.options("folded", tmp_path, decode="auto")
        return choose(pace.of(loaded(model)), kept, stages.append).decode

    assert chosen(Encoded()) == "fast"
    assert "comparing fast decoding with the exact way" in stages
    assert chosen(Encoded()) == "fast"
    assert not stages
    other = Encoded()
    other.transform = ImageTransform(resize=40, crop=32)
    pace.decode_gains = {}
    assert chosen(other) == "exact"
    assert stages == ["comparing fast decoding with the exact way"]


def test_the_next_life_of_a_worker_applies_what_was_chosen():
    model = loaded(Untried())
    chosen = SpeedReport(decode="fast", decode_gain=2.0)
    report = choose(model, options("exact", decode="fast", chosen=chosen), quietly)
    assert (model.decode, report.decode, report.decode_gain) == ("fast", "fast", 2.0)


@pytest.mark.usefixtures("faster")
def test_fast_decoding_reaches_encoded_images_alone(pace):
    model, exact = pace.of(loaded(Encoded())), loaded(Encoded())
    choose(model, pace.options("exact", decode="fast"), quietly)
    assert not torch.equal(*(run(each, PHOTOS[:1])["probabilities"] for each in (model, exact)))
    pixels = model.samples()[:2]
    assert torch.equal(*(run(each, pixels)["probabilities"] for each in (model, exact)))
