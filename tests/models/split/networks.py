"""Small networks of the kinds that are split. Ranks import them, and build the same each time."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 96), nn.GELU(), nn.Dropout(), nn.Linear(96, 32), nn.Linear(32, 7)
    )


def vit():
    from torchvision.models.vision_transformer import VisionTransformer  # takes seconds

    torch.manual_seed(0)
    network = VisionTransformer(
        image_size=32,
        patch_size=8,
        num_layers=4,
        num_heads=3,
        hidden_dim=48,
        mlp_dim=96,
        num_classes=10,
    )
    nn.init.normal_(network.heads[0].weight)  # zeros as it is built
    return network


def resnet():
    from torchvision.models import resnet18

    torch.manual_seed(0)
    return resnet18()


class Residual(nn.Module):
    """Convolutions whose input is added to their output, with running means as in a ResNet."""

    def __init__(self, width=16):
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)

    def forward(self, x):
        return functional.relu(x + self.second(functional.relu(self.norm(self.first(x)))))


def residuals():
    """Return a small ResNet. torchvision's takes each rank seconds to import."""
    torch.manual_seed(0)
    stem = (nn.Conv2d(3, 16, 7, stride=2), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return nn.Sequential(*stem, nn.MaxPool2d(3, 2), *(Residual() for _ in range(4)), *head)


def bert():
    from inferpool.models.text.bert import Bert, BertConfig

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    return Bert(config).eval()


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(32))


class Encoder(nn.Module):
    """Tokens and their padding mask to one vector each."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu")
        self.embedding = nn.Embedding(100, 32)
        self.layers = nn.TransformerEncoder(layer, 2)

    def forward(self, ids, padding=None):
        return self.layers(self.embedding(ids), src_key_padding_mask=padding)


class Attention(nn.Module):
    """Attention by hand, with its heads counted in attributes, and a mask that may be missing."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.width = width
        self.num_heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x, mask=None):
        batch, tokens, _ = x.shape
        q, k, v = (
            project(x).view(batch, tokens, self.num_heads, 8).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        scores = q @ k.transpose(-2, -1) / 8**0.5
        if mask is not None:
            scores = scores.masked_fill(mask, -1e9)
        heads = functional.softmax(scores, dim=-1) @ v
        return self.out(heads.transpose(1, 2).reshape(batch, tokens, self.width))


class PackedAttention(nn.Module):
    """Attention with one matrix for queries, keys and values, as in GPT-2."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        heads = functional.scaled_dot_product_attention(q, k, v)
        return self.out(heads.transpose(1, 2).flatten(2))


class Blocks(nn.Module):
    """Both kinds of attention, and an MLP with a gate."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Attention(), PackedAttention()
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x, mask=None):
        x = x + self.first(x, mask)
        x = x + self.second(x)
        return x + self.down(functional.silu(self.gate(x)) * self.up(x))


class StyledBlocks(Blocks):
    """Blocks with a plan of torch's styles."""

    @property
    def tensor_plan(self):
        from torch.distributed.tensor import Replicate  # takes seconds
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        return {
            "gate": ColwiseParallel(),  # the same as "column"
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
            "second.qkv": ColwiseParallel(output_layouts=Replicate()),  # the same as "gather"
            "second.out": RowwiseParallel(input_layouts=Replicate()),  # left to DTensor
        }


class FailingOnRank(nn.Module):
    """Fails on one rank, after the last collective: nobody is left waiting in one."""

    def __init__(self):
        super().__init__()
        self.mlp = mlp()

    def forward(self, x, rank):
        x = self.mlp(x)
        if int(rank) == dist.get_rank():
            raise ZeroDivisionError
        return x


class Guarded(nn.Module):
    """Branches on its input, so that it cannot be traced, and refuses some."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 32)
        self.mlp = mlp()

    def forward(self, ids):
        if ids.min() < 0:
            raise IndexError("negative")
        return self.mlp(self.embedding(ids))


INPUTS = {
    mlp: lambda: (torch.randn(5, 32),),
    vit: lambda: (torch.randn(3, 3, 32, 32),),
    Encoder: lambda: (torch.randint(100, (2, 6)), torch.arange(6) >= torch.tensor([[6], [4]])),
    Blocks: lambda: (torch.randn(2, 6, 32), torch.rand(2, 1, 1, 6) > 0.7),
    Guarded: lambda: (torch.randint(10, (4, 5)),),
}


class Chain(nn.Sequential):
    """Three Linears, as a class that a worker can serve."""

    def __init__(self):
        super().__init__(*(nn.Linear(2, 2) for _ in range(3)))


class Refusing(nn.Module):
    """Branches on its input, so that it is one step; and fails on some."""

    def forward(self, x):
        if x.max() > 100:
            raise ValueError(f"{float(x.max()):g} is too much")
        if x.min() < -100:
            raise MemoryError
        if x.max() == 99:
            raise SystemExit("no more")
        return x


def refusing():
    return nn.Sequential(nn.Identity(), Refusing(), nn.Linear(2, 2))


class Tangled(nn.Module):
    """Several values of every kind cross its cuts, and its outputs have names."""

    split_points = ("second", "third")

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.third.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("shift", torch.tensor(3.0), persistent=False)

    def forward(self, x, mask=None, *, other):
        size = x.shape[1]
        a = self.first(x) * self.scale
        b = self.second(a) + self.shift
        if mask is not None:
            b = b * mask
        c = self.third(b + x) * self.scale / size
        return {"c": c, "pair": torch.cat((a, other), 1)}


class SlowStep(nn.Module):
    """A step without weights."""

    def forward(self, x):
        if x.shape[0]:
            time.sleep(0.01)
        return x


def slow_at_first():
    return nn.Sequential(
        SlowStep(), nn.Linear(8, 8), SlowStep(), nn.Linear(8, 64), nn.Linear(64, 64)
    )


class TwoLinears(nn.Sequential):
    """Two Linears of four features, behind what its kinds do with its input."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))


def _doubled(x):
    return x * 2 if torch.is_tensor(x) else x


class Asking(TwoLinears):
    """Asks for types in a helper, where tracing does not see it."""

    def forward(self, x):
        return super().forward(_doubled(x))


class Centred(TwoLinears):
    """Has each row depend on the others."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


class Choosing(Centred):
    """Answers with whole numbers."""

    def forward(self, x):
        return super().forward(x).argmax(1)


class Cropping(TwoLinears):
    """Answers with as many columns as some row has that is positive up to there."""

    def forward(self, x):
        x = super().forward(x)
        return x[:, : (x > 0).long().cumprod(1).sum(1).max().clamp(1)]


class Overwriting(Centred):
    """Writes to its input."""

    def forward(self, x):
        return super().forward(x.mul_(3))
