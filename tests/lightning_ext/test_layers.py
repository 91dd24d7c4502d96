"""The tree read from a torch module is the module's own."""

from __future__ import annotations

import torch
from torch import nn

from lightning_ext._layers import layers_from_module
from tests.lightning_ext.helpers import Net


def test_every_parameter_once_per_use_in_torch_s_own_order() -> None:
    net = nn.Module()
    net.block = Net()
    net.scale = nn.Parameter(torch.ones(1))
    net.again = net.block.embed  # a shared layer, which `named_parameters` would skip
    names = [p.name for p in layers_from_module(net).all_parameters()]
    assert names == [name for name, _ in net.named_parameters(remove_duplicate=False)]
    assert "again.weight" in names


def test_identity_marks_sharing() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    first, _, second, other = layers_from_module(net).all_parameters()
    assert first.identity == second.identity != other.identity


def test_roles() -> None:
    net = nn.ModuleDict(
        {
            "embedding": nn.Embedding(3, 4),
            "list": nn.ModuleList([nn.Linear(4, 4)]),
            "layernorm": nn.LayerNorm(4),
            "batchnorm": nn.BatchNorm2d(4),
            "rms": nn.RMSNorm(4),
            "linear": nn.Linear(4, 4),
            "attention": nn.MultiheadAttention(4, 2),
        }
    )
    roles = {child.name: child.role for child in layers_from_module(net).children}
    assert roles == {
        "embedding": "embedding",
        "list": "list",
        "layernorm": "norm",
        "batchnorm": "norm",
        "rms": "norm",
        "linear": "layer",
        "attention": "layer",
    }


def test_biases() -> None:
    biases = {p.name for p in layers_from_module(Net()).all_parameters() if p.is_bias}
    assert biases == {n for n, _ in Net().named_parameters() if n.endswith(".bias")}
