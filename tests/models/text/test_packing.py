"""Networks that compute no padding answer as those that do."""

import pytest
import torch

from inferpool.models.text.bert import Bert, BertConfig

LENGTHS = (7, 1, 12, 3, 12)


def network() -> Bert:
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    return Bert(config).eval().requires_grad_(False)


def padded(fill: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids, the mask and types of texts, with a token in the place of padding."""
    generator = torch.Generator().manual_seed(4)
    mask_BT = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    ids_BT = torch.randint(1, 50, mask_BT.shape, generator=generator)
    types_BT = torch.randint(0, 2, mask_BT.shape, generator=generator)
    return ids_BT.masked_fill(~mask_BT, fill), mask_BT, types_BT


@pytest.mark.parametrize("has_types", [False, True])
def test_packed_texts_get_the_vectors_of_padded_ones(has_types: bool) -> None:
    bert = network()
    ids_BT, mask_BT, types_BT = padded(fill=0)
    types = (types_BT,) if has_types else ()
    wanted_BTH = bert.encoded(ids_BT, mask_BT, *types)
    bert.packs = True
    found_BTH = bert.encoded(ids_BT, mask_BT, *types)
    assert (found_BTH - wanted_BTH)[mask_BT].abs().max() < 1e-5
    assert not found_BTH[~mask_BT].any()
    assert wanted_BTH[mask_BT].std() > 0.1


def test_packed_texts_do_not_depend_on_padding_or_on_their_neighbours() -> None:
    bert = network()
    bert.packs = True
    ids_BT, mask_BT, _ = padded(fill=0)
    found_BTH = bert(ids_BT, mask_BT)
    assert torch.equal(bert(padded(fill=9)[0], mask_BT), found_BTH)
    for row, length in enumerate(LENGTHS):
        alone_1TH = bert(ids_BT[row : row + 1, :length], mask_BT[row : row + 1, :length])
        assert (alone_1TH[0] - found_BTH[row, :length]).abs().max() < 1e-5


def test_types_change_the_vectors() -> None:
    bert = network()
    ids_BT, mask_BT, types_BT = padded(fill=0)
    for bert.packs in (False, True):
        difference = bert.encoded(ids_BT, mask_BT, types_BT) - bert(ids_BT, mask_BT)
        assert difference[mask_BT].abs().max() > 0.1
