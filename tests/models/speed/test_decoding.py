import pytest
import torch

from inferpool.models.agreement import LabelTolerance
from inferpool.models.base import Model
from inferpool.models.errors import ModelError
from inferpool.models.sources.echo import Echo
from inferpool.models.speed import choose as choosing
from inferpool.models.speed.choose import choose
from inferpool.models.speed.decoding import DecodeTrial
from inferpool.models.speed.names import SpeedReport
from inferpool.models.vision.transforms import ImageTransform
from tests.models.items import encoded, image_item, loaded, photo, run
from tests.models.speed.test_choose import options, quietly
from tests.small_classifier import SmallClassifier

ITEMS = [encoded(photo(name)) for name in ("astronaut", "coffee", "chelsea")]


class Encoded(SmallClassifier):
    def encoded_samples(self):
        return [image_item(data) for data in ITEMS] if self.can_be_quick else []


class Harsh(Encoded):
    """A model whose answers may not change at all."""

    tolerance = LabelTolerance(max_deviation=0.0)


class Turned(Encoded):
    """A model with a transform of its own, which has no fast way."""

    def transform_image(self, image):
        return super().transform_image(image.rotate(90))


@pytest.fixture(autouse=True)
def no_presets(monkeypatch):
    """Try no presets, which have tests of their own."""
    monkeypatch.setattr(choosing, "presets_for", lambda network, device: [])


@pytest.fixture
def gain(monkeypatch):
    """Set the gain that the fast way is measured to have: on a busy machine any may come out."""
    measure = DecodeTrial._decode

    def set_gain(gain):
        monkeypatch.setattr(
            DecodeTrial, "_decode", lambda self, way, items: (*measure(self, way, items)[:2], gain)
        )

    return set_gain


@pytest.fixture
def always_faster(gain):
    gain(2.0)


def test_auto_decodes_fast_where_the_answers_agree(always_faster):
    model = loaded(Encoded())
    report = choose(model, options(decode="auto"), quietly)
    assert (model.decode, report.decode, report.decode_gain) == ("fast", "fast", 2.0)
    assert 0 < report.deviation < 0.05
    assert "decoding fast, 2.00 x" in report.text()


def test_auto_decodes_exactly_where_answers_would_change(always_faster):
    model = loaded(Harsh())
    report = choose(model, options(decode="auto"), quietly)
    assert (model.decode, report.decode, report.decode_gain) == ("exact", "exact", 1.0)
    assert "fast decoding 2.00 x, refused: the best label is kept for" in report.note


def test_a_way_that_gains_nothing_is_not_taken(gain):
    gain(1.05)
    model = loaded(Encoded())
    choose(model, options(decode="auto"), quietly)
    assert model.decode == "exact"


@pytest.mark.parametrize(("speed", "decode"), [("exact", "auto"), ("auto", "exact")])
def test_exact_speed_and_exact_decoding_are_not_put_to_the_test(speed, decode, monkeypatch):
    monkeypatch.delattr(DecodeTrial, "choose")
    model = loaded(Encoded())
    report = choose(model, options(speed, decode=decode), quietly)
    assert (model.decode, report.decode) == ("exact", "exact")


def test_fast_by_name_is_taken_with_a_warning_that_says_what_it_changes(always_faster, caplog):
    model = loaded(Harsh())
    report = choose(model, options("exact", decode="fast"), quietly)
    assert (model.decode, report.preset, report.decode) == ("fast", "exact", "fast")
    assert "the best label is kept for" in caplog.text
    assert report.text().startswith("exact, decoding fast")


@pytest.mark.parametrize("model", [Turned(), Echo()], ids=["own transform", "no images"])
def test_fast_by_name_is_refused_where_there_is_no_such_way(model: Model):
    loaded(model)
    assert choose(model, options("exact", decode="auto"), quietly).decode == "exact"
    with pytest.raises(ModelError, match='decode = "fast" cannot be used'):
        choose(model, options("exact", decode="fast"), quietly)


def test_verdicts_are_kept_for_this_network_and_transform(tmp_path, always_faster, monkeypatch):
    assert (
        choose(loaded(Encoded()), options(cache_dir=tmp_path, decode="auto"), quietly).decode
        == "fast"
    )
    monkeypatch.setattr(
        DecodeTrial, "_measure", lambda self, way, items: SpeedReport(note="measured")
    )
    assert (
        choose(loaded(Encoded()), options(cache_dir=tmp_path, decode="auto"), quietly).decode
        == "fast"
    )
    other = Encoded()
    other.transform = ImageTransform(resize=40, crop=32)
    report = choose(loaded(other), options(cache_dir=tmp_path, decode="auto"), quietly)
    assert (report.decode, "measured" in report.note) == ("exact", True)


def test_the_next_life_of_a_worker_applies_what_was_chosen(monkeypatch):
    monkeypatch.delattr(DecodeTrial, "choose")
    model = loaded(Encoded())
    chosen = SpeedReport(decode="fast", decode_gain=2.0)
    report = choose(model, options("exact", decode="fast", chosen=chosen), quietly)
    assert (model.decode, report.decode, report.decode_gain) == ("fast", "fast", 2.0)


def test_fast_decoding_reaches_encoded_images_alone(always_faster):
    model, exact = loaded(Encoded()), loaded(Encoded())
    choose(model, options("exact", decode="fast"), quietly)
    item = image_item(ITEMS[0])
    assert not torch.equal(*(run(each, [item])["probabilities"] for each in (model, exact)))
    pixels = model.samples()[:2]
    assert torch.equal(*(run(each, pixels)["probabilities"] for each in (model, exact)))
