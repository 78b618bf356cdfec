import pytest
import torch
from torch import nn

from inferpool.models.agreement import LabelTolerance
from inferpool.models.base import Model
from inferpool.models.errors import ModelError
from inferpool.models.sources.echo import Echo
from inferpool.models.speed import choose as choosing
from inferpool.models.speed.choose import SpeedWish, choose
from inferpool.models.speed.decoding import DecodeTrial
from inferpool.models.speed.names import SpeedReport
from inferpool.models.vision.classifier import Classifier
from inferpool.models.vision.transforms import ImageTransform
from tests.models.items import CPU, encoded, image_item, photo, run

ITEMS = [encoded(photo(name)) for name in ("astronaut", "coffee", "chelsea")]


class Small(Classifier):
    def __init__(self):
        transform = ImageTransform(resize=36, crop=32)
        super().__init__(transform=transform, labels=[f"label {i}" for i in range(10)])

    def build_network(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(800, 10))

    def encoded_samples(self):
        return [image_item(data) for data in ITEMS] if self.can_be_quick else []


class Harsh(Small):
    """Nothing may be off by anything."""

    tolerance = LabelTolerance(max_deviation=0.0)


class Turned(Small):
    """With a transform of its own, of which nothing is known."""

    def transform_image(self, image):
        return super().transform_image(image.rotate(90))


def wish(speed="auto", decode="auto", cache_dir=None, chosen=None):
    return SpeedWish(
        speed=speed, max_batch_size=2, cache_dir=cache_dir, decode=decode, chosen=chosen
    )


@pytest.fixture(autouse=True)
def no_presets(monkeypatch):
    """They have tests of their own."""
    monkeypatch.setattr(choosing, "presets_for", lambda network, device: [])


def loaded(model):
    model.load(CPU)
    return model


@pytest.fixture
def always_faster(monkeypatch):
    """Timings that favour the fast way: on a busy machine none can be had."""
    measure = DecodeTrial._decode
    monkeypatch.setattr(
        DecodeTrial, "_decode", lambda self, items: (*measure(self, items)[:2], 2.0)
    )


def quietly(stage):
    return None


def test_auto_decodes_fast_where_the_answers_agree(always_faster):
    model = loaded(Small())
    report = choose(model, wish(), quietly)
    assert (model.decode, report.decode, report.decode_gain) == ("fast", "fast", 2.0)
    assert 0 < report.deviation < 0.05
    assert "decoding fast, 2.00 x" in report.text()


def test_auto_decodes_exactly_where_answers_would_change(always_faster):
    model = loaded(Harsh())
    report = choose(model, wish(), quietly)
    assert (model.decode, report.decode, report.decode_gain) == ("exact", "exact", 1.0)
    assert "fast decoding 2.00 x, refused: the best label is kept for" in report.note


def test_a_way_that_gains_nothing_is_not_taken(monkeypatch):
    measure = DecodeTrial._decode
    monkeypatch.setattr(
        DecodeTrial, "_decode", lambda self, items: (*measure(self, items)[:2], 1.05)
    )
    model = loaded(Small())
    choose(model, wish(), quietly)
    assert model.decode == "exact"


@pytest.mark.parametrize(("speed", "decode"), [("exact", "auto"), ("auto", "exact")])
def test_exact_speed_and_exact_decoding_are_not_put_to_the_test(speed, decode, monkeypatch):
    monkeypatch.delattr(DecodeTrial, "choose")
    model = loaded(Small())
    report = choose(model, wish(speed, decode), quietly)
    assert (model.decode, report.decode) == ("exact", "exact")


def test_fast_by_name_is_taken_with_a_warning_that_says_what_it_changes(always_faster, caplog):
    model = loaded(Harsh())
    report = choose(model, wish("exact", "fast"), quietly)
    assert (model.decode, report.preset, report.decode) == ("fast", "exact", "fast")
    assert "the best label is kept for" in caplog.text
    assert report.text().startswith("exact, decoding fast")


@pytest.mark.parametrize("model", [Turned(), Echo()], ids=["own transform", "no images"])
def test_fast_by_name_is_refused_where_there_is_no_such_way(model: Model):
    model.load(CPU)
    assert choose(model, wish("exact", "auto"), quietly).decode == "exact"
    with pytest.raises(ModelError, match='decode = "fast" cannot be had'):
        choose(model, wish("exact", "fast"), quietly)


def test_verdicts_are_kept_for_this_network_and_transform(tmp_path, always_faster, monkeypatch):
    assert choose(loaded(Small()), wish(cache_dir=tmp_path), quietly).decode == "fast"
    monkeypatch.setattr(DecodeTrial, "_measure", lambda self, items: SpeedReport(note="measured"))
    assert choose(loaded(Small()), wish(cache_dir=tmp_path), quietly).decode == "fast"
    other = Small()
    other.transform = ImageTransform(resize=40, crop=32)
    report = choose(loaded(other), wish(cache_dir=tmp_path), quietly)
    assert (report.decode, "measured" in report.note) == ("exact", True)


def test_the_next_life_of_a_worker_applies_what_was_chosen(monkeypatch):
    monkeypatch.delattr(DecodeTrial, "choose")
    model = loaded(Small())
    chosen = SpeedReport(decode="fast", decode_gain=2.0)
    report = choose(model, wish("exact", "fast", chosen=chosen), quietly)
    assert (model.decode, report.decode, report.decode_gain) == ("fast", "fast", 2.0)


def test_fast_decoding_reaches_encoded_images_alone(always_faster):
    model, exact = loaded(Small()), loaded(Small())
    choose(model, wish("exact", "fast"), quietly)
    item = image_item(ITEMS[0])
    assert not torch.equal(*(run(each, [item])["probabilities"] for each in (model, exact)))
    pixels = model.samples()[:2]
    assert torch.equal(*(run(each, pixels)["probabilities"] for each in (model, exact)))
