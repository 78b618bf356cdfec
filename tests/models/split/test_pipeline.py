import json

import pytest
import torch
from safetensors.torch import save_file

from tests.models.split import networks
from tests.models.split.rank_processes import RaisedError, RankProcesses


def num_bytes(network):
    return sum(tensor.nbytes for tensor in [*network.parameters(), *network.buffers()])


def assert_equal(got, expected):
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


CASES = [
    (networks.mlp, (32,), 0.6),
    pytest.param(networks.resnet, (3, 40, 40), 0.6, marks=pytest.mark.slow),
    (networks.vit, (3, 32, 32), 0.65),
    (networks.encoder, (5, 32), 0.7),
]


@pytest.mark.parametrize(("build", "shape", "largest"), CASES)
def test_stages_answer_as_the_whole_and_each_has_its_part(pair, build, shape, largest):
    whole = build().eval()
    with pair.loaded("pipeline", build, example=[torch.randn(2, *shape)]) as model, torch.no_grad():
        for num_rows in (1, 5, 5, 5, 5, 5, 3):
            x = torch.randn(num_rows, *shape)
            assert_equal(model(x), whole(x))
    parts = model.parts
    assert [part.rank for part in parts] == [0, 1]
    assert sum(part.num_bytes for part in parts) == num_bytes(whole)
    assert max(part.num_bytes for part in parts) <= largest * num_bytes(whole)


def test_measuring_steps_makes_no_semaphore_that_a_killed_rank_would_leave(pair):
    example = [torch.randn(2, 32)]
    with (
        pair.patched("torch.fx.interpreter.tqdm", None),  # whose lock is one
        pair.loaded("pipeline", networks.mlp, example=example) as model,
    ):
        assert model.report.note.startswith("balanced by bytes and time")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_padding_of_an_encoder_leaves_the_answer_as_it_is(pair):
    whole = networks.encoder().eval()
    x = torch.randn(3, 5, 32)
    is_padding = torch.arange(5) >= torch.tensor([5, 3, 2])[:, None]
    example = {"src": None, "src_key_padding_mask": None}
    with pair.loaded("pipeline", networks.encoder, example=example) as model:
        got = model(x, src_key_padding_mask=is_padding)
    with torch.inference_mode():
        assert_equal(got, whole(x, src_key_padding_mask=is_padding))
    assert model.report.note.startswith("balanced by bytes, since the shapes")


@pytest.fixture
def trio():
    with RankProcesses(3) as trio:
        yield trio


def test_any_values_cross_where_the_network_says_that_it_is_to_be_cut(trio):
    whole = networks.Tangled().eval()
    x, other = torch.randn(6, 4), torch.randn(6, 1)
    with trio.loaded("pipeline", networks.Tangled, example={"x": x, "other": other}) as model:
        outputs = [model(x, other=other) for _ in range(8)]
        with pytest.raises(RaisedError, match=r"TypeError: .*was cut for calls without 'mask'"):
            model(x, x, other=other)
    expected = whole(x, other=other)
    for got in outputs:
        assert list(got) == ["c", "pair"]
        for name, tensor in got.items():
            assert_equal(tensor, expected[name])
    assert model.report.cuts == ("second", "third")
    assert [part.text for part in model.parts[1:]] == ["second", "third to the end"]


def test_stages_that_would_compute_something_else_are_refused(pair):
    x = torch.zeros(1, 4)
    with (
        pytest.raises(RaisedError, match="Asking answers a batch of 1 otherwise than whole: off"),
        pair.loaded("pipeline", networks.Asking, example=[x]),
    ):
        pass
    with pair.loaded("pipeline", networks.Asking, example=[None]) as model:
        assert "not compared with the whole network" in model.report.note


@pytest.mark.parametrize(
    "build", [networks.Centred, networks.Choosing, networks.Cropping, networks.Overwriting]
)
def test_a_network_that_computes_rows_together_gets_them_together(pair, build):
    whole = build()
    with pair.loaded("pipeline", build, split_points=["1"]) as model, torch.no_grad():
        for _ in range(14):
            x = torch.randn(8, 4)
            expected = whole(x.clone())
            assert_equal(model(x), expected)


def test_a_small_network_is_balanced_by_time_and_a_large_one_by_bytes(pair):
    def report(**attributes):
        example = [torch.zeros(1, 8)]
        with pair.loaded(
            "pipeline", networks.slow_at_first, example=example, **attributes
        ) as model:
            return model.report

    by_bytes, by_time = report(), report(room_bytes=1 << 20)
    assert by_bytes.cuts == ("4",)
    assert by_bytes.note.startswith("balanced by bytes and time: ")
    assert by_time.cuts[0] in ("1", "2")
    assert by_time.note.startswith(
        "balanced by time, since its 0.0 MiB are little beside the 1.0 MiB"
    )
    assert report(known_split=by_time) == by_time


def test_an_input_that_a_stage_refuses_fails_alone(pair):
    good = torch.ones(4, 2)
    with pair.loaded("pipeline", networks.refusing, split_points=["1"]) as model:
        expected = model(good)
        for _ in range(4):  # in one piece, and in several
            with pytest.raises(
                RaisedError, match="RankError: rank 1: ValueError: 500 is too much"
            ) as refused:
                model(torch.tensor([[1.0, 1], [1, 500], [1, 1], [1, 1]]))
            assert not refused.value.is_shortage
            assert torch.equal(model(good), expected)
        with pytest.raises(RaisedError, match="RankError: rank 1: MemoryError") as short:
            model(-1000 * good)
        assert short.value.is_shortage
        with pytest.raises(RaisedError, match="RankError: rank 1: SystemExit: no more"):
            model(99 * good)
        with pytest.raises(RaisedError, match=r"RankError: .*same dtype"):
            model(good.double())
        assert torch.equal(model(good), expected)


def test_each_stage_reads_its_own_weights_from_several_files(pair, tmp_path):
    trained = networks.mlp().eval()
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
    x = torch.randn(3, 32)
    with pair.loaded("pipeline", networks.mlp, str(index), split_points=["2"]) as model:
        assert_equal(model(x), trained(x).detach())
    with (
        pytest.raises(
            RaisedError, match=r"CheckpointError: .*does not fit VisionTransformer: .* missing"
        ),
        pair.loaded("pipeline", networks.vit, str(index)),
    ):
        pass


def test_split_points_that_cannot_be_are_refused_by_name(pair):
    for points, message in [
        (["no"], "cannot be cut in front of 'no': its forward has 0, 1, 2"),
        (["0"], "cannot be cut in front of 0: there must be steps before"),
        (["1", "2"], "2 stages want 1 split points, not 2, .* devices_per_replica = 3"),
        ("1", r"split_points is a list of names: \['1'\]"),
    ]:
        with (
            pytest.raises(RaisedError, match=f"ModelError: .*{message}"),
            pair.loaded("pipeline", networks.mlp, split_points=points),
        ):
            pass
