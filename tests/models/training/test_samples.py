import csv
import io
import os
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from skimage import data as photographs
from sklearn.datasets import load_digits

from inferpool.models.errors import DataError
from inferpool.models.training.samples import (
    LabelledImages,
    find_held_out,
    find_images,
    find_parts,
    read_samples,
    split,
    survey,
    write_samples,
)


@pytest.fixture
def folder(tmp_path):
    """Return a function that fills a folder with files by their paths, and returns it."""

    def fill(*names: str) -> Path:
        root = tmp_path / "images"
        root.mkdir(exist_ok=True)
        for name in names:
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
        return root

    return fill


@pytest.fixture
def table(folder):
    """Return a function that writes a table beside some images, and returns its path."""

    def write(text: str, *names: str) -> Path:
        path = folder(*names) / "table.csv"
        path.write_text(text)
        return path

    return write


def problem_of(source: Path) -> str:
    with pytest.raises(DataError) as caught:
        find_images(source)
    text = str(caught.value)
    assert "\n" not in text
    return text


def digits(root: Path, num: int = 60) -> Path:
    """Write handwritten digits, of 8 x 8 pixels, as PNG files."""
    pixels, targets = load_digits(return_X_y=True)
    for index in range(num):
        path = root / str(targets[index]) / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels[index].reshape(8, 8) * 15.9).astype(np.uint8)).save(path)
    return root


class TestFolder:
    def test_subfolders_are_the_labels(self, folder):
        root = folder("dog/1.jpg", "dog/2.PNG", "cat/b.webp", "cat/a.tiff")
        images = find_images(root)
        assert images.labels == ["cat", "dog"]
        assert [os.path.relpath(each, root) for each in images.paths] == [
            *("cat/a.tiff", "cat/b.webp", "dog/1.jpg", "dog/2.PNG")
        ]
        assert (images.targets, images.num_per_class) == ([0, 0, 1, 1], [2, 2])
        assert len(images) == 4

    def test_paths_are_absolute(self, folder, monkeypatch):
        monkeypatch.chdir(folder("a/1.png", "b/1.png").parent)
        images = find_images(Path("images"))
        assert all(os.path.isabs(each) and os.path.isfile(each) for each in images.paths)

    def test_folders_inside_a_label_belong_to_it(self, folder):
        images = find_images(folder("a/1.png", "a/deep/er/2.png", "b/x/3.png"))
        assert images.num_per_class == [2, 1]

    def test_hidden_and_other_files_are_left_out(self, folder):
        root = folder(
            *("a/1.png", "a/.2.png", "a/.cache/3.png", "a/Thumbs.db", "b/1.png", ".git/1.png"),
            *("top.png", "README.md"),
        )
        images = find_images(root)
        assert images.labels == ["a", "b"]
        assert images.num_per_class == [1, 1]

    def test_links_to_folders_are_followed_once(self, folder):
        root = folder("a/1.png", "b/1.png")
        (root / "a" / "again").symlink_to(root / "a")
        (root / "c").symlink_to(root / "b")
        assert find_images(root).num_per_class == [1, 1, 1]

    def test_an_absent_folder_is_named(self, tmp_path):
        assert problem_of(tmp_path / "no") == f"there is no folder or file {tmp_path / 'no'}"

    @pytest.mark.parametrize(
        ("names", "part"),
        [
            ((), "has no images"),
            (("1.png", "2.png"), "into a subfolder that has its name"),
            (("a/1.png", "b/1.png", "notes/1.txt"), "'notes'"),
            (("a/1.png", "a/2.png"), "one label alone, 'a'"),
            (("train/a/1.png", "train/b/1.png", "val/a/1.png"), "'train', 'val'"),
            (("train/a/1.png", "train/b/1.png", "val/a/1.png"), "--val"),
            (("a\nb/1.png", "b/1.png"), "it has a line break"),
            (("a\u2028b/1.png", "b/1.png"), "it has a line break"),
            (("a\n/1.png", "b/1.png"), "it has a line break"),
            ((os.fsdecode(b"caf\xe9/1.png"), "b/1.png"), "it is not UTF-8"),
        ],
    )
    def test_a_folder_that_cannot_be_trained_on_is_refused(self, folder, names, part: str):
        assert part in problem_of(folder(*names))

    def test_labels_named_like_parts_are_labels_if_they_have_no_folders(self, folder):
        assert find_images(folder("train/1.png", "test/1.png")).labels == ["test", "train"]

    def test_a_file_that_is_no_table_is_refused(self, folder):
        root = folder("a/1.png")
        assert "neither a folder of images nor a .csv file" in problem_of(root / "a" / "1.png")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root reads any folder")
    def test_a_folder_that_cannot_be_read_is_named(self, folder):
        root = folder("a/1.png", "b/1.png")
        (root / "a").chmod(0)
        assert "cannot be read: Permission denied" in problem_of(root)


class TestTable:
    def test_its_rows_name_files_beside_it(self, table):
        path = table("label,more,path\nx,1,a.png\ny,2,sub/b.png\n", "a.png", "sub/b.png")
        images = find_images(path)
        assert images.labels == ["x", "y"]
        assert images.paths == [str(path.parent / "a.png"), str(path.parent / "sub/b.png")]

    def test_spaces_around_values_and_a_mark_at_the_start_do_not_matter(self, table):
        path = table("\ufeffpath, label\na.png, x\n b.png,y \n\n", "a.png", "b.png")
        assert find_images(path).labels == ["x", "y"]

    @pytest.mark.parametrize(
        ("text", "part"),
        [
            ("", "it lacks path and label"),
            ("file,label\na.png,x\n", "it lacks path"),
            ("path,label\n", "names no images"),
            ("path,label\na.png,x\ngone.png,y\n", "line 3: there is no file 'gone.png'"),
            ("path,label\n,x\n", "line 2: there is no file ''"),
            ("path,label\na.png\n", "line 2: it lacks a column"),
            ("path,label\na.png, \n", "line 2: '' cannot be a label: it is empty"),
            ('path,label\na.png,"x\ny"\n', "line 3: 'x\\ny' cannot be a label"),
            ("path,label\na.png,x\n./a.png,y\n", "line 3: './a.png' is in line 2 too"),
            ('path,label\na.png,"x"y\n', "line 2: "),
            ("path,label\na.png,x\nb.png,x\n", "one label alone"),
            ("path,label\na\0.png,x\n", "line 2: there is no file"),
            ("path,label\na.png,caf\udce9\n", "it is not UTF-8"),
        ],
    )
    def test_what_is_wrong_is_said_with_its_line(self, table, text: str, part: str):
        path = table("", "a.png", "b.png")
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        assert part in problem_of(path)


class TestSplit:
    def test_each_label_gives_its_share(self, folder):
        names = [f"a/{i}.png" for i in range(10)] + [f"b/{i}.png" for i in range(3)]
        training, validation = split(find_images(folder(*names)), 0.2, seed=0)
        assert (training.num_per_class, validation.num_per_class) == ([8, 2], [2, 1])
        assert not {*training.paths} & {*validation.paths}
        assert len({*training.paths, *validation.paths}) == 13

    @pytest.mark.parametrize("share", [0.001, 0.999])
    def test_each_label_keeps_one_and_gives_one(self, folder, share: float):
        images = find_images(folder("a/1.png", "a/2.png", "b/1.png", "b/2.png", "b/3.png"))
        training, validation = split(images, share, seed=0)
        assert min(training.num_per_class) >= 1
        assert min(validation.num_per_class) >= 1

    def test_it_depends_on_the_seed_and_not_on_the_order_or_the_place(self, folder, tmp_path):
        root = folder(*(f"{label}/{i}.png" for label in "ab" for i in range(50)))
        images = find_images(root)
        back = LabelledImages(images.paths[::-1], images.targets[::-1], images.labels)
        held_out = {*split(images, 0.2, seed=1)[1].paths}
        assert {*split(back, 0.2, seed=1)[1].paths} == held_out
        assert {*split(images, 0.2, seed=2)[1].paths} != held_out
        moved = root.rename(tmp_path / "elsewhere")
        again = split(find_images(moved), 0.2, seed=1)[1].paths
        assert {os.path.relpath(each, moved) for each in again} == {
            os.path.relpath(each, root) for each in held_out
        }

    def test_a_label_with_one_image_is_refused_and_named(self, folder):
        images = find_images(folder("a/1.png", "b/1.png", "b/2.png"))
        with pytest.raises(DataError, match=r"a single image of 'a', such as .*/a/1\.png"):
            split(images, 0.2, seed=0)


class TestHeldOut:
    def test_a_folder_of_their_own_has_the_indices_of_those_trained_on(self, folder):
        root = folder("t/a/1.png", "t/b/1.png", "t/c/1.png", "v/c/1.png")
        training, validation = find_parts(root / "t", str(root / "v"), seed=0)
        assert training.num_per_class == [1, 1, 1]
        assert (validation.labels, validation.targets) == (["a", "b", "c"], [2])

    def test_labels_that_are_not_trained_on_are_named(self, folder):
        root = folder("v/a/1.png", "v/z/1.png")
        with pytest.raises(DataError, match=r"no image to train on has: 'z'; those .* 'a', 'b'"):
            find_held_out(root / "v", ["a", "b"])

    @pytest.mark.parametrize("val", ["0", "1", "-0.5", "20", "nan"])
    def test_a_number_that_is_no_share_is_refused(self, folder, val: str):
        with pytest.raises(DataError, match="no share"):
            find_parts(folder("a/1.png", "b/1.png"), val, seed=0)


def test_samples_are_read_as_they_were_written(tmp_path):
    images = LabelledImages(
        ["/a/x.png", '/a/"q", z.png', os.fsdecode(b"/a/\xff.png")], [1, 0, 1], [" cat, ", 'd"og']
    )
    path = tmp_path / "training.csv"
    write_samples(path, images)
    assert read_samples(path, images.labels) == images
    assert os.listdir(tmp_path) == ["training.csv"]
    with path.open(newline="", errors="surrogateescape") as file:
        assert next(csv.reader(file)) == ["path", "label"]


def test_a_label_that_is_unknown_is_refused_with_its_line(tmp_path):
    path = tmp_path / "training.csv"
    path.write_text("path,label\n/a.png,x\n/b.png,y\n")
    with pytest.raises(DataError, match="line 3: there is no label 'y'"):
        read_samples(path, ["x"])


class TestSurvey:
    def test_digits_are_small_and_gray(self, tmp_path):
        facts = survey(find_images(digits(tmp_path)))
        assert (facts.num_sampled, facts.num_unreadable) == (60, 0)
        assert (facts.short_edge, facts.aspect, facts.is_gray) == (8, 1.0, True)

    def test_gray_is_seen_in_files_that_have_three_channels(self, tmp_path):
        for label in "ab":
            (tmp_path / label).mkdir()
            gray = Image.fromarray(photographs.camera()).convert("RGB")
            gray.save(tmp_path / label / "1.jpg")
            gray.quantize(16).save(tmp_path / label / "2.png")
        assert survey(find_images(tmp_path)).is_gray

    @pytest.mark.parametrize("suffix", ["jpg", "png"])
    def test_one_photograph_in_colour_is_seen(self, tmp_path, suffix: str):
        digits(tmp_path, 20)
        Image.fromarray(photographs.astronaut()).save(tmp_path / "0" / f"z.{suffix}")
        assert not survey(find_images(tmp_path)).is_gray

    def test_the_shape_is_that_of_most(self, tmp_path):
        for label in "ab":
            (tmp_path / label).mkdir()
            for number, size in enumerate([(300, 200), (200, 300), (2000, 100)]):
                Image.new("RGB", size, "red").save(tmp_path / label / f"{number}.png")
        facts = survey(find_images(tmp_path))
        assert (facts.short_edge, facts.aspect) == (200, 1.5)

    def test_damaged_files_are_counted_and_one_is_named(self, tmp_path):
        digits(tmp_path, 20)
        (tmp_path / "0" / "broken.png").write_bytes(b"no image")
        stream = io.BytesIO()
        Image.new("L", (9, 9)).save(stream, "PPM")
        (tmp_path / "1" / "other.png").write_bytes(stream.getvalue())  # is not served either
        facts = survey(find_images(tmp_path))
        assert (facts.num_sampled, facts.num_unreadable) == (22, 2)
        assert "broken.png" in facts.reason

    def test_nothing_readable_gives_no_size(self, folder):
        facts = survey(find_images(folder("a/1.png", "b/1.png")))
        assert (facts.num_unreadable, facts.short_edge, facts.is_gray) == (2, 0, False)

    def test_only_some_of_many_are_looked_at(self, tmp_path):
        facts = survey(find_images(digits(tmp_path, 60)), most=7)
        assert facts.num_sampled == 7

    @pytest.mark.measures
    def test_many_are_surveyed_in_seconds(self, tmp_path):
        for number in range(2000):
            path = tmp_path / str(number % 2) / f"{number}.jpg"
            path.parent.mkdir(exist_ok=True)
            if number < 2:
                Image.fromarray(photographs.camera()).resize((4000, 3000)).save(path)
            else:
                path.symlink_to(tmp_path / str(number % 2) / f"{number % 2}.jpg")
        images = find_images(tmp_path)
        began = time.monotonic()
        facts = survey(images)
        assert (facts.num_sampled, facts.short_edge, facts.is_gray) == (2000, 3000, True)
        assert time.monotonic() - began < 20
