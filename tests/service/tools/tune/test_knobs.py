from pathlib import Path

from inferpool.service.settings.loader import load
from inferpool.service.tools.tune.knobs import Knob, KnobFacts, knobs_for
from inferpool.service.tools.tune.plan import Goal
from inferpool.workers.host.devices import Gpu, Host

_NO_LIMIT = Goal()
_GPUS = tuple(
    Gpu(index=i, uuid=f"GPU-{i}", name="A100", memory_bytes=2**36, cpus=()) for i in (0, 1)
)


def knobs(
    tmp_path: Path,
    model: str = "",
    *,
    cores: int = 2,
    gpus: tuple[Gpu, ...] = (),
    fixed: frozenset[str] = frozenset(),
    preset: str = "folded",
    decode: str = "exact",
    goal: Goal = _NO_LIMIT,
    num_fronts: int = 1,
) -> dict[str, Knob]:
    file = tmp_path / "inferpool.toml"
    file.write_text(f'[models.net]\nsource = "torchvision:resnet18"\n{model}')
    settings = load({}, {}, tmp_path).settings
    host = Host(cpus=tuple(range(cores)), num_cores=cores, gpus=gpus)
    facts = KnobFacts(
        settings=settings,
        model="net",
        host=host,
        goal=goal,
        preset=preset,
        decode=decode,
        num_fronts=num_fronts,
    )
    return {knob.name: knob for knob in knobs_for(facts, fixed)}


def test_replicas_and_threads_share_the_cores_in_other_ways(tmp_path: Path):
    two = knobs(tmp_path)["replicas x threads"]
    assert two.ways == [
        [{"replicas": 1, "threads_per_replica": 1}],
        [{"replicas": 1, "threads_per_replica": 2}],
    ]
    sixteen = knobs(tmp_path, cores=16)["replicas x threads"]  # as it is: 8 x 2
    assert sixteen.ways == [
        [{"replicas": 7, "threads_per_replica": 2}],
        [
            {"replicas": 4, "threads_per_replica": 4},
            {"replicas": 2, "threads_per_replica": 8},
            {"replicas": 1, "threads_per_replica": 16},
        ],
        [{"replicas": 16, "threads_per_replica": 1}],
    ]


def test_a_split_model_keeps_its_devices_for_more_replicas(tmp_path: Path):
    split = 'placement = "tensor"\ndevices_per_replica = 4'
    assert knobs(tmp_path, split, cores=8)["replicas x threads"].ways == [
        [{"devices_per_replica": 2, "replicas": 2}]
    ]
    assert "replicas x threads" not in knobs(tmp_path, 'placement = "pipeline"', gpus=_GPUS)


def test_one_core_leaves_nothing_to_vary(tmp_path: Path):
    assert "replicas x threads" not in knobs(tmp_path, cores=1)


def test_gpus_get_more_replicas_each(tmp_path: Path):
    assert knobs(tmp_path, gpus=_GPUS)["replicas x threads"].ways == [
        [{"replicas": 4}, {"replicas": 6}]
    ]


def test_ladders_begin_at_what_the_user_has_set(tmp_path: Path):
    found = knobs(tmp_path, "max_batch_size = 16\ncredit = 3\nbatch_wait_ms = 2.0\n")
    assert found["batch size"].ways[0][0] == {"max_batch_size": 32}
    assert found["batch size"].ways[1][0] == {"max_batch_size": 8}
    assert found["credit"].ways == [[{"credit": 4}, {"credit": 5}], [{"credit": 2}]]
    assert found["wait for a batch"].ways == [[{"batch_wait_ms": 5.0}], [{"batch_wait_ms": 0.0}]]


def test_preset_in_use_is_not_tried_nor_one_that_changes_answers(tmp_path: Path):
    found = knobs(tmp_path)["speed preset"]
    assert found.ways == [[{"speed": "exact"}], [{"speed": "channels_last"}]]
    assert "speed preset" not in knobs(tmp_path, preset="exact")


def test_answers_that_the_user_wants_exact_stay_exact(tmp_path: Path):
    found = knobs(tmp_path, 'speed = "exact"\ndecode = "fast"\n', decode="fast")
    assert "speed preset" not in found
    assert "decoding" not in found


def test_fast_decoding_that_auto_chose_is_compared_with_the_exact_one(tmp_path: Path):
    assert knobs(tmp_path, decode="fast")["decoding"].ways == [[{"decode": "exact"}]]
    assert "decoding" not in knobs(tmp_path)


def test_one_front_end_more_and_one_less_are_tried(tmp_path: Path):
    assert knobs(tmp_path)["processes that take calls"].ways == [[{"front_ends": 2}]]
    found = knobs(tmp_path, cores=16, num_fronts=4)["processes that take calls"]
    assert found.ways == [[{"front_ends": 5}, {"front_ends": 6}], [{"front_ends": 3}]]


def test_objective_is_a_knob_where_there_is_one(tmp_path: Path):
    assert "objective" not in knobs(tmp_path)
    found = knobs(tmp_path, goal=Goal(p99_ms=50.0))["objective"]
    assert found.ways == [[{"objective_p99_ms": 50.0}]]


def test_settings_given_for_this_run_are_not_varied(tmp_path: Path):
    found = knobs(tmp_path, fixed=frozenset({"replicas", "speed"}))
    assert "replicas x threads" not in found
    assert "speed preset" not in found
    assert "batch size" in found
