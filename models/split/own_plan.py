"""Plans that a model brings: `Model.tensor_plan`, or `tensor_plan` of its network. In workers only.

A plan maps names of submodules to words; "*" stands for one part of a name, as in
"layers.*.mlp.up":

    "column"     a Linear that leaves its outputs in parts, for what is elementwise and then a "row"
    "row"        a Linear that takes inputs in parts; its outputs are whole
    "gather"     a Linear whose outputs are computed in parts and put together
    "embedding"  an Embedding whose features are looked up in parts and put together
    "attention"  an nn.MultiheadAttention; or a module of Linears that shows its heads to torch.fx

or to styles of `torch.distributed.tensor.parallel`, which mean what they mean there.
"""

import re
from collections.abc import Mapping
from typing import TypeAlias, cast

from torch import nn

from inferpool.models.errors import ModelError
from inferpool.models.split.tensor_plan import Cut, How, TensorPlan, attention_complaint
from inferpool.models.split.tensor_search import find_attention

_WORDS = ("column", "row", "gather", "embedding", "attention")

OwnPlan: TypeAlias = Mapping[str, object]
"""As a user writes it: words, or styles of torch's own."""


def own_plan(network: nn.Module, wishes: OwnPlan, size: int) -> TensorPlan:
    """Apply a user's plan to a network.

    Raises:
        ModelError: It names what the network has not, or what cannot be cut so.
    """
    plan = TensorPlan()
    modules = dict(network.named_modules())
    for pattern, wish in wishes.items():
        for name in _matching(modules, pattern):
            module = modules[name]
            word = _word(wish, module)
            if word is None:
                plan.styles[name] = wish
            elif word == "attention" and not isinstance(module, nn.MultiheadAttention):
                found = find_attention(module, name)
                if not found.cuts:
                    raise ModelError(
                        f"tensor_plan: the heads of {name} are not to be told from its code; "
                        'its Linears can be named "gather"'
                    )
                plan.cuts += found.cuts
                plan.counts += found.counts
            else:
                plan.cuts.append(_cut(name, module, word))
    for cut in plan.cuts:
        if cut.units < size:
            raise ModelError(f"tensor_plan: {cut.name} has {cut.units} parts for {size} ranks")
    return plan


def _matching(modules: Mapping[str, nn.Module], pattern: str) -> list[str]:
    parts = (re.escape(part).replace(r"\*", "[^.]*") for part in pattern.split("."))
    expression = re.compile(r"\.".join(parts))
    names = [name for name in modules if name and expression.fullmatch(name)]
    if not names:
        raise ModelError(f"tensor_plan: the network has no submodule {pattern!r}")
    return names


def _word(wish: object, module: nn.Module) -> How | None:
    """The word of a wish; None for a style that no word stands for."""
    word = wish
    if not isinstance(wish, str):  # a style is said by a word where that means the same: faster
        from inferpool.models.split.dtensors import word_for

        word = word_for(wish, module)
        if word is None:
            return None
    if word not in _WORDS:
        raise ModelError(f"tensor_plan: {word!r} is none of {', '.join(_WORDS)}")
    return cast("How", word)


def _cut(name: str, module: nn.Module, how: How) -> Cut:
    wanted = {"attention": nn.MultiheadAttention, "embedding": nn.Embedding}.get(how, nn.Linear)
    if not isinstance(module, wanted):
        raise ModelError(
            f'tensor_plan: "{how}" is for {wanted.__name__}, and {name} is a '
            f"{type(module).__name__}"
        )
    if isinstance(module, nn.MultiheadAttention):
        if complaint := attention_complaint(module):
            raise ModelError(f"tensor_plan: {name} cannot be split: {complaint}")
        return Cut(name=name, how=how, units=module.num_heads)
    if isinstance(module, nn.Embedding):
        return Cut(name=name, how=how, units=module.embedding_dim)
    assert isinstance(module, nn.Linear)
    width = module.in_features if how == "row" else module.out_features
    return Cut(name=name, how=how, units=width)
