import copy

import msgspec
import pytest
import torch
from torch import nn

from inferpool.models.files.run_folder import TransformCard
from inferpool.models.training.images import TrainingBatch
from inferpool.models.training.learner import Learner, NotFiniteError
from inferpool.models.training.recipe import Recipe
from tests.training_network import TinyNet

RECIPE = Recipe(
    model="tests.training_network:TinyNet",
    weights="none",
    options={},
    labels=("a", "b", "c"),
    transform=TransformCard(resize=32, crop=32, mean=(0.5,) * 3, std=(0.5,) * 3),
    epochs=1,
    head_only_epochs=0,
    batch_size=8,
    learning_rate=0.01,
    warmup=0.2,
    weight_decay=0.05,
    label_smoothing=0.0,
    ema_decay=0.9,
    augment="none",
    flip=False,
    precision="fp32",
    channels_last=False,
    seed=0,
    num_workers=0,
    checkpoint_minutes=5,
    device="cpu",
    threads=1,
    is_idle=False,
)


def batch(num=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (num, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return TrainingBatch(pixels, torch.arange(num) % 3, range(num), {})


def learner(recipe=RECIPE, **options):
    torch.manual_seed(0)
    network = TinyNet(3, dropout=0.0, **options)
    made = Learner(network, network.last, recipe, num_steps=10)
    made.begin(head_only=False)
    return made


def test_the_loss_falls_and_the_rate_rises_then_falls_to_nothing():
    made = learner()
    losses, rates = [], []
    for _ in range(10):
        rates.append(made.learning_rate)
        losses.append(made.step([batch()]))
    assert losses[-1] < losses[0] / 2
    assert rates[:3] == pytest.approx([0.005, 0.01, 0.01])
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert made.learning_rate == pytest.approx(0)


def test_two_passes_have_the_gradients_of_one():
    torch.manual_seed(0)
    whole, halves = (TinyNet(3, dropout=0.0).double() for _ in range(2))
    halves.load_state_dict(whole.state_dict())
    gradients = []
    full = batch()
    for network, passes in (
        (whole, [full]),
        (
            halves,
            [
                TrainingBatch(full.pixels[:4], full.targets[:4], range(4), {}),
                TrainingBatch(full.pixels[4:], full.targets[4:], range(4), {}),
            ],
        ),
    ):
        made = Learner(network, network.last, RECIPE, num_steps=10)
        made.begin(head_only=False)
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        made.gradients(passes)
        gradients.append({name: p.grad.clone() for name, p in network.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=1e-12)


def test_a_loss_of_nan_changes_nothing():
    made = learner(nan_at=3)
    for _ in range(2):
        made.step([batch()])
    before = copy.deepcopy(made.network.state_dict())
    with pytest.raises(NotFiniteError, match="the loss is nan"):
        made.step([batch()])
    for name, parameter in made.network.named_parameters():
        assert torch.equal(parameter, before[name])


def test_only_the_last_layer_learns_at_first():
    made = learner()
    before = copy.deepcopy(made.network.state_dict())
    made.begin(head_only=True)
    made.step([batch()])
    after = made.network.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"last.weight", "last.bias"}
    made.begin(head_only=False)
    made.step([batch()])
    assert not torch.equal(before["body.0.weight"], made.network.state_dict()["body.0.weight"])


def test_frozen_norms_keep_their_statistics():
    made = learner(msgspec.structs.replace(RECIPE, freeze_norm=True))
    before = made.network.body[1].running_mean.clone()
    made.step([batch()])
    assert torch.equal(made.network.body[1].running_mean, before)


def test_the_average_is_judged_and_lies_between_the_weights():
    made = learner()
    starts = made.network.last.weight.clone()
    for number in range(5):
        made.step([batch(seed=number)])
    average = made.judged.last.weight
    assert made.judged is not made.network
    assert not torch.equal(average, made.network.last.weight)
    assert (average - starts).abs().sum() < (made.network.last.weight - starts).abs().sum()


def test_it_goes_on_from_a_state_bit_for_bit():
    whole = learner()
    for number in range(6):
        whole.step([batch(seed=number)])
    first = learner()
    for number in range(3):
        first.step([batch(seed=number)])
    state = copy.deepcopy(first.state())
    second = learner()
    second.load(state)
    for number in range(3, 6):
        second.step([batch(seed=number)])
    for name, tensor in whole.judged.state_dict().items():
        assert torch.equal(tensor, second.judged.state_dict()[name]), name


def test_slow_norms_learn_within_a_short_run():
    torch.manual_seed(0)
    network = TinyNet(3)
    network.body[1].momentum = 0.01
    Learner(network, network.last, RECIPE, num_steps=200)
    assert network.body[1].momentum == 0.1
    network.body[1].momentum = 0.01
    Learner(network, network.last, RECIPE, num_steps=100_000)
    assert network.body[1].momentum == 0.01
