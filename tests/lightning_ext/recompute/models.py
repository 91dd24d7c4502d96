"""Models of the kinds that people train, small."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            heads,
        )

    def forward(self, x: Tensor) -> Tensor:
        items, length, width = x.shape
        split = self.qkv(x).view(items, length, 3, self.heads, width // self.heads)
        y = F.scaled_dot_product_attention(*split.permute(2, 0, 3, 1, 4), is_causal=True)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(items, length, width))
        return out


class TransformerBlock(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.dropout = Attention(width), nn.Dropout(dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Transformer(nn.Module):
    def __init__(self, blocks: int = 6, width: int = 32, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, dropout) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


class Residual(nn.Module):
    """As in ResNet, one activation called twice."""

    def __init__(self, inside: int, outside: int, inplace: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace)
        self.skip = (
            nn.Sequential(nn.Conv2d(inside, outside, 1, bias=False), nn.BatchNorm2d(outside))
            if inside != outside
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.skip(x)
        out: Tensor = self.relu(y)
        return out


class ConvNet(nn.Module):
    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace)
        )
        self.layer1 = nn.Sequential(*(Residual(8, 8, inplace) for _ in range(3)))
        self.pool = nn.MaxPool2d(2)
        self.layer2 = nn.Sequential(Residual(8, 16, inplace), Residual(16, 16, inplace))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.pool(self.layer1(self.stem(x))))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


def mlp(activation: Callable[[], nn.Module] = nn.ReLU, layers: int = 8) -> nn.Sequential:
    """A plain chain."""
    parts: list[nn.Module] = [nn.Linear(20, 64)]
    for _ in range(layers):
        parts += [activation(), nn.Linear(64, 64)]
    return nn.Sequential(*parts, nn.Linear(64, 10))


class UNet(nn.Module):
    """Uneven, with connections across."""

    def __init__(self) -> None:
        super().__init__()

        def two(inside: int, outside: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(),
                nn.Conv2d(outside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(),
            )  # fmt: skip

        self.down1, self.down2, self.middle = two(3, 8), two(8, 16), two(16, 32)
        self.pool = nn.MaxPool2d(2)
        self.up2, self.up1 = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.merge2, self.merge1 = two(32, 16), two(16, 8)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(self.pool(a))
        c = self.middle(self.pool(b))
        c = self.merge2(torch.cat([self.up2(c), b], 1))
        out: Tensor = self.head(self.merge1(torch.cat([self.up1(c), a], 1)))
        return out


def pixels() -> Tensor:
    """Images."""
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def tokens() -> Tensor:
    """Texts."""
    return torch.randint(50, (4, 16), generator=torch.Generator().manual_seed(1))


def rows() -> Tensor:
    """Of a table."""
    return torch.randn(64, 20, generator=torch.Generator().manual_seed(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, rows),
    "mlp, in place": (lambda: mlp(lambda: nn.ReLU(True)), rows),
    "cnn": (ConvNet, pixels),
    "cnn, in place": (lambda: ConvNet(True), pixels),
    "transformer": (Transformer, tokens),
    "encoder-decoder": (UNet, pixels),
}
