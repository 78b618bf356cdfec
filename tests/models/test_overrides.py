import pytest

from inferpool.models.base import Model
from inferpool.models.overrides import interface_of


class Labelled(Model):
    def __init__(self, labels: object) -> None:
        self.labels = labels  # type: ignore[assignment]  # a user's class may mean anything by it


def test_the_names_of_a_models_classes_belong_to_its_interface_which_is_usual_all_the_same():
    interface = interface_of(Labelled(["cat", "caf\udce9", 3]))
    assert interface.labels == ("cat", "caf?", "3")  # they can be sent
    assert interface.is_usual


@pytest.mark.parametrize("labels", ["cat", 3, {0: "cat"}, None, ["cat"] * 40_000], ids=type)
def test_an_attribute_that_names_no_classes_is_left_alone(labels):
    assert interface_of(Labelled(labels)).labels == ()
