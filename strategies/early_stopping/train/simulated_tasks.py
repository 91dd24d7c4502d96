"""What simulated runs learn, data and network: many small ones instead of a few known ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tensor = Any  # torch is imported when it is used, never for a type
Floats = NDArray[np.float32]
Data = tuple[NDArray[Any], NDArray[Any]]

POOL = 2000
_BUNDLED = ("breast_cancer", "diabetes", "digits", "iris", "wine")
_IMAGES = ("digits", "motifs")


@dataclass(frozen=True)
class Task:
    """Examples that training and validation are drawn from."""

    name: str
    x: Floats  # [examples, positions, features]
    x_val: Floats  # as validation sees them: shifted in some tasks
    y: NDArray[Any]  # class numbers as int64, or targets as float32
    classes: int  # 0 for a regression
    stem: str  # how the network reads the positions


@lru_cache(maxsize=8)
def _bundled(name: str) -> Data:
    from sklearn import datasets  # type: ignore[import-untyped]

    data = getattr(datasets, f"load_{name}")()
    return data.data, data.target


@lru_cache(maxsize=1)
def _text() -> NDArray[np.int64]:
    """Descriptions of the bundled data sets as numbers: 0 is a gap, 1 to 26 are letters."""
    from sklearn import datasets

    pages = (getattr(datasets, f"load_{name}")().DESCR for name in _BUNDLED)
    letters = re.sub("[^a-z]+", " ", " ".join(pages).lower())
    return np.array([max(ord(letter) - 96, 0) for letter in letters], dtype=np.int64)


def _made(name: str, rng: np.random.Generator, **options: Any) -> Data:
    from sklearn import datasets

    seed = int(rng.integers(2**31))
    x, y = getattr(datasets, f"make_{name}")(n_samples=POOL, random_state=seed, **options)
    return x, y


def _digits(rng: np.random.Generator) -> Data:
    x, y = _bundled("digits")
    x = x / 8 - 1 + rng.choice([0.0, 0.3, 0.8]) * rng.standard_normal(x.shape)
    return x, rng.choice([y, y, y, y % 2, (y > 4).astype(int)])


def _motifs(rng: np.random.Generator) -> Data:
    """One motif for each class, somewhere in a noisy image."""
    classes = int(rng.integers(2, 9))
    side = int(rng.integers(3, 7))
    motifs = rng.standard_normal((classes, side, side))
    y = rng.integers(classes, size=POOL)
    x = rng.uniform(0.2, 1.2) * rng.standard_normal((POOL, 8, 8))
    for index, (row, column) in enumerate(rng.integers(9 - side, size=(POOL, 2))):
        x[index, row : row + side, column : column + side] += motifs[y[index]]
    return x.reshape(POOL, 64), y


def _classification(rng: np.random.Generator) -> Data:
    informative = int(rng.integers(4, 12))
    return _made(
        "classification",
        rng,
        n_features=informative + int(rng.integers(1, 25)),
        n_informative=informative,
        n_redundant=0,
        n_classes=int(rng.integers(2, 6)),
        n_clusters_per_class=int(rng.integers(1, 4)),
        class_sep=float(rng.uniform(0.3, 2.0)),
    )


def _spirals(rng: np.random.Generator) -> Data:
    arms = int(rng.integers(2, 5))
    y = rng.integers(arms, size=POOL)
    radius = np.sqrt(rng.uniform(0.02, 1, POOL))
    angle = rng.uniform(2, 9) * radius + 2 * np.pi * y / arms
    x = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)
    return x + rng.uniform(0, 0.08) * rng.standard_normal(x.shape), y


def _checkerboard(rng: np.random.Generator) -> Data:
    x = rng.uniform(-1, 1, (POOL, int(rng.integers(2, 4))))
    return x, np.floor(x * rng.uniform(1, 2.5)).sum(1).astype(int) % 2


def _teacher(rng: np.random.Generator, outputs: int) -> Data:
    """What another network says: the largest of its outputs, or its only one."""
    inner, width = int(rng.integers(2, 20)), int(rng.integers(3, 20))
    x = rng.standard_normal((POOL, inner + int(rng.integers(0, 12))))
    hidden = np.tanh(x[:, :inner] @ rng.standard_normal((inner, width)) * rng.uniform(0.3, 1.5))
    said = hidden @ rng.standard_normal((width, outputs))
    return x, said.argmax(1) if outputs > 1 else said[:, 0]


def _sines(rng: np.random.Generator) -> Data:
    x = rng.uniform(-1, 1, (POOL, int(rng.integers(1, 4))))
    return x, np.sin(rng.uniform(2, 9) * x + rng.uniform(0, 6, x.shape[1])).sum(1)


def _linear(rng: np.random.Generator) -> Data:
    features = int(rng.integers(5, 40))
    noise = float(rng.choice([0.0, 20.0, 100.0]))
    return _made("regression", rng, n_features=features, n_informative=5, noise=noise)


def _series(rng: np.random.Generator) -> Data:
    """The next value of two waves, from a window."""
    steps = int(rng.integers(5, 11))
    time = np.arange(steps + 1) + rng.uniform(0, 50, (POOL, 1))
    waves = np.sin(rng.uniform(0.2, 2) * time) + np.sin(rng.uniform(0.2, 2) * time + 1)
    waves += rng.uniform(0, 0.4) * rng.standard_normal(waves.shape)
    return waves[:, :-1, None], waves[:, -1]


def _characters(rng: np.random.Generator) -> Data:
    text, context = _text(), int(rng.integers(2, 5))
    begin = rng.integers(len(text) - context, size=(POOL, 1))
    tokens = text[begin + np.arange(context + 1)]
    return np.eye(27)[tokens[:, :-1]], tokens[:, -1]


def _parity(rng: np.random.Generator) -> Data:
    bits = rng.integers(2, size=(POOL, int(rng.integers(4, 10))))
    return 2.0 * bits[:, :, None] - 1, bits[:, : rng.integers(2, 5)].sum(1) % 2


def _recall(rng: np.random.Generator) -> Data:
    """Which token stands where the last one, a place, points to."""
    steps, kinds = int(rng.integers(2, 6)), int(rng.integers(2, 7))
    tokens, place = rng.integers(kinds, size=(POOL, steps)), rng.integers(steps, size=POOL)
    both = np.concatenate([tokens, kinds + place[:, None]], 1)
    return np.eye(kinds + steps)[both], tokens[np.arange(POOL), place]


def _modular(rng: np.random.Generator) -> Data:
    modulus = int(rng.integers(5, 30))
    pairs = rng.integers(modulus, size=(POOL, 2))
    return np.eye(modulus)[pairs], pairs.sum(1) % modulus


SOURCES: dict[str, Callable[[np.random.Generator], Data]] = {
    "digits": _digits,
    "motifs": _motifs,
    "breast_cancer": lambda rng: _bundled("breast_cancer"),
    "wine": lambda rng: _bundled("wine"),
    "iris": lambda rng: _bundled("iris"),
    "diabetes": lambda rng: _bundled("diabetes"),
    "classification": _classification,
    "moons": lambda rng: _made("moons", rng, noise=float(rng.uniform(0.05, 0.5))),
    "circles": lambda rng: _made("circles", rng, noise=float(rng.uniform(0.02, 0.3))),
    "spirals": _spirals,
    "checkerboard": _checkerboard,
    "teacher_classes": lambda rng: _teacher(rng, int(rng.integers(2, 8))),
    "teacher_values": lambda rng: _teacher(rng, 1),
    "sines": _sines,
    "linear": _linear,
    "friedman1": lambda rng: _made("friedman1", rng, noise=float(rng.uniform(0, 2))),
    "friedman2": lambda rng: _made("friedman2", rng, noise=float(rng.uniform(0, 150))),
    "friedman3": lambda rng: _made("friedman3", rng, noise=float(rng.uniform(0, 0.3))),
    "series": _series,
    "characters": _characters,
    "parity": _parity,
    "recall": _recall,
    "modular": _modular,
}


def draw_task(rng: np.random.Generator) -> Task:
    """A task at random, to be used with a network from `draw_net`.

    Args:
        rng: Where the choices come from.

    Returns:
        The examples, at most `POOL`.

    Example:
        >>> task = draw_task(np.random.default_rng(0))
        >>> len(task.x) == len(task.y) <= POOL
        True
    """
    name = str(rng.choice(list(SOURCES)))
    x, y = SOURCES[name](rng)
    classes = int(y.max()) + 1 if y.dtype.kind in "iu" else 0
    rows = _rows(rng, y, classes)
    x, y = x[rows].astype(np.float64), y[rows]
    if x.ndim == 2 and name not in _IMAGES:
        x = _scaled(rng, x)
    if not classes:
        y = (y - y.mean()) / y.std() * rng.choice([1.0, 1.0, 1.0, 0.2, 4.0])
    x_val = _shifted(rng, x)
    stem = _stem(rng, name, x.ndim)
    y = y.astype(np.int64 if classes else np.float32)
    return Task(name, *_as_positions(rng, stem, x, x_val), y, classes, stem)


def _rows(rng: np.random.Generator, y: NDArray[Any], classes: int) -> NDArray[np.int64]:
    """A random order, with less of some classes in one task of four."""
    order = rng.permutation(len(y))[:POOL]
    if not classes or rng.random() < 0.75 or len(y) < 500:
        return order
    kept = rng.uniform(0.1, 1, classes)
    return np.compress(rng.random(len(order)) < (kept / kept.max())[y[order]], order)


def _scaled(rng: np.random.Generator, x: NDArray[Any]) -> NDArray[Any]:
    x = (x - x.mean(0)) / (x.std(0) + 1e-9)
    if rng.random() < 0.8:
        return x
    scale, offset = np.exp(rng.standard_normal(x.shape[1])), rng.standard_normal(x.shape[1])
    return np.asarray(x * scale + offset)


def _shifted(rng: np.random.Generator, x: NDArray[Any]) -> NDArray[Any]:
    if rng.random() < 0.75:
        return x
    by = rng.uniform(0.05, 0.5) * x.std()
    moved = rng.standard_normal(x.shape[-1]) + rng.standard_normal(x.shape)
    return np.asarray(x * rng.normal(1, 0.3, x.shape[-1]) + by * moved)


def _stem(rng: np.random.Generator, name: str, dimensions: int) -> str:
    if name in _IMAGES:
        return str(rng.choice(["flat", "shared", "shared", "mean"]))
    if dimensions == 2:
        return "flat"
    options = ["flat", "shared", "mean", "rnn", "rnn"]
    if name in ("parity", "series"):  # the mean of numbers without their place says nothing
        options = ["flat", "rnn", "rnn"]
    return str(rng.choice(options))


def _as_positions(
    rng: np.random.Generator, stem: str, *inputs: NDArray[Any]
) -> tuple[Floats, Floats]:
    kernel, stride = ((3, 1), (3, 2), (4, 2), (5, 3))[rng.integers(4)]
    x, x_val = inputs
    if x.ndim == 2 and stem == "flat":
        x, x_val = x[:, None], x_val[:, None]
    elif x.ndim == 2:
        x, x_val = (_patches(each.reshape(-1, 8, 8), kernel, stride) for each in inputs)
    return x.astype(np.float32), x_val.astype(np.float32)


def _patches(images: NDArray[Any], kernel: int, stride: int) -> NDArray[Any]:
    """A convolution is one linear layer over these, `[images, positions, kernel ** 2]`."""
    windows = np.lib.stride_tricks.sliding_window_view(images, (kernel, kernel), (1, 2))
    return windows[:, ::stride, ::stride].reshape(len(images), -1, kernel**2)


@dataclass(frozen=True)
class Net:
    """The network of all runs of a block, each run with weights of its own.

    The stem `"flat"` joins the positions; `"shared"` and `"mean"` first give each the same layer,
    as convolutions and embeddings do; `"rnn"` reads one after the other.
    """

    positions: int
    features: int  # of a position
    outputs: int  # number of classes, or 1
    hidden: tuple[int, ...] = ()  # width of each hidden layer; without any, a linear model
    stem: str = "flat"
    channels: int = 0  # width of the stem
    act: str = "relu"  # or "tanh", "gelu"
    norm: str = "none"  # or "layer", "batch"
    residual: bool = False  # whether layers of equal width are added to what they read

    @property
    def kind(self) -> str:
        """Such as `"mlp2"` or `"rnn"`."""
        flat = f"mlp{len(self.hidden)}" if self.hidden else "linear"
        return flat if self.stem == "flat" else self.stem

    @cached_property
    def shapes(self) -> list[tuple[str, int, int]]:
        """Kind, rows and columns of each parameter, in the order of use."""
        width, found = self.positions * self.features, []
        if self.stem != "flat":
            found += [("weight", self.features, self.channels), ("bias", 1, self.channels)]
            width = self.channels * (self.positions if self.stem == "shared" else 1)
        if self.stem == "rnn":
            found += [("weight", self.channels, self.channels)]
        for each in self.hidden:
            found += [("weight", width, each), ("bias", 1, each)]
            found += [("gain", 1, each), ("bias", 1, each)] if self.norm != "none" else []
            width = each
        return [*found, ("weight", width, self.outputs), ("bias", 1, self.outputs)]

    def initial(self, gain: Tensor, generator: Any) -> Tensor:
        """Weights, `[runs, parameters]`, like `torch.nn.Linear` draws them, times `[runs, 1]`."""
        import torch

        parts, fan = [], 1
        for kind, rows, columns in self.shapes:
            fan = rows if kind == "weight" else fan
            drawn = torch.rand((len(gain), rows * columns), generator=generator) * 2 - 1
            parts.append(torch.ones_like(drawn) if kind == "gain" else drawn * gain / fan**0.5)
        return torch.cat(parts, 1)

    def __call__(
        self, weights: Tensor, x: Tensor, moments: Any, drop: Tensor = None, generator: Any = None
    ) -> Tensor:
        """Outputs, `[runs, examples, outputs]`.

        Args:
            weights: All parameters, `[runs, parameters]`.
            x: Inputs, `[runs, examples, positions * features]`.
            moments: Running mean and variance by layer; written while training.
            drop: The share of units to leave out, `[runs, 1, 1]`. Default: None, not training.
            generator: What chooses these units; without it all stay. Default: None.
        """
        import torch

        sizes = [rows * columns for _, rows, columns in self.shapes]
        pieces = zip(self.shapes, weights.split(sizes, 1), strict=True)
        parts = iter([piece.view(-1, shape[1], shape[2]) for shape, piece in pieces])
        act = {"relu": torch.relu, "tanh": torch.tanh, "gelu": torch.nn.functional.gelu}[self.act]
        h = self._read(x, parts, act)
        for layer, _ in enumerate(self.hidden):
            z = _linear_layer(h, parts)
            if self.norm != "none":
                z = self._normed(z, moments, layer, drop is not None) * next(parts) + next(parts)
            z = act(z)
            if drop is not None and generator is not None:
                z = z * (torch.rand(z.shape, generator=generator) >= drop) / (1 - drop)
            h = z + h if self.residual and h.shape == z.shape else z
        return _linear_layer(h, parts)

    def _read(self, x: Tensor, parts: Iterator[Tensor], act: Callable[[Tensor], Tensor]) -> Tensor:
        if self.stem == "flat":
            return x
        runs, examples, _ = x.shape
        each = _linear_layer(x.reshape(runs, examples * self.positions, self.features), parts)
        each = each.view(runs, examples, self.positions, self.channels)
        if self.stem == "shared":
            return act(each).flatten(2)
        if self.stem == "mean":
            return act(each).mean(2)
        again, state = next(parts), each[:, :, 0].tanh()
        for step in range(1, self.positions):
            state = (each[:, :, step] + state @ again).tanh()
        return state

    def _normed(self, z: Tensor, moments: dict[int, Tensor], layer: int, train: bool) -> Tensor:
        axis = 2 if self.norm == "layer" else 1
        if train or self.norm == "layer":
            mean = z.mean(axis, keepdim=True)
            variance = (z - mean).square().mean(axis, keepdim=True)
        else:
            mean, variance = moments[layer]
        if train and self.norm == "batch":
            now = (mean.detach(), variance.detach())
            old = moments.get(layer, now)
            moments[layer] = tuple(o + 0.1 * (n - o) for o, n in zip(old, now, strict=True))
        return (z - mean) / (variance + 1e-5).sqrt()


def _linear_layer(x: Tensor, parts: Iterator[Tensor]) -> Tensor:
    import torch

    weight, bias = next(parts), next(parts)
    return torch.baddbmm(bias, x, weight)


def draw_net(rng: np.random.Generator, task: Task) -> Net:
    """A network for a task, at random."""
    width, depth = int(2 ** rng.uniform(3, 6.02)), int(rng.integers(0, 5))
    return Net(
        positions=task.x.shape[1],
        features=task.x.shape[2],
        outputs=task.classes or 1,
        hidden=(width,) * (depth if task.stem == "flat" else depth // 2),
        stem=task.stem,
        channels=0 if task.stem == "flat" else int(rng.integers(4, 25)),
        act=str(rng.choice(["relu", "relu", "tanh", "gelu"])),
        norm=str(rng.choice(["none", "none", "layer", "batch"])),
        residual=rng.random() < 0.3,
    )
