import pytest

from inferpool.models.attached import (
    BUILT_IN_SOURCES,
    CARD_FILE,
    MODEL_FILE_SUFFIXES,
    OTHERS,
    SOURCES,
    attached,
)


@pytest.mark.parametrize("name", [*SOURCES, *OTHERS])
def test_every_name_stands_for_something_that_is_there(name):
    if name == "torchvision:":
        pytest.importorskip("torchvision")
    assert callable(attached(name))


def test_every_form_of_a_source_has_a_place():
    prefixes = {"torchvision:", "encoder:", "reranker:", "transformers:", "torchserve:"}
    others = prefixes | {"AOTInductor", "package.module:Class"}
    named = {*BUILT_IN_SOURCES, *MODEL_FILE_SUFFIXES, CARD_FILE}
    assert named | others == SOURCES.keys()
