"""Small torch networks, spelled as users and well-known libraries spell them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from lightning_ext._layers import layers_from_module
from strategies.learning_rate import layers_from_names, parameter_depths


def depths_of(module: nn.Module) -> dict[str, int]:
    return parameter_depths(layers_from_module(module))


def depths_by_name(module: nn.Module) -> dict[str, int]:
    return parameter_depths(layers_from_names([name for name, _ in module.named_parameters()]))


def levels(module: nn.Module) -> list[set[str]]:
    """Names of the layers on each level, from the lowest."""
    found: dict[int, set[str]] = {}
    for name, depth in depths_of(module).items():
        found.setdefault(depth, set()).add(name.rpartition(".")[0] or name)
    return [found[depth] for depth in sorted(found)]


def linear(inputs: int = 4, outputs: int = 4) -> nn.Linear:
    return nn.Linear(inputs, outputs)


def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers with an activation after each but the last."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def bare(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape or (1,)))


class Net(nn.Module):
    """Whatever it is given, in that order."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = linear(width, 3 * width)
        self.proj = linear(width, width)


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = linear(width, 2 * width)
        self.fc2 = linear(2 * width, width)


class Block(nn.Module):
    """A transformer block without its arithmetic."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)


class ViT(nn.Module):
    """Named as in timm."""

    def __init__(self, depth: int = 3, head: bool = True) -> None:
        super().__init__()
        self.cls_token = bare(1, 1, 4)
        self.pos_embed = bare(1, 2, 4)
        self.patch_embed = Net(proj=nn.Conv2d(3, 4, 4))
        self.blocks = nn.Sequential(*[Block() for _ in range(depth)])
        self.norm = nn.LayerNorm(4)
        if head:
            self.head = linear()


class Residual(nn.Module):
    """Named as `BasicBlock` in torchvision."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        if inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, bias=False)
            self.downsample = nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """Named as in torchvision."""

    def __init__(self, blocks: Sequence[int] = (2, 2), head: bool = True) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 7, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU()
        for stage, count in enumerate(blocks, start=1):
            widths = [max(4, 2**stage), *[2 ** (stage + 1)] * count]
            pairs = pairwise(widths)
            setattr(self, f"layer{stage}", nn.Sequential(*[Residual(*pair) for pair in pairs]))
        self.fc = linear(2 ** (len(blocks) + 1), 2) if head else nn.Identity()


class DoubleConv(nn.Module):
    """Named as in the best-known U-Net for torch."""

    def __init__(self) -> None:
        super().__init__()
        self.double_conv = nn.Sequential(
            *(nn.Conv2d(2, 2, 3, bias=False), nn.BatchNorm2d(2), nn.ReLU()),
            *(nn.Conv2d(2, 2, 3, bias=False), nn.BatchNorm2d(2), nn.ReLU()),
        )


class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maxpool_conv = nn.Sequential(nn.MaxPool2d(2), DoubleConv())


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(2, 2, 2)
        self.conv = DoubleConv()


class Perceptron(nn.Module):
    """Three layers held as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.l1 = linear()
        self.l2 = linear()
        self.l3 = linear()


class LoRA(nn.Module):
    """An adapted linear layer, named as by peft."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = linear()
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 4, bias=False)})
