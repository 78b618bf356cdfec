from itertools import islice

from service.chaos.faults import schedule


def test_the_seed_decides_what_happens_when():
    every_s = {"kill": 2.0, "stop": 9.0, "poison": 5.0}
    first = list(islice(schedule(1, every_s), 50))  # type: ignore[arg-type]
    assert first == list(islice(schedule(1, every_s), 50))  # type: ignore[arg-type]
    assert first != list(islice(schedule(2, every_s), 50))  # type: ignore[arg-type]


def test_faults_come_in_order_and_about_as_often_as_asked():
    found = list(islice(schedule(3, {"kill": 2.0, "stop": 0.0, "poison": 10.0}), 600))
    moments = [moment for moment, _ in found]
    assert moments == sorted(moments)
    kills = [moment for moment, fault in found if fault == "kill"]
    assert 1.8 < kills[-1] / len(kills) < 2.2
    assert {fault for _, fault in found} == {"kill", "poison"}


def test_a_kind_that_was_not_asked_for_never_happens():
    assert list(schedule(1, {"kill": 0.0, "stop": 0.0, "poison": 0.0})) == []
