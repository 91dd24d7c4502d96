"""Learning curves from real but small training runs, 128 at once as one batch of matrices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategies.early_stopping.train.simulated_tasks import Net, Task, draw_net, draw_task

Tensor = Any  # torch is imported when it is used, never for a type
Floats = NDArray[np.float32]

RUNS = 128
_SECONDS = 7.0  # of one core, that a block may take by the estimate of `_seconds`
_CLASS_METRICS = {"val_loss": 0.45, "val_accuracy": 0.3, "val_error": 0.1, "val_f1": 0.15}
_VALUE_METRICS = {"val_loss": 0.5, "val_mae": 0.2, "val_rmse": 0.15, "val_r2": 0.15}
_HIGHER = ("val_accuracy", "val_f1", "val_r2")


@dataclass(frozen=True)
class Run:
    """One learning curve.

    Args:
        value: Validation metric after each evaluation; NaN from where it diverged.
        train_loss: Training loss between the evaluations, of the same length.
        mode: `"min"` or `"max"`.
        metric: Such as `"val_loss"` or `"val_accuracy"`.
        task: Data set and kind of network, such as `"digits/shared"`.
    """

    value: Floats
    train_loss: Floats
    mode: str
    metric: str
    task: str


@dataclass(frozen=True)
class Plan:
    """What the runs of a block share."""

    train: int  # examples
    val: int  # examples
    batch: int  # examples
    evaluations: int
    every: int  # steps between evaluations
    loss: str = "mse"
    adaptive: bool = False
    dropout: bool = False
    jitter: float = 0.0  # noise on the inputs of training
    averaged: bool = False  # whether some runs evaluate a moving average of their weights
    last_loss: bool = False  # whether the training loss is that of one batch
    noisy_val: bool = False  # whether labels are as wrong in validation as in training


def simulate_block(block: int, seed: int = 0, runs: int = RUNS) -> list[Run]:
    """Train `runs` networks on one task, each with its own hyper-parameters.

    When to use: to get one part of the curves that a forecaster learns from.

    Args:
        block: Number of the block, from 0; with `seed` and `runs` it decides everything.
        seed: Seed of the whole collection. Default: 0.
        runs: How many networks. Default: 128.

    Returns:
        One curve for each network, all of one length.

    Example:
        >>> curves = simulate_block(0, runs=2)
        >>> [len(curve.value) == len(curve.train_loss) for curve in curves]
        [True, True]
    """
    import torch

    rng = np.random.default_rng([seed, block])
    generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
    task = draw_task(rng)
    plan, net = _draw_plan(rng, task)
    with _one_thread(), torch.enable_grad():
        values, losses = train(task, plan, net, Hyper(rng, plan, runs), generator)
    chances = _CLASS_METRICS if task.classes else _VALUE_METRICS
    chosen = rng.choice(len(chances), size=runs, p=list(chances.values()))
    kind = f"{task.name}/{net.kind}"
    found = []
    for run, (metric, loss) in enumerate(zip(chosen, losses.T, strict=True)):
        name = list(chances)[metric]
        mode = "max" if name in _HIGHER else "min"
        found.append(Run(values[:, metric, run].copy(), loss.copy(), mode, name, kind))
    return found


def simulate(count: int, seed: int = 0, workers: int = 1) -> Iterator[list[Run]]:
    """Blocks 0, 1, 2, ... until there are `count` runs.

    When to use: to make the curves that a forecaster learns from; 50,000 take a core half an hour.

    Args:
        count: How many runs; the last block is cut to fit.
        seed: Seed of the whole collection. Default: 0.
        workers: How many processes; the runs do not depend on it. Default: 1.

    Returns:
        The runs, block by block.

    Example:
        >>> list(simulate(0))
        []
    """
    starts = range(0, count, RUNS)
    one = partial(simulate_block, seed=seed)
    if workers == 1:
        yield from (one(block)[: count - start] for block, start in enumerate(starts))
        return
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    # A fork would inherit the locks of torch's threads.
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for start, found in zip(starts, pool.map(one, range(len(starts))), strict=True):
            yield found[: count - start]


@contextmanager
def _one_thread() -> Iterator[None]:
    """The order of a sum depends on the number of threads, and a block should not."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _draw_plan(rng: np.random.Generator, task: Task) -> tuple[Plan, Net]:
    """Sizes that fit the time; the length is drawn first, so that long curves stay frequent."""
    evaluations = int(10 ** rng.uniform(*((2.3, 2.6) if rng.random() < 0.1 else (1.31, 2.3))))
    pairs = [(_sizes(rng, task, evaluations), draw_net(rng, task)) for _ in range(40)]
    fitting = (pair for pair in pairs if _seconds(*pair) <= _SECONDS)
    return next(fitting, min(pairs, key=lambda pair: _seconds(*pair)))


def _sizes(rng: np.random.Generator, task: Task, evaluations: int) -> Plan:
    val = min(int(rng.integers(100, 501)), len(task.x) * 2 // 5)
    most = len(task.x) - val
    train = min(int(10 ** rng.uniform(1.8, 3.17)), most)
    batches = min(int(2 ** rng.uniform(0, 4.09)), train // 8)
    return Plan(
        train,
        val,
        batch=train // batches,
        evaluations=evaluations,
        every=max(int(batches * rng.choice([1.0, 1.0, 1.0, 1.0, 0.34, 2.0])), 1),
        adaptive=rng.random() < 0.5,
        dropout=rng.random() < 0.35,
        jitter=float(rng.choice([0.0, 0.0, 0.0, 0.1, 0.3])),
        averaged=rng.random() < 0.2,
        last_loss=rng.random() < 0.15,
        noisy_val=rng.random() < 0.6,
        loss="entropy" if task.classes else str(rng.choice(["mse", "mse", "mae", "huber"])),
    )


def _seconds(plan: Plan, net: Net) -> float:
    """Time of a block of 128 runs on one core, roughly."""
    weights = sum(rows * columns for _, rows, columns in net.shapes)
    inner, shared = sum(net.hidden), net.positions if net.stem != "flat" else 0
    products = weights + (shared - 1) * net.features * net.channels * (shared > 0)
    products += net.channels**2 * shared * (net.stem == "rnn")
    units = inner * (3 if net.norm != "none" else 1) + shared * net.channels
    read = products * 1.5e-8 + units * 4e-7 + net.positions * net.features * 1e-7
    step = 1.5e-3 + weights * 2e-6 + plan.batch * read * (1 + 0.5 * plan.dropout)
    evaluation = 1e-3 + plan.val * read / 3
    return plan.evaluations * (plan.every * step + evaluation)


class Hyper:
    """Hyper-parameters of each run, `[runs, 1]`, drawn at random."""

    def __init__(self, rng: np.random.Generator, plan: Plan, runs: int) -> None:
        def some(share: float, values: Any, other: float = 0.0) -> Tensor:
            return _tensor(np.where(rng.random((runs, 1)) < share, values, other))

        def power(low: float, high: float) -> Any:
            return 10 ** rng.uniform(low, high, (runs, 1))

        self.adaptive = plan.adaptive
        self.momentum = some(0.65, rng.choice([0.5, 0.9, 0.9, 0.95, 0.99], (runs, 1)))
        middle, low, high = (-2.3, -4.5, -0.5) if plan.adaptive else (-0.9, -3.5, 1.2)
        near = 10 ** rng.normal(middle, 0.5, (runs, 1))
        self.rate = some(0.6, near, power(low, high))
        if not plan.adaptive:
            self.rate *= (1 - self.momentum) ** 0.7
        self.nesterov = some(0.4, 1.0)
        self.rms = some(0.25, 1.0)
        self.decoupled = some(0.5, 1.0)
        self.beta = (1 - self.rms) * some(0.8, 0.9, 0.5)
        self.square = some(0.7, 0.999, 0.98) * (1 - self.rms) + 0.99 * self.rms
        self.decay = some(0.4, power(-5, -1.5))
        self.clip = some(0.25, power(-1, 0.7), np.inf)
        self.average = some(0.6, rng.choice([0.9, 0.98, 0.995], (runs, 1))) * plan.averaged
        self.drop = some(0.7, rng.uniform(0, 0.6, (runs, 1)))[:, :, None] * plan.dropout
        self.gain = some(0.3, power(-1, 0.5), 1.0)
        self.flips = some(0.5, rng.uniform(0, rng.uniform(0, 0.5), (runs, 1)))
        self.plateau = some(0.12, 1.0)
        self.patience, self.cut = some(1, rng.integers(2, 12, (runs, 1))), some(0.6, 0.5, 0.1)
        steps = plan.evaluations * plan.every
        self.schedule = _tensor([schedule(rng, steps) for _ in range(runs)])


def schedule(rng: np.random.Generator, steps: int) -> NDArray[np.float64]:
    """Factor on the rate at each step: one of the usual schedules, some of them warmed up."""
    t = np.arange(steps) / steps
    places = rng.uniform(0.2, 0.95, rng.integers(1, 4))
    lowest = rng.choice([0.0, 0.01, 0.1])
    options = (
        (0.34, np.ones(steps)),
        (0.2, lowest + (1 - lowest) * _wave(t)),
        (0.1, 1 - (1 - lowest) * t),
        (0.08, np.exp(-rng.uniform(1, 7) * t)),
        (0.16, rng.choice([0.1, 0.1, 0.3, 0.5]) ** (t[:, None] > places).sum(1)),
        (0.06, np.interp(t, [0, rng.uniform(0.1, 0.4), 1], [0.04, 1, 0])),  # one cycle
        (0.06, _wave(t * rng.integers(2, 6) % 1)),  # restarts
    )
    chosen = rng.choice(len(options), p=[chance for chance, _ in options])
    factor = options[chosen][1]
    warm = rng.uniform(0.01, 0.2) if rng.random() < 0.25 else 0.5 / steps
    return np.asarray(factor * np.minimum(1, (t + 1 / steps) / warm))


def _wave(t: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(0.5 + 0.5 * np.cos(np.pi * t))


def _tensor(values: Any) -> Tensor:
    import torch

    return torch.from_numpy(np.asarray(values, dtype=np.float32))


class Optimizer:
    """SGD with momentum or Adam and its kin, on weights `[runs, parameters]` in place."""

    def __init__(self, hyper: Hyper, weights: Tensor) -> None:
        self._hyper, self._weights, self._steps = hyper, weights, 0
        self._mean, self._square = weights * 0, weights * 0

    def step(self, gradient: Tensor, rate: Tensor) -> None:
        """One step with a gradient like the weights and a rate for each run, `[runs, 1]`."""
        import torch

        with torch.no_grad():
            self._steps += 1
            h = self._hyper
            norm = gradient.norm(dim=1, keepdim=True)
            gradient = gradient * (h.clip / (norm + 1e-6)).clamp(max=1)
            apart = h.decoupled * h.adaptive
            gradient.addcmul_(self._weights, h.decay * (1 - apart))
            self._weights.mul_(1 - rate * h.decay * apart)
            change = self._adaptive(gradient) if h.adaptive else self._momentum(gradient)
            self._weights.addcmul_(change, rate, value=-1)

    def _momentum(self, gradient: Tensor) -> Tensor:
        h = self._hyper
        self._mean.mul_(h.momentum).add_(gradient)
        ahead = 1 - h.nesterov + h.nesterov * h.momentum
        return self._mean * ahead + gradient * h.nesterov

    def _adaptive(self, gradient: Tensor) -> Tensor:
        h = self._hyper
        self._mean.mul_(h.beta).addcmul_(gradient, 1 - h.beta)
        self._square.mul_(h.square).addcmul_(gradient * gradient, 1 - h.square)
        full = (1 - h.square**self._steps) * (1 - h.rms) + h.rms
        return self._mean / (1 - h.beta**self._steps) / ((self._square / full).sqrt() + 1e-8)


class _Examples:
    """Examples of each run, `[runs, examples, ...]`: its own subset, with its share of noise."""

    def __init__(self, task: Task, plan: Plan, flips: Tensor, generator: Any) -> None:
        import torch

        order = torch.rand((len(flips), len(task.x)), generator=generator).argsort(1)
        y = torch.from_numpy(task.y)[order]
        if task.classes:
            other = torch.randint(task.classes, y.shape, generator=generator)
            noisy = torch.where(torch.rand(y.shape, generator=generator) < flips, other, y)
        else:
            noisy = y + flips * 2 * y.std() * torch.randn(y.shape, generator=generator)
        train, val = order[:, : plan.train], order[:, -plan.val :]
        self.x, self.y = torch.from_numpy(task.x).flatten(1)[train], noisy[:, : plan.train]
        self.x_val = torch.from_numpy(task.x_val).flatten(1)[val]
        self.y_val = (noisy if plan.noisy_val else y)[:, -plan.val :]


class Training:
    """A batch of networks in training, for all runs at once."""

    def __init__(self, task: Task, plan: Plan, net: Net, hyper: Hyper, generator: Any) -> None:
        self.data = _Examples(task, plan, hyper.flips, generator)
        self.plan, self.net, self.hyper, self.generator = plan, net, hyper, generator
        self.weights = net.initial(hyper.gain, generator)
        self.average = self.weights.clone()
        self.moments: dict[int, Tensor] = {}
        self.optimizer = Optimizer(hyper, self.weights)
        self.best, self.waited, self.factor = (hyper.gain * 0 + x for x in (np.inf, 0, 1))
        self.steps = 0

    def step(self) -> Tensor:
        """Train on one batch; its loss in each run."""
        import torch

        plan, hyper = self.plan, self.hyper
        part = self.steps % (plan.train // plan.batch)
        if part == 0:
            self.order = torch.randperm(plan.train, generator=self.generator)
        rows = self.order[part * plan.batch :][: plan.batch]
        x = self.data.x.index_select(1, rows)
        if plan.jitter:
            x += plan.jitter * torch.randn(x.shape, generator=self.generator)
        leaf = self.weights.detach().requires_grad_()
        out = self.net(leaf, x, self.moments, hyper.drop, self.generator if plan.dropout else None)
        loss = per_example(out, self.data.y.index_select(1, rows), plan.loss).mean(1)
        rate = hyper.rate * self.factor * hyper.schedule[:, self.steps, None]
        self.optimizer.step(torch.autograd.grad(loss.sum(), leaf)[0], rate)
        if plan.averaged:
            self.average.lerp_(self.weights, 1 - hyper.average)
        self.steps += 1
        return loss.detach()

    def evaluate(self) -> Tensor:
        """Every metric of every run, `[metrics, runs]`; rates on a plateau fall."""
        import torch

        with torch.no_grad():
            weights = self.average if self.plan.averaged else self.weights
            out = self.net(weights, self.data.x_val, self.moments)
            found = metrics(out, self.data.y_val, self.plan.loss)
        loss, hyper = found[0][:, None], self.hyper
        self.waited = torch.where(loss < self.best * 0.9999, 0, self.waited + 1)
        self.best = torch.fmin(self.best, loss)
        low = (self.waited > hyper.patience) & (hyper.plateau > 0)
        self.factor = torch.where(low, self.factor * hyper.cut, self.factor)
        self.waited = torch.where(low, 0, self.waited)
        return found


def train(task: Task, plan: Plan, net: Net, hyper: Hyper, generator: Any) -> tuple[Floats, Floats]:
    """Metrics, `[evaluations, metrics, runs]`, and training losses, `[evaluations, runs]`."""
    training = Training(task, plan, net, hyper, generator)
    values, losses = [], []
    for _ in range(plan.evaluations):
        seen = [training.step() for _ in range(plan.every)]
        losses.append((seen[-1] if plan.last_loss else sum(seen) / len(seen)).numpy())
        values.append(training.evaluate().numpy())
    found = np.stack(values)
    lost = np.logical_or.accumulate(~np.isfinite(found).all(1, keepdims=True))
    return np.where(lost, np.float32(np.nan), found), np.stack(losses)


def per_example(out: Tensor, y: Tensor, loss: str) -> Tensor:
    """Loss of each example, `[runs, examples]`."""
    from torch.nn import functional

    if loss == "entropy":
        return functional.cross_entropy(out.transpose(1, 2), y, reduction="none")
    losses = {"mse": functional.mse_loss, "mae": functional.l1_loss}
    return losses.get(loss, functional.smooth_l1_loss)(out[:, :, 0], y, reduction="none")


def metrics(out: Tensor, y: Tensor, loss: str) -> Tensor:
    """Loss, accuracy, error and macro F1, or loss, MAE, RMSE and R2, `[4, runs]`."""
    import torch

    found = [per_example(out, y, loss).mean(1)]
    if loss == "entropy":
        guess = out.argmax(2)
        right = (guess == y).float().mean(1)
        one = torch.eye(out.shape[2])
        said, true = one[guess], one[y]
        both, either = (said * true).sum(1), said.sum(1) + true.sum(1)
        f1 = (2 * both / either.clamp(min=1)).sum(1) / (either > 0).sum(1)
        found += [right, 1 - right, f1]
    else:
        off = out[:, :, 0] - y
        square = off.square().mean(1)
        found += [off.abs().mean(1), square.sqrt(), 1 - square / y.var(1, correction=0)]
    return torch.stack(found)
