"""A model in the words of `strategies.parallel`: kinds, sizes, heads, cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from lightning_ext.parallel.parts import PipelinePart, parameters_of
from strategies.parallel import ModuleInfo

_HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "nhead")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")
# Their fused paths read the weights directly, past any module of ours.
_OPAQUE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def closed_attention(root: nn.Module) -> list[str]:
    """Paths of the attention layers that cannot be split from outside."""
    return [path for path, m in root.named_modules() if isinstance(m, nn.MultiheadAttention)]


def module_infos(root: nn.Module) -> list[ModuleInfo]:
    """All modules that may be split over the tensor axis."""
    infos: list[ModuleInfo] = []
    closed: list[str] = []
    first: dict[int, str] = {}
    for path, module in root.named_modules():
        if any(path.startswith(f"{outer}.") for outer in closed):
            continue
        if isinstance(module, _OPAQUE):
            closed.append(path)
            continue
        # Not `module.weight`, which may compute one.
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        tied = path if weight is None else first.setdefault(id(weight), path)
        kind, rows, columns = "other", 0, 0
        if type(module) is nn.Linear:
            kind, rows, columns = "linear", module.out_features, module.in_features
        elif _is_plain_embedding(module):
            kind, rows, columns = "embedding", module.num_embeddings, module.embedding_dim
        elif isinstance(module, nn.Sequential):
            kind = "sequential"
        infos.append(
            ModuleInfo(
                path, kind, rows, columns, _number(module, _HEADS), _number(module, _KV_HEADS),
                None if tied == path else tied,
            )
        )  # fmt: skip
    return infos


def _is_plain_embedding(module: nn.Module) -> bool:
    """Whether DTensor can split it: not what writes to its weight, or has sparse gradients."""
    return type(module) is nn.Embedding and module.max_norm is None and not module.sparse


def _number(module: nn.Module, names: Iterable[str]) -> int | None:
    """A whole number that the module, or its `config`, holds under one of these names."""
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def roots_of(root: nn.Module, parts: Sequence[PipelinePart]) -> list[str]:
    """Paths of the modules that the parts consist of."""
    paths = {id(module): path for path, module in root.named_modules()}
    return [
        paths[id(owner)]
        for part in parts
        for owner in part.owned
        if isinstance(owner, nn.Module) and id(owner) in paths
    ]


def costs(parts: Sequence[PipelinePart]) -> list[float]:
    """Cost of each part, estimated: multiplications per item, where a look-up costs none.

    An embedding costs nothing but the memory of its rows, which counts a hundredth.
    """
    found = []
    for part in parts:
        tables = {
            id(module.weight)
            for owner in part.owned
            if isinstance(owner, nn.Module)
            for module in owner.modules()
            if isinstance(module, nn.Embedding)
        }
        found.append(
            float(
                sum(p.numel() / (100 if id(p) in tables else 1) for p in set(parameters_of(part)))
            )
        )
    return found
