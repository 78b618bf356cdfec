import io
import tomllib
from collections.abc import Callable

import pytest

from inferpool.models.files.run_folder import TransformCard
from inferpool.models.training.samples import ImageFacts, LabelledImages
from inferpool.service.settings.names import FlagError
from inferpool.service.train.planning import Plan, plan
from inferpool.service.train.settings import TrainSettings, write_settings
from inferpool.workers.host.devices import Host
from inferpool.workers.host.gpus import Gpu

NATIVE = TransformCard(resize=256, crop=224, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
TWO_CORES = Host(cpus=(0, 1), num_cores=2)
DIGITS = tuple("0123456789")
PHOTOS = ("cat", "dog")
SMALL = ImageFacts(num_sampled=100, num_unreadable=0, short_edge=8, is_gray=True)
LARGE = ImageFacts(num_sampled=100, num_unreadable=0, short_edge=500, aspect=1.5)


def gpus(num: int, **fields: str) -> Host:
    found = tuple(
        Gpu(index=i, uuid=f"GPU-{i}", name="A100", memory_bytes=80 << 30, cpus=(), **fields)
        for i in range(num)
    )
    return Host(cpus=tuple(range(16)), num_cores=16, gpus=found)


def images(num: int, labels: tuple[str, ...], name: str = "t") -> LabelledImages:
    targets = [index % len(labels) for index in range(num)]
    return LabelledImages([f"/{name}/{index}.png" for index in range(num)], targets, labels)


def planned(
    num: int = 1437,
    labels: tuple[str, ...] = DIGITS,
    facts: ImageFacts | None = SMALL,
    *,
    held_out: LabelledImages | None = None,
    native: TransformCard | None = NATIVE,
    fits: Callable[[int], bool] = lambda edge: True,
    host: Host = TWO_CORES,
    has_bf16: bool = False,
    busy: tuple[str, ...] = (),
    **settings: object,
) -> Plan:
    return plan(
        TrainSettings.model_validate({"data": "images", **settings}),
        images(num, labels),
        images(360, labels, "v") if held_out is None else held_out,
        facts,
        native=native,
        fits=fits,
        host=host,
        has_bf16=lambda kind: has_bf16,
        busy=busy,
    )


def problem(**arguments) -> str:
    with pytest.raises(FlagError) as caught:
        planned(**arguments)
    text = str(caught.value)
    assert "\n" not in text
    return text


class TestDefaults:
    def test_digits_from_random_weights(self):
        made = planned(weights="none")
        recipe = made.recipe
        assert recipe.transform == TransformCard(
            resize=32, crop=32, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)
        )
        assert (recipe.epochs, recipe.head_only_epochs, recipe.batch_size) == (28, 0, 32)
        assert (recipe.learning_rate, recipe.augment, recipe.flip) == (0.001, "shift", False)
        assert 0.9 < recipe.ema_decay < 1
        assert (recipe.device, recipe.devices, recipe.threads, recipe.num_workers) == (
            *("cpu", [], 2, 0),
        )
        assert (recipe.precision, recipe.channels_last, recipe.is_idle) == ("fp32", False, True)
        assert (recipe.data, recipe.weights, recipe.labels) == ("images", "none", [*DIGITS])
        assert list(made.sentences) == [
            "1,437 images to train on, 360 held out, 10 labels (digits: not mirrored)",
            "most images have 8 x 8 pixels; the network sees 32 x 32",
            "28 epochs of 44 steps of 32 images, rate 0.001, from random weights",
            "1 process on the CPU with 2 threads, on cores that nobody else wants, in fp32",
            made.sentences[-1],
        ]
        assert (
            "chosen by itself: --epochs 28 --head-only-epochs 0 --batch-size 32"
            in made.sentences[-1]
        )
        assert "--no-flip" in made.sentences[-1]

    def test_photographs_are_prepared_as_the_weights_were(self):
        made = planned(300, PHOTOS, LARGE)
        recipe = made.recipe
        assert recipe.transform == NATIVE
        assert (recipe.augment, recipe.flip, recipe.num_workers) == ("crop", True, 1)
        assert (recipe.epochs, recipe.head_only_epochs, recipe.batch_size) == (30, 1, 16)
        assert recipe.learning_rate < 0.001
        assert "from the weights DEFAULT" in made.sentences[2]
        assert made.sentences[0].endswith("2 labels")

    @pytest.mark.parametrize("edge", [100, 250])
    def test_images_are_not_enlarged_to_be_cut(self, edge: int):
        facts = ImageFacts(num_sampled=9, num_unreadable=0, short_edge=edge)
        transform = planned(300, PHOTOS, facts).recipe.transform
        assert transform.resize == transform.crop
        assert transform.mean == NATIVE.mean

    def test_nothing_of_a_large_gray_image_is_cut_off(self):
        facts = ImageFacts(num_sampled=9, num_unreadable=0, short_edge=900, is_gray=True)
        transform = planned(300, PHOTOS, facts).recipe.transform
        assert (transform.resize, transform.crop) == (224, 224)

    def test_gray_images_are_not_mirrored(self):
        made = planned(300, PHOTOS)
        assert not made.recipe.flip
        assert "(gray: not mirrored)" in made.sentences[0]

    def test_a_network_without_a_known_transform_gets_the_usual_one(self):
        recipe = planned(300, PHOTOS, LARGE, native=None, model="nets:Mine").recipe
        assert (recipe.transform.crop, recipe.transform.mean) == (224, (0.5, 0.5, 0.5))

    def test_a_dataset_of_the_users_is_planned_without_files(self):
        made = planned(300, PHOTOS, None, data="", dataset="mine:Photos")
        assert (made.recipe.data, made.recipe.dataset) == ("mine:Photos", "mine:Photos")
        assert made.recipe.transform.crop == 224

    def test_rare_labels_can_count_more(self):
        recipe = planned(301, PHOTOS, LARGE, class_weights="balanced").recipe
        assert recipe.class_weights is not None
        assert recipe.class_weights[0] < 1 < recipe.class_weights[1]
        assert planned().recipe.class_weights is None


class TestGiven:
    def test_what_the_user_asks_for_is_done_and_not_called_chosen(self):
        made = planned(
            *(1437, DIGITS, SMALL),
            weights="none", epochs=3, head_only_epochs=0, batch_size=30, accumulate=3,
            learning_rate=0.5, ema_decay=0.0, augment="trivial", flip=True, image_size=48,
            precision="fp32", channels_last=True, threads=1, workers=2, priority="normal",
        )  # fmt: skip
        recipe = made.recipe
        assert (recipe.epochs, recipe.batch_size, recipe.accumulate) == (3, 30, 3)
        assert (recipe.learning_rate, recipe.ema_decay, recipe.augment) == (0.5, 0.0, "trivial")
        assert (recipe.flip, recipe.transform.crop, recipe.channels_last) == (True, 48, True)
        assert (recipe.threads, recipe.num_workers, recipe.is_idle) == (1, 2, False)
        assert not any("chosen" in each or "mirrored" in each for each in made.sentences)

    def test_the_settings_with_what_was_chosen_make_the_same_plan(self):
        made = planned(weights="none")
        stream = io.StringIO()
        write_settings(made.settings, stream)
        again = TrainSettings.model_validate(tomllib.loads(stream.getvalue()))
        assert again == made.settings
        assert (again.epochs, again.image_size, again.devices) == (28, 32, "auto")
        second = planned(**again.model_dump())
        assert second.recipe == made.recipe
        assert second.settings == made.settings


class TestDevices:
    def test_every_gpu_has_a_process(self):
        made = planned(30_000, PHOTOS, LARGE, host=gpus(4), has_bf16=True)
        recipe = made.recipe
        assert (recipe.device, recipe.devices, made.num_ranks) == ("cuda", [0, 1, 2, 3], 4)
        assert (recipe.precision, recipe.channels_last, recipe.is_idle) == ("bf16", True, False)
        assert (recipe.threads, recipe.num_workers, recipe.batch_size) == (4, 4, 256)

    def test_a_gpu_without_bf16_computes_in_fp32(self):
        recipe = planned(host=gpus(1)).recipe
        assert (recipe.precision, recipe.channels_last) == ("fp32", False)

    def test_gpus_are_named_as_in_the_service_and_counted_as_torch_sees_them(self):
        host = Host(cpus=(0,), num_cores=1, gpus=gpus(4).gpus[2:])  # the environment hides two
        assert planned(host=host, devices="cuda:3").recipe.devices == [1]
        assert planned(host=host, devices="cuda").recipe.devices == [0, 1]
        assert planned(host=host, devices="cuda:3,2", processes=1).recipe.devices == [1]
        assert "no cuda:0 on this host, only cuda:2" in problem(host=host, devices="cuda:0")

    def test_gpus_that_others_use_are_left_out_unless_they_are_named(self):
        assert planned(host=gpus(3), busy=("GPU-0",)).recipe.devices == [1, 2]
        assert planned(host=gpus(3), busy=("GPU-0",), devices="cuda:0").recipe.devices == [0]
        assert "other processes use all GPUs" in problem(host=gpus(1), busy=("GPU-0",))

    def test_the_cpu_can_be_chosen_beside_gpus(self):
        assert planned(host=gpus(2), devices="cpu").recipe.device == "cpu"

    def test_of_slices_of_gpus_a_run_takes_one(self):
        assert planned(host=gpus(2, sliced_from="GPU-9")).recipe.devices == [0]

    def test_processes_on_the_cpu_divide_its_cores(self):
        made = planned(processes=2)
        assert (made.num_ranks, made.recipe.threads, made.recipe.devices) == (2, 1, [])
        assert "2 processes on the CPU with 1 thread each" in made.sentences[4]
        crowded = planned(processes=3, batch_size=33)
        assert "they share 2 cores" in " ".join(crowded.sentences)

    def test_several_hosts_divide_a_batch_however_many_come(self):
        made = planned(host=gpus(2), nodes="2:3", rdzv="a:1")
        assert made.recipe.batch_size % 12 == 0
        assert "2 to 3 hosts meet at a:1" in made.sentences

    def test_a_gpu_that_is_not_used_is_explained(self):
        host = Host(cpus=(0, 1), num_cores=2, problem="the driver does not answer")
        assert "no GPU is used: the driver does not answer" in planned(host=host).sentences
        assert "the driver does not answer" in problem(host=host, devices="cuda")


class TestRefused:
    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ({"devices": "cuda"}, "--devices: there is no cuda on this host, only 2 CPU cores"),
            ({"host": gpus(2), "processes": 3}, "--processes: 3 are more than the 2 devices"),
            ({"precision": "bf16"}, "--precision: this cpu does not compute in bf16"),
            ({"sync_batchnorm": True}, "--sync-batchnorm: "),
            ({"batch_size": 2000}, "--batch-size: 2,000 images a step are more than the 1,437"),
            (
                {"batch_size": 2, "processes": 2, "accumulate": 2},
                "--batch-size: 2 images a step are too few for 2 processes with 2 passes a step",
            ),
            ({"batch_size": 33, "processes": 2}, "do not divide 33 images evenly; take 32 or 34"),
            ({"num": 5, "host": gpus(8)}, "there are 5 images to train on, fewer than 8 processes"),
            ({"labels": ("one",)}, "two labels or more"),
            ({"held_out": images(0, DIGITS)}, "--val: no image is held out"),
            ({"image_size": 40, "fits": lambda edge: edge == 224}, "takes no images of 40 x 40"),
            ({"fits": lambda edge: False}, "takes no images of any usual size up to 224 x 224"),
            ({"head_only_epochs": 9, "num": 10**6}, "9 are more than all 3 epochs"),
            (
                {"facts": ImageFacts(num_sampled=3, num_unreadable=3, reason="/a.png: what?")},
                "none of the 3 files looked at can be read as an image, such as /a.png: what?",
            ),
        ],
    )
    def test_what_cannot_be_is_one_sentence(self, arguments, text: str):
        assert text in problem(**arguments)


class TestSaid:
    def test_damaged_images_are_said_with_one_of_them(self):
        facts = ImageFacts(num_sampled=100, num_unreadable=3, reason="/a.png: no", short_edge=8)
        assert "3 of 100 images looked at cannot be read, such as /a.png: no" in (
            planned(facts=facts).sentences
        )

    def test_images_that_are_trained_on_and_held_out_are_said(self):
        said = planned(held_out=images(10, DIGITS)).sentences[1]
        assert said.startswith("10 images held out are also trained on")

    def test_what_is_cut_off_long_images_is_said(self):
        facts = ImageFacts(num_sampled=9, num_unreadable=0, short_edge=40, aspect=4.0)
        assert any("4.0 times as long as wide" in each for each in planned(facts=facts).sentences)
