import pytest

from inferpool.service.errors import StartError
from inferpool.service.parts.fronts.number import number_of_fronts
from inferpool.service.settings.loader import load


def settings(tmp_path, devices: str = "auto", **environ: str):
    variables = {f"INFERPOOL_{name.upper()}": value for name, value in environ.items()}
    return load({"model": "echo", "devices": devices}, variables, tmp_path).settings


@pytest.mark.parametrize(
    ("num_cores", "expected"), [(1, 1), (2, 1), (7, 1), (8, 2), (15, 3), (16, 4), (128, 4)]
)
def test_there_are_more_where_there_are_cores_for_them(tmp_path, num_cores, expected):
    made = settings(tmp_path, arena_bytes=str(2**28))
    assert number_of_fronts(made, num_cores)[0] == expected


@pytest.mark.parametrize(
    ("num_cores", "num_gpus", "expected"),
    [(16, 1, "4 (auto, for 16 cores)"), (24, 4, "6 (auto, for 24 cores and 4 GPUs)"),
     (96, 3, "6 (auto, for 96 cores and 3 GPUs)"), (96, 8, "8 (auto, for 96 cores and 8 GPUs)"),
     (4, 8, "1 (auto, for 4 cores)")],
)  # fmt: skip
def test_several_gpus_have_two_each_where_there_are_cores_for_them(
    tmp_path, num_cores, num_gpus, expected
):
    made = settings(tmp_path, arena_bytes=str(2**28))
    num, why = number_of_fronts(made, num_cores, num_gpus)
    assert f"{num} ({why})" == expected


def test_gpus_that_no_model_uses_get_none(tmp_path):
    made = settings(tmp_path, arena_bytes=str(2**28), devices="cpu")
    assert number_of_fronts(made, 96, 8) == (4, "auto, for 96 cores")


def test_more_fronts_than_cores_are_started_with_a_warning(tmp_path, caplog):
    made = settings(tmp_path, front_ends="3", arena_bytes=str(2**28))
    assert number_of_fronts(made, 3)[0] == 3
    assert caplog.messages == []
    assert number_of_fronts(made, 2)[0] == 3
    assert "3 processes take calls on 2 cores" in caplog.text


def test_each_part_of_the_arena_must_hold_the_largest_body(tmp_path):
    made = settings(tmp_path, front_ends="3", arena_bytes=str(2**26))
    with pytest.raises(StartError, match=f"set arena_bytes to {3 * 2**25} or more"):
        number_of_fronts(made, 2)
    made = settings(tmp_path, arena_bytes=str(2**26))
    assert number_of_fronts(made, 64) == (2, "the arena has no room for 4")
