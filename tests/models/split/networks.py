"""Small networks of the kinds that are split."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional


def mlp():
    return nn.Sequential(
        nn.Linear(32, 96), nn.GELU(), nn.Dropout(), nn.Linear(96, 32), nn.Linear(32, 7)
    )


def vit():
    from torchvision.models.vision_transformer import VisionTransformer  # takes seconds

    return VisionTransformer(
        image_size=32,
        patch_size=8,
        num_layers=2,
        num_heads=3,
        hidden_dim=48,
        mlp_dim=96,
        num_classes=10,
    )


def resnet():
    from torchvision.models import resnet18

    return resnet18()


def bert():
    from inferpool.models.text.bert import Bert, BertConfig

    config = BertConfig(
        model_type="bert",
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    return Bert(config)


class Encoder(nn.Module):
    """Tokens and which of them are padding to one vector each."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu")
        self.embedding = nn.Embedding(100, 32)
        self.layers = nn.TransformerEncoder(layer, 2)

    def forward(self, ids, padding=None):
        return self.layers(self.embedding(ids), src_key_padding_mask=padding)


class Attention(nn.Module):
    """By hand, with its heads counted in attributes, and a mask that may be missing."""

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


class Packed(nn.Module):
    """Attention whose heads are not to be told from the code: its matrices are split all the same.

    q, k and v are one matrix, as in GPT-2.
    """

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
        self.first, self.second = Attention(), Packed()
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x, mask=None):
        x = x + self.first(x, mask)
        x = x + self.second(x)
        return x + self.down(functional.silu(self.gate(x)) * self.up(x))


class StyledBlocks(Blocks):
    """With a plan of torch's styles."""

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


class FailingAlone(nn.Module):
    """On the rank that it is told, after the last collective: nobody is left waiting in one."""

    def __init__(self):
        super().__init__()
        self.mlp = mlp()

    def forward(self, x, rank):
        x = self.mlp(x)
        if int(rank) == dist.get_rank():
            raise ZeroDivisionError
        return x


class Guarded(nn.Module):
    """Branches on its input, so that it is traced by its children, and refuses some."""

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
