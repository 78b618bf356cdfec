import json

import pytest
import torch
from safetensors.torch import save_file

from models.errors import CheckpointError, ModelError, RankError
from models.out_of_memory import is_out_of_memory
from tests.models.split import networks_to_cut as networks
from tests.models.split.group import Group


@pytest.fixture(scope="module")
def group():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    group = Group(3)
    yield group
    group.stop()
    torch.set_num_threads(threads)


def num_bytes(network):
    return sum(tensor.nbytes for tensor in [*network.parameters(), *network.buffers()])


def call(model, *args, **kwargs):
    with torch.inference_mode():
        return model.network(*args, **kwargs)


def assert_equal(got, expected):
    deviation = (got - expected).abs().max() / expected.abs().max()
    assert got.shape == expected.shape
    assert deviation <= 1e-5


CASES = [
    (networks.sequential, (8,), 0.81),
    (networks.resnet, (3, 40, 40), 0.6),
    (networks.vit, (3, 32, 32), 0.65),
    (networks.encoder, (5, 32), 0.7),
]


@pytest.mark.parametrize(("build", "shape", "largest"), CASES)
def test_stages_answer_as_the_whole_and_each_has_its_part(group, build, shape, largest):
    whole = build().eval()
    with group.loaded(build, example=[torch.randn(2, *shape)]) as model, torch.no_grad():
        for num_rows in (1, 5, 5, 5, 5, 5, 3):
            x = torch.randn(num_rows, *shape)
            assert_equal(call(model, x), whole(x))
    parts = [model.split_network.part, *model.parts]
    assert [part.rank for part in parts] == [0, 1]
    assert sum(part.num_bytes for part in parts) == num_bytes(whole)
    assert max(part.num_bytes for part in parts) <= largest * num_bytes(whole)


def test_weighing_makes_no_semaphore_that_a_killed_rank_would_leave(group, monkeypatch):
    monkeypatch.setattr("torch.fx.interpreter.tqdm", None)  # whose lock is one
    with group.loaded(networks.sequential, example=[torch.randn(2, 8)]) as model:
        assert model.split_network.report.note.startswith("balanced by bytes and time")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_padding_of_an_encoder_leaves_the_answer_as_it_is(group):
    whole = networks.encoder().eval()
    x = torch.randn(3, 5, 32)
    is_padding = torch.arange(5) >= torch.tensor([5, 3, 2])[:, None]
    example = {"src": None, "src_key_padding_mask": None}
    with group.loaded(networks.encoder, example=example) as model:
        got = call(model, x, src_key_padding_mask=is_padding)
    with torch.inference_mode():
        assert_equal(got, whole(x, src_key_padding_mask=is_padding))
    assert model.split_network.report.note.startswith("balanced by bytes, since the shapes")


def test_any_values_cross_where_the_network_says_that_it_is_to_be_cut(group):
    whole = networks.Tangled().eval()
    x, other = torch.randn(6, 4), torch.randn(6, 1)
    with group.loaded(networks.Tangled, example={"x": x, "other": other}, size=3) as model:
        outputs = [call(model, x, other=other) for _ in range(8)]
        with pytest.raises(TypeError, match="was cut for calls without 'mask'"):
            call(model, x, x, other=other)
    expected = whole(x, other=other)
    for got in outputs:
        assert list(got) == ["c", "pair"]
        for name, tensor in got.items():
            assert_equal(tensor, expected[name])
    assert model.split_network.report.cuts == ("second", "third")
    assert [part.text for part in model.parts] == ["second", "third to the end"]


def test_stages_that_would_compute_something_else_are_refused(group):
    x = torch.zeros(1, 4)
    with (
        pytest.raises(ModelError, match=r"Asking answers a batch of 1 otherwise than whole: off"),
        group.loaded(networks.asking, example=[x]),
    ):
        pass
    with group.loaded(networks.asking, example=[None]) as model:
        assert "not held against the whole network" in model.split_network.report.note


def test_a_network_that_computes_rows_together_gets_them_together(group):
    whole = networks.centred()
    with group.loaded(networks.centred, split_points=["1"]) as model, torch.no_grad():
        for _ in range(7):
            x = torch.randn(8, 4)
            assert_equal(call(model, x), whole(x))


def test_a_small_network_is_balanced_by_time_and_a_large_one_by_bytes(group):
    def report(**attributes):
        example = [torch.zeros(1, 8)]
        with group.loaded(networks.slow_at_first, example=example, **attributes) as model:
            return model.split_network.report

    by_bytes, by_time = report(), report(room_bytes=1 << 20)
    assert by_bytes.cuts == ("4",)
    assert by_bytes.note.startswith("balanced by bytes and time: ")
    assert by_time.cuts[0] in ("1", "2")
    assert by_time.note.startswith("balanced by time, since its 0.0 MB are little beside the 1 MB")
    assert report(known_split=by_time) == by_time


def test_an_input_that_a_stage_refuses_fails_alone(group):
    good = torch.ones(4, 2)
    with group.loaded(networks.refusing, split_points=["1"]) as model:
        expected = call(model, good)
        for _ in range(4):  # in one piece, and in several
            with pytest.raises(RankError, match="rank 1: ValueError: 500 is too much") as refused:
                call(model, torch.tensor([[1.0, 1], [1, 500], [1, 1], [1, 1]]))
            assert not is_out_of_memory(refused.value)
            assert torch.equal(call(model, good), expected)
        with pytest.raises(RankError, match="rank 1: MemoryError") as short:
            call(model, -1000 * good)
        assert is_out_of_memory(short.value)
        with pytest.raises(RankError, match="same dtype"):
            call(model, good.double())
        assert torch.equal(call(model, good), expected)


def test_each_stage_reads_its_own_weights_from_several_files(group, tmp_path):
    trained = networks.sequential()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter += 1
    names = list(trained.state_dict())
    files = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        chosen = {n: t for n, t in trained.state_dict().items() if files[n] == file}
        save_file(chosen, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    x = torch.randn(3, 8)
    with group.loaded(networks.sequential, str(index), split_points=["2"]) as model:
        assert_equal(call(model, x), trained(x).detach())
    with (
        pytest.raises(CheckpointError, match=r"does not fit VisionTransformer: .* missing"),
        group.loaded(networks.vit, str(index)),
    ):
        pass


def test_what_cannot_be_cut_so_is_refused_by_name(group):
    for points, message in [
        (["no"], "cannot be cut in front of 'no': its forward has 0, 1, 2"),
        (["0"], "cannot be cut in front of 0: there must be steps before"),
        (["1", "2"], "2 stages want 1 split points, not 2"),
    ]:
        with (
            pytest.raises(ModelError, match=message),
            group.loaded(networks.sequential, split_points=points),
        ):
            pass
