"""Which weights of a model are split over the tensor axis, and along which dim.

Two linear layers in a row need no communication in between if the first is split by its outputs
("column") and the second by its inputs ("row"): attention, where each rank has some of the heads,
and the MLP, where each rank has some of the hidden units. Embeddings and the layer that predicts
tokens are split by vocabulary.

Source: Shoeybi et al., Megatron-LM (arXiv 1909.08053), sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import gcd

KINDS = ("column", "row", "vocab", "replicate")

_QKV = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("wq", "wk", "wv"),
    ("to_q", "to_k", "to_v"),
    ("q_lin", "k_lin", "v_lin"),
)
# Rows in the order query, key, value; `query_key_value` has that order within each head.
_FUSED = ("c_attn", "qkv", "qkv_proj", "Wqkv", "in_proj", "to_qkv")
_FUSED_BY_HEAD = ("query_key_value",)
_ATTENTION_OUT = (
    "o_proj",
    "out_proj",
    "c_proj",
    "proj",
    "wo",
    "o",
    "out_lin",
    "to_out.0",
    "to_out",
    "out",
    "dense",
    "output.dense",
)
_UP = (
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("wi_0", "wi_1"),
    ("up_proj",),
    ("fc1",),
    ("c_fc",),
    ("fc_in",),
    ("w1",),
    ("wi",),
    ("lin1",),
    ("linear1",),
    ("dense_h_to_4h",),
    ("intermediate.dense",),
)
# Both layers up in one, the gate first.
_FUSED_UP = ("gate_up_proj", "w12")
_DOWN = (
    "down_proj",
    "fc2",
    "fc_out",
    "c_proj",
    "w2",
    "wo",
    "lin2",
    "linear2",
    "dense_4h_to_h",
    "output.dense",
)
_EMBEDDING = (
    "embed_tokens",
    "wte",
    "tok_embeddings",
    "word_embeddings",
    "token_embedding",
    "tok_emb",
)
_HEAD = ("lm_head", "embed_out", "output_projection")


@dataclass(frozen=True)
class ModuleInfo:
    """A module as the plan sees it.

    Args:
        path: Its name in the whole model, such as `"model.blocks.0.attn.q_proj"`.
        kind: `"linear"`, `"embedding"`, `"sequential"` or `"other"`.
        rows: Outputs of a linear layer, entries of an embedding. Default: 0.
        columns: Inputs of a linear layer, width of an embedding. Default: 0.
        heads: Attention heads, if the module says so. Default: None.
        kv_heads: Heads of keys and values, where there are fewer. Default: None.
        tied: Path of an earlier module with the same weight. Default: None.
    """

    path: str
    kind: str
    rows: int = 0
    columns: int = 0
    heads: int | None = None
    kv_heads: int | None = None
    tied: str | None = None


@dataclass(frozen=True)
class TensorRule:
    """How one module is split.

    Args:
        kind: `"column"`, `"row"` or `"vocab"`.
        sections: Blocks of equal size that the rows consist of, each to be split by itself: 3 for
            a layer that makes queries, keys and values at once, 2 for a gate and what it lets
            through. Default: 1.
    """

    kind: str
    sections: int = 1

    @property
    def dim(self) -> int:
        """Dim of the weight along which it is split."""
        return 1 if self.kind == "row" else 0


@dataclass
class TensorPlan:
    """What is split, and inside which modules the pieces are put together again.

    Args:
        rules: By path of the module.
        regions: Paths of the modules whose inputs and outputs are whole.
        left: Why a module that looked like it is not split, by path.
    """

    rules: dict[str, TensorRule] = field(default_factory=dict)
    regions: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)

    def add(self, region: str, rules: Mapping[str, TensorRule]) -> None:
        """Split some modules inside a region."""
        self.rules.update(rules)
        if region not in self.regions:
            self.regions.append(region)


def tensor_plan(
    modules: Sequence[ModuleInfo],
    size: int,
    own: Mapping[str, str] | None = None,
    roots: Iterable[str] = ("",),
) -> TensorPlan:
    """Find what to split over the tensor axis.

    Recognised are attention with separate or fused query, key and value, MLPs with one or two
    layers up and one down (also as an `nn.Sequential` of two linear layers), embeddings of tokens
    and the layer that predicts them, by the names that Llama-, GPT-2-, BERT- and ViT-like models
    give them. The rest stays whole on every rank.

    Args:
        modules: All modules of the model, parents before children.
        size: Ranks along the tensor axis.
        own: `{pattern: "column" | "row" | "vocab" | "replicate"}` by module path, with `*` and
            `?`; wins over what is recognised. Default: None.
        roots: Paths of the modules that may be split; a pair is split only inside one of them.
            Default: the whole model.

    Returns:
        The plan; empty if `size` is 1.

    Raises:
        ValueError: A number of heads, hidden units or rows is not a multiple of `size`, or a
            pattern is of an unknown kind or fits no linear layer or embedding.

    Example:
        >>> mlp = [ModuleInfo("mlp", "other"), ModuleInfo("mlp.fc1", "linear", 64, 16),
        ...        ModuleInfo("mlp.fc2", "linear", 16, 64)]
        >>> {path: rule.kind for path, rule in tensor_plan(mlp, 2).rules.items()}
        {'mlp.fc1': 'column', 'mlp.fc2': 'row'}
    """
    finder = _Finder(modules, size, own, tuple(roots))
    return finder.plan if size == 1 else finder.find()


def _checked(
    own: Mapping[str, str] | None, modules: Mapping[str, ModuleInfo], ties: Mapping[str, list[str]]
) -> dict[str, str]:
    """The user's kind for each path that a pattern fits, and for what shares its weight."""
    kinds: dict[str, str] = {}
    layers = [m for m in modules.values() if m.kind in ("linear", "embedding")]
    for pattern, kind in (own or {}).items():
        if kind not in KINDS:
            raise ValueError(
                f"tensor_plan[{pattern!r}] must be one of {', '.join(KINDS)}, got {kind!r}"
            )
        found = [m.path for m in layers if fnmatchcase(m.path, pattern)]
        if not found:
            known = ", ".join(m.path for m in layers[:8]) + (", ..." if len(layers) > 8 else "")
            raise ValueError(
                f"tensor_plan: the pattern {pattern!r} fits no linear layer or embedding; "
                f"there are {known or 'none'}"
            )
        shared = [path for name in found for path in ties[name]]
        tables = [path for path in shared if modules[path].kind == "embedding"]
        if tables and kind in ("column", "row"):
            raise ValueError(
                f"tensor_plan[{pattern!r}] is {kind!r}, but {tables[0]!r} is an embedding or "
                "shares its weight; pass 'vocab' or 'replicate'"
            )
        kinds.update(dict.fromkeys(shared, kind))
    return kinds


class _Finder:
    def __init__(
        self,
        modules: Sequence[ModuleInfo],
        size: int,
        own: Mapping[str, str] | None,
        roots: tuple[str, ...],
    ) -> None:
        self.modules = {m.path: m for m in modules}
        self.ties: dict[str, list[str]] = {}
        for module in modules:
            group = self.ties.setdefault(module.tied or module.path, [])
            group.append(module.path)
            self.ties[module.path] = group
        self.own = _checked(own, self.modules, self.ties)
        self.size, self.roots = size, roots
        self.plan = TensorPlan()

    def find(self) -> TensorPlan:
        self._own()
        for path, module in self.modules.items():
            if not self._inside(path):
                continue
            if module.kind == "sequential":
                self._sequential(path)
            elif module.kind == "other":
                self._attention(path)
                self._mlp(path)
        self._vocabulary()
        return self.plan

    def _inside(self, path: str) -> bool:
        return any(root in ("", path) or path.startswith(f"{root}.") for root in self.roots)

    def _layer(self, parent: str, name: str) -> ModuleInfo | None:
        module = self.modules.get(f"{parent}.{name}" if parent else name)
        if module is None or module.kind != "linear" or len(self.ties[module.path]) > 1:
            return None  # who shares a weight cannot be split by its place in one of its layers
        return None if module.path in self.plan.rules or module.path in self.own else module

    def _layers(self, parent: str, names: Iterable[str]) -> list[ModuleInfo] | None:
        found = [self._layer(parent, name) for name in names]
        layers = [layer for layer in found if layer is not None]
        return layers if len(layers) == len(found) else None

    def _own(self) -> None:
        for path, kind in self.own.items():
            if kind == "replicate":
                continue
            fused = kind == "column" and path.rpartition(".")[2] in _FUSED
            module, rule = self.modules[path], TensorRule(kind, 3 if fused else 1)
            self._divides(path, "rows" if rule.dim == 0 else "columns", module, rule)
            parent = path.rpartition(".")[0]
            # Whole inputs and outputs at the layer itself, if its parent is cut into stages.
            region = parent if kind != "vocab" and parent and self._inside(parent) else path
            self.plan.add(region, {path: rule})

    def _attention(self, path: str) -> None:
        columns, parts, sections = self._projections(path)
        if not columns:
            return
        for region in (path, path.rpartition(".")[0]):
            for name in _ATTENTION_OUT:
                row = self._layer(region, name)
                if row is None or row.columns * parts != columns[0].rows:
                    continue
                if self._inside(region):
                    self._heads(path)
                    rules = {c.path: TensorRule("column", sections) for c in columns}
                    self._add(region, rules | {row.path: TensorRule("row")})
                    return
        self.plan.left[path] = "attention without an output layer of a known name and size"

    def _projections(self, path: str) -> tuple[list[ModuleInfo], int, int]:
        """Layers that make queries, keys and values; how many of these in one; sections."""
        for names in _QKV:
            if columns := self._layers(path, names):
                return columns, 1, 1
        for name in (*_FUSED, *_FUSED_BY_HEAD):
            if layer := self._layer(path, name):
                return [layer], 3, 3 if name in _FUSED else 1
        return [], 1, 1

    def _heads(self, path: str) -> None:
        module = self.modules[path]
        for what, heads in (("heads", module.heads), ("key and value heads", module.kv_heads)):
            if heads is not None and heads % self.size:
                both = gcd(module.heads or heads, module.kv_heads or heads)
                possible = ", ".join(str(n) for n in range(1, both + 1) if both % n == 0)
                pattern = f"{path}.*".lstrip(".")
                raise ValueError(
                    f"tensor={self.size} does not divide the {heads} {what} of {path!r}; "
                    f"pass tensor= one of {possible}, or tensor_plan={{{pattern!r}: 'replicate'}}"
                )

    def _mlp(self, path: str) -> None:
        fused = [(name,) for name in _FUSED_UP]
        for names in (*_UP, *fused):
            columns, sections = self._layers(path, names), 2 if names in fused else 1
            if not columns:
                continue
            for name in _DOWN:
                row = self._layer(path, name)
                if row is not None and all(c.rows == sections * row.columns for c in columns):
                    rules = {c.path: TensorRule("column", sections) for c in columns}
                    self._add(path, rules | {row.path: TensorRule("row")})
                    return

    def _sequential(self, path: str) -> None:
        prefix = f"{path}." if path else ""
        layers = [
            m
            for m in self.modules.values()
            if m.kind == "linear"
            and m.path.rpartition(".")[0] == path
            and m.path.startswith(prefix)
        ]
        free = [m for m in layers if self._layer(path, m.path.removeprefix(prefix))]
        if len(layers) == len(free) == 2 and layers[0].rows == layers[1].columns:
            up, down = layers
            if up.rows % self.size:
                self.plan.left[path] = f"{up.rows} hidden units do not divide by {self.size}"
                return
            self._add(path, {up.path: TensorRule("column"), down.path: TensorRule("row")})

    def _vocabulary(self) -> None:
        known = {"embedding": _EMBEDDING, "linear": _HEAD}
        for path, module in self.modules.items():
            group = self.ties[path]
            if path.rpartition(".")[2] not in known.get(module.kind, ()) or self._settled(group):
                continue
            if module.rows % self.size:
                self.plan.left[path] = f"{module.rows} rows do not divide by {self.size}"
                continue
            for member in group:
                self.plan.add(member, {member: TensorRule("vocab")})

    def _settled(self, group: list[str]) -> bool:
        """Whether these modules, which share a weight, are split already or must not be."""
        taken = any(path in self.plan.rules or path in self.own for path in group)
        layers = all(self.modules[path].kind in ("embedding", "linear") for path in group)
        return taken or not layers or not all(self._inside(path) for path in group)

    def _add(self, region: str, rules: dict[str, TensorRule]) -> None:
        for path, rule in rules.items():
            side = "rows" if rule.dim == 0 else "columns"
            self._divides(path, side, self.modules[path], rule)
        self.plan.add(region, rules)

    def _divides(self, path: str, side: str, module: ModuleInfo, rule: TensorRule) -> None:
        count = getattr(module, side) // rule.sections
        if count % self.size:
            raise ValueError(
                f"tensor={self.size} does not divide the {count} {side} of {path!r}; pass a tensor "
                f"size that does, or tensor_plan={{{path!r}: 'replicate'}}"
            )
