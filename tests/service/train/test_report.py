"""The report of a training run."""

import csv
import math
import random
import re
from html.parser import HTMLParser

import msgspec
import numpy as np
import pytest
from PIL import Image

from inferpool.models.files.run_folder import Card, DataCard, RunFolder, ScoreCard, TransformCard
from inferpool.models.training.events import AnyEvent, RunEnded, Started, Stepped, Validated
from inferpool.models.training.scores import wilson
from inferpool.service.train.report import summary, write_report

SETTINGS = 'model = "torchvision:resnet18"\nval = "0.2"\n'


def write_run(folder, answers, *, labels=None, skipped=(), events=None, **card) -> Card:
    """Write the files of a run that has ended; answers are paths, labels, predictions, scores."""
    labels = labels or sorted({label for _, label, _, _ in answers})
    run = RunFolder(folder)
    folder.mkdir(exist_ok=True)
    run.labels.write_text("".join(f"{label}\n" for label in labels))
    _write_csv(run.predictions, ("path", "label", "predicted", "score"), answers)
    _write_csv(run.skipped, ("path", "reason"), skipped)
    events = course() if events is None else events
    run.metrics.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    num_right = sum(label == predicted for _, label, predicted, _ in answers)
    low, high = wilson(num_right, len(answers))
    return Card(
        **{
            "model": "torchvision:resnet18",
            "options": {},
            "transform": TransformCard(resize=32, crop=32, mean=(0.5,) * 3, std=(0.5,) * 3),
            "data": DataCard(
                source="/data/digits",
                num_training=4 * len(answers),
                num_validation=len(answers),
                num_skipped=len(skipped),
                per_class=dict.fromkeys(labels, 5),
            ),
            "scores": ScoreCard(
                accuracy=num_right / len(answers), low=low, high=high, num_right=num_right,
                num_images=len(answers), loss=0.1234, epochs=28, best_epoch=24, seconds=192.0,
                images_per_s=1234.5,
            ),
            "versions": {"inferpool": "1.2.3", "torch": "2.15.0"},
            "command": "inferpool train digits --model torchvision:resnet18 --output run",
            "began": "2026-11-24T16:16:48Z",
            **card,
        }
    )  # fmt: skip


def course(num_epochs=28, steps_per_epoch=23) -> list[AnyEvent]:
    """Return the events of a run that goes as they mostly do."""
    num = num_epochs * steps_per_epoch
    events: list[AnyEvent] = [
        Started(step=0, at=0.0, num_steps=num, num_epochs=num_epochs, num_ranks=2,
                devices=["cpu", "cpu"], batch_size=64, num_training=1437, num_validation=360)
    ]  # fmt: skip
    chance = random.Random(1)
    for step in range(1, num + 1):
        epoch = 1 + (step - 1) // steps_per_epoch
        loss = 2.3 * math.exp(-4 * step / num) + 0.3
        events.append(
            Stepped(step=step, at=float(step), epoch=epoch, loss=loss * chance.uniform(0.9, 1.1),
                    learning_rate=0.0015 * (1 + math.cos(math.pi * step / num)),
                    images_per_s=chance.uniform(1100, 1300))
        )  # fmt: skip
        if step % steps_per_epoch == 0:
            events.append(
                Validated(step=step, at=float(step), epoch=epoch, train_loss=loss,
                          loss=loss - 0.2, accuracy=1 - loss / 4, is_best=True, seconds=6.0)
            )  # fmt: skip
    return [*events, RunEnded(step=num, at=1.0 + num, status="done")]


def digits(folder, num=360) -> list[tuple[str, str, str, float]]:
    """Write small images with the labels of digits; return answers, some of which are wrong."""
    folder.mkdir(exist_ok=True)
    chance = np.random.default_rng(0)
    answers = []
    for number in range(num):
        path = folder / f"{number:04}.png"
        Image.fromarray(chance.integers(0, 256, (8, 8), np.uint8)).save(path)
        label, is_wrong = number % 10, number % 13 == 0
        predicted = (label + is_wrong) % 10
        answers.append((str(path), str(label), str(predicted), 0.5 + number % 48 / 100))
    return answers


def _write_csv(path, columns, rows):
    with path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([columns, *rows])


class PageTexts(HTMLParser):
    """Collects what a page shows, without scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.texts, self.images, self._hidden = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._hidden = tag if tag in ("script", "style") else self._hidden
        if tag == "img":
            self.images.append(dict(attrs))
        assert tag not in ("b1", "evil")

    def handle_endtag(self, tag):
        self._hidden = "" if tag == self._hidden else self._hidden

    def handle_data(self, data):
        if not self._hidden and data.strip():
            self.texts.append(data.strip())


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path / "run")


def page_of(run, card, settings=SETTINGS) -> str:
    write_report(run, card, settings=settings)
    return run.report.read_text("utf-8")


def test_report_tells_what_was_trained_on_what_and_how_well(run, tmp_path):
    card = write_run(run.path, digits(tmp_path / "digits"), skipped=[("/data/a.png", "it is cut")])
    page = page_of(run, card)
    texts = PageTexts(page).texts
    said = "\n".join(texts)
    assert "92.2 %" in texts
    assert "95 % interval 89.0 % to 94.6 %; 332 of 360 images" in said
    assert "1,440 to train on, 360 held out, 1 skipped; 10 classes" in said
    assert "28; the weights are those of epoch 24" in said
    assert "3 min 12 s, 1,234 images/s" in said
    assert "2 (2 x cpu)" in said
    assert {"/data/a.png", "it is cut", card.command, SETTINGS.strip(), "2.15.0"} <= {*texts}
    assert page.count("Plotly.newPlot(") >= 4
    assert not re.search(r"<script[^>]*\bsrc=|<link|@import|<img[^>]*src=(?!\"data:)", page)


def test_few_classes_have_a_matrix_and_many_their_most_frequent_confusions(run):
    answers = [("x", str(n), str(n), 0.9) for n in range(20) for _ in range(3)]
    answers += [("x", "3", "4", 0.9)] * 2
    page = page_of(run, write_run(run.path, answers))
    assert "Confusion matrix" in page
    assert page.count('<td style="background') == 21
    assert "All 20 classes" not in page

    answers += [("x", "20", "20", 0.9)]
    said = PageTexts(page_of(run, write_run(run.path, answers))).texts
    assert "Confusion matrix" not in said
    at = said.index("Most frequent confusions")
    assert said[at + 1 : at + 9] == ["label", "taken for", "images", "of", "3", "4", "2", "5"]
    least = said.index("Classes that are recognised least")
    assert said[least + 6 : least + 11] == ["3", "5", "3", "60.0 %", "100.0 %"]
    assert "All 21 classes" in said


def test_class_without_answers_has_no_share(run):
    answers = [("x", "a", "b", 0.9), ("x", "b", "b", 0.9)]
    labels = ["a", "b", *(f"none {n}" for n in range(25))]
    texts = PageTexts(page_of(run, write_run(run.path, answers, labels=labels))).texts
    at = texts.index("none 24")
    assert texts[at : at + 5] == ["none 24", "0", "0", "-", "-"]


def test_worst_mistakes_are_shown_as_pictures_the_most_sure_first(run, tmp_path):
    answers = digits(tmp_path / "digits")
    photo = np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8)
    for name in ("a.jpg", "b.png"):
        Image.fromarray(photo).save(tmp_path / name)
        answers.append((str(tmp_path / name), "1", "2", 0.999))
    answers += [(str(tmp_path / "gone.png"), "1", "2", 1.0), ("", "1", "2", 1.0)]
    answers += [("#17\0", "1", "2", 1.0)]
    (tmp_path / "cut.png").write_bytes((tmp_path / "b.png").read_bytes()[:5000])
    answers += [(str(tmp_path / "cut.png"), "1", "2", 1.0)]
    images = PageTexts(page_of(run, write_run(run.path, answers))).images
    assert [image["alt"] for image in images[:2]] == ["a.jpg", "b.png"]
    assert len(images) == 24
    assert "class" not in images[0]
    assert {image.get("class") for image in images[2:]} == {"small"}
    assert all(image["src"].startswith("data:image/png;base64,") for image in images[2:])
    scores = {path: score for path, _, _, score in answers}
    shown = [scores[str(tmp_path / "digits" / image["alt"])] for image in images[2:]]
    assert shown == sorted(shown, reverse=True)


def test_names_are_shown_as_they_are_and_never_as_markup(run, tmp_path):
    odd = "<b1>&\"'</b1>\x1b[31m\udcff"
    path = tmp_path / "<evil onload='x'>.png"
    Image.new("L", (8, 8)).save(path)
    skipped = [(odd, "</script><evil>")]
    answers = [(str(path), odd, "b", 0.9), (str(path), "b", "b", 0.9)]
    card = write_run(
        run.path, answers, labels=["plain", "b"], skipped=skipped, command=f"inferpool {odd}",
        options={"<evil>": odd}, versions={"<evil>": odd}, model=odd,
    )  # fmt: skip
    run.labels.write_text("<b1>&\"'</b1>\nb\n")
    answers = [(str(path), "<b1>&\"'</b1>", "b", 0.9)]
    _write_csv(run.predictions, ("path", "label", "predicted", "score"), answers)
    texts = PageTexts(page_of(run, card, settings="<evil>\n")).texts
    assert "<b1>&\"'</b1>\\x1b[31m\\udcff" in texts
    assert "</script><evil>" in texts
    assert path.name in texts
    assert texts.count("<b1>&\"'</b1>") >= 3


def test_curves_leave_out_what_was_done_again_after_a_restart(run):
    events = course(num_epochs=4)
    kept = [event for event in events if event.step <= 46]
    lost = [
        msgspec.structs.replace(event, step=event.step + 1) for event in events if event.step > 46
    ]
    restarted = msgspec.structs.replace(events[0], step=46)
    again = [event for event in events if event.step > 46]
    answers = [("x", "a", "a", 1.0)]
    page = page_of(run, write_run(run.path, answers, events=[*kept, *lost, restarted, *again]))
    assert "<td class=text>starts</td><td class=text>2</td>" in page
    assert len(_charts(page)) == 4
    assert _charts(page_of(run, write_run(run.path, answers, events=events))) == _charts(page)


def test_report_of_a_run_without_an_epoch_has_no_curves(run):
    card = write_run(run.path, [("x", "a", "a", 1.0)], events=[])
    run.skipped.unlink()
    assert "Plotly.newPlot(" not in page_of(run, card)


def test_many_classes_and_predictions_take_little_room(run, tmp_path):
    photo = np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8)
    Image.fromarray(photo).save(tmp_path / "a.jpg")
    chance = random.Random(1)
    labels = [f"label {n:04}" for n in range(1000)]
    answers = [
        (str(tmp_path / "a.jpg"), labels[n % 1000],
         labels[chance.randrange(1000) if n % 3 else n % 1000], chance.random())
        for n in range(50_000)
    ]  # fmt: skip
    card = write_run(run.path, answers, events=course(num_epochs=300, steps_per_epoch=200))
    write_report(run, card, settings=SETTINGS)
    assert run.report.stat().st_size < 8e6


def test_command_ends_with_a_few_plain_lines(run):
    answers = [("x", "a", "a", 1.0)] * 351 + [("x", "a", "b", 1.0)] * 9
    skipped = [(f"/data/{n}\n.png", "it is empty") for n in range(12)]
    lines = summary(run, write_run(run.path, answers, skipped=skipped))
    assert lines[:3] == [
        "held-out accuracy 97.5 % (95 % interval 95.3 % to 98.7 %): 351 of 360 images, "
        "epoch 24 of 28",
        "12 images could not be read:",
        "  /data/0\\n.png: it is empty",
    ]
    assert len(lines) == 15
    assert lines[12:] == [
        f"  and 2 more in {run.skipped}",
        f"the run is in {run.path}/, its report is {run.report}",
        f"to serve it: inferpool serve {run.path}/",
    ]


def test_command_that_serves_a_run_can_be_pasted(tmp_path):
    run = RunFolder(tmp_path / "my run")
    lines = summary(run, write_run(run.path, [("x", "a", "a", 1.0)]))
    assert len(lines) == 3
    assert lines[-1] == f"to serve it: inferpool serve '{run.path}/'"


def _charts(page):
    """Return what plotly is given to draw, without the random names of the places."""
    return re.findall(r'Plotly\.newPlot\(\s*"[^"]*",(.*?)\)\s*\}?;?\s*</script>', page, re.DOTALL)
