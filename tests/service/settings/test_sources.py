import pytest

from inferpool.models.sources import registry
from inferpool.service.settings.sources import BUILT_IN_SOURCES, is_source, slug, source_hint


def test_the_settings_and_the_registry_agree_on_what_a_source_is():
    assert BUILT_IN_SOURCES == registry._BUILT_IN
    for suffix in (".pt2", *registry._SCRIPT_SUFFIXES):
        assert is_source(f"net{suffix}")
        assert slug(f"net{suffix}") == "net"
    for suffix in registry._WEIGHT_SUFFIXES:
        assert not is_source(f"net{suffix}")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("efficientnet_lite0", "efficientnet_lite0"),
        ("torchvision:resnet18", "resnet18"),
        ("my.mod:MyNet", "mynet"),
        ("path/to/net.pt2", "net"),
        ("./Big Net.pt", "big-net"),
        ("mod:_Private", "private"),
        ("mod:___", "model"),
        ("mod:" + "x" * 100, "x" * 64),
    ],
)
def test_the_name_of_a_source_is_fit_for_a_url(source, name):
    assert is_source(source)
    assert slug(source) == name


def test_every_classifier_of_torchvision_is_known_by_its_name():
    torchvision = pytest.importorskip("torchvision")
    for name in torchvision.models.list_models(module=torchvision.models):
        assert source_hint(name, []) == f"did you mean torchvision:{name}?"
    assert "did you mean" not in source_hint("my_net", [])
