"""Simulated runs: the same every time, different from each other, and true to torch.nn."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn import datasets
from sklearn.metrics import f1_score, mean_absolute_error, r2_score
from torch import nn

from strategies.early_stopping.train import simulated, simulated_tasks
from strategies.early_stopping.train.simulated import (
    Hyper,
    Optimizer,
    Plan,
    Run,
    Training,
    metrics,
    schedule,
    simulate,
    simulate_block,
    train,
)
from strategies.early_stopping.train.simulated_tasks import Net, Task, draw_task

BLOCKS = range(40, 52)


@pytest.fixture(scope="module")
def blocks() -> list[list[Run]]:
    return [simulate_block(block, runs=12) for block in BLOCKS]


def moons() -> Task:
    x, y = datasets.make_moons(400, noise=0.15, random_state=0)
    x = x.astype(np.float32)[:, None]
    return Task("moons", x, x, y.astype(np.int64), 2, "flat")


def friedman() -> Task:
    x, y = datasets.make_friedman1(300, noise=0.5, random_state=0)
    x = x.astype(np.float32)[:, None]
    return Task("friedman1", x, x, ((y - y.mean()) / y.std()).astype(np.float32), 0, "flat")


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None]


def plain(plan: Plan, runs: int) -> Hyper:
    """Hyper-parameters without anything that has to be asked for."""
    hyper = Hyper(np.random.default_rng(0), plan, runs)
    for name in (
        "momentum",
        "nesterov",
        "rms",
        "decoupled",
        "decay",
        "average",
        "flips",
        "plateau",
    ):
        setattr(hyper, name, torch.zeros(runs, 1))
    hyper.beta, hyper.square = torch.full((runs, 1), 0.9), torch.full((runs, 1), 0.999)
    hyper.clip, hyper.gain = torch.full((runs, 1), torch.inf), torch.ones(runs, 1)
    hyper.drop = torch.zeros(runs, 1, 1)
    hyper.schedule = torch.ones(runs, plan.evaluations * plan.every)
    return hyper


def same(a: list[Run], b: list[Run]) -> bool:
    return len(a) == len(b) and all(
        (x.mode, x.metric, x.task) == (y.mode, y.metric, y.task)
        and x.value.tobytes() == y.value.tobytes()
        and x.train_loss.tobytes() == y.train_loss.tobytes()
        for x, y in zip(a, b, strict=True)
    )


def test_a_block_is_the_same_whenever_it_is_made(blocks: list[list[Run]]) -> None:
    torch.manual_seed(5)
    assert same(simulate_block(BLOCKS[3], runs=12), blocks[3])
    assert not same(simulate_block(BLOCKS[3], seed=1, runs=12), blocks[3])


def test_a_block_restores_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    simulate_block(41, runs=2)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_blocks_come_in_order_until_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "RUNS", 4)
    monkeypatch.setattr(
        simulated, "simulate_block", lambda block, seed: simulate_block(block + 40, seed, runs=4)
    )
    found = list(simulate(6))
    assert [len(block) for block in found] == [4, 2]
    assert same(found[0], simulate_block(40, runs=4))
    assert same(found[1], simulate_block(41, runs=4)[:2])


def test_another_process_makes_the_same_runs() -> None:
    (here,), (there,) = simulate(2), simulate(2, workers=2)
    assert same(here, there)


def test_curves_are_of_one_length_and_type(blocks: list[list[Run]]) -> None:
    for block in blocks:
        assert len({len(run.value) for run in block}) == 1
        for run in block:
            assert run.value.dtype == run.train_loss.dtype == np.float32
            assert run.value.shape == run.train_loss.shape
            assert 20 <= len(run.value) <= 400


def test_what_is_lost_stays_lost_and_most_is_not(blocks: list[list[Run]]) -> None:
    runs = [run for block in blocks for run in block]
    lost = [~np.isfinite(run.value) for run in runs]
    assert all((np.diff(each.astype(int)) >= 0).all() for each in lost)
    assert 0.9 < np.mean([not each.any() for each in lost]) < 1


def test_tasks_modes_and_metrics_differ(blocks: list[list[Run]]) -> None:
    runs = [run for block in blocks for run in block]
    assert len({run.task for run in runs}) >= 6
    assert {run.mode for run in runs} == {"min", "max"}
    assert len({run.metric for run in runs}) >= 5
    best = [np.nanargmax(run.value * (1 if run.mode == "max" else -1)) / len(run.value)
            for run in runs if np.isfinite(run.value).any()]  # fmt: skip
    assert np.quantile(best, 0.2) < 0.5 < 0.9 < np.quantile(best, 0.9)


def test_every_source_gives_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, source in simulated_tasks.SOURCES.items():
        monkeypatch.setattr(simulated_tasks, "SOURCES", {name: source})
        for seed in range(3):
            task = draw_task(np.random.default_rng(seed))
            assert task.name == name
            assert task.x.ndim == 3
            assert task.x.shape == task.x_val.shape
            assert np.isfinite(task.x).all()
            assert task.y.shape == (len(task.x),)
            assert 100 < len(task.x) <= simulated_tasks.POOL
            assert task.y.dtype == (np.int64 if task.classes else np.float32)
            assert not task.classes or set(task.y) <= set(range(task.classes))


def test_schedules_start_and_end_where_they_should() -> None:
    rng = np.random.default_rng(0)
    found = np.array([schedule(rng, 50) for _ in range(200)])
    assert found.min() >= 0
    assert 0.95 < found.max() <= 1 + 1e-9
    assert {1.0} < set(found[:, -1])
    assert np.mean(found[:, -1] < 0.2) > 0.3


def reference(training: Training, run: int, *norms: nn.Module) -> nn.Sequential:
    """One run's network, made of torch's own layers."""
    net = training.net
    layers: list[nn.Module] = []
    width = net.positions * net.features
    for each in net.hidden:
        norm = [nn.LayerNorm(each)] if net.norm == "layer" else []
        layers += [nn.Linear(width, each), *norm, nn.ReLU() if net.act == "relu" else nn.Tanh()]
        width = each
    model = nn.Sequential(*layers, nn.Linear(width, net.outputs))
    pieces = training.weights[run].split([rows * columns for _, rows, columns in net.shapes])
    with torch.no_grad():
        for (kind, rows, columns), piece, own in zip(
            net.shapes, pieces, model.parameters(), strict=True
        ):
            value = piece.view(rows, columns)
            own.copy_(value.T if kind == "weight" else value[0])
    return model


def follow(
    training: Training,
    models: list[nn.Sequential],
    optimizers: list[torch.optim.Optimizer],
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    clip: dict[int, float],
) -> None:
    """Train both ways on the same batches and compare losses, and outputs in validation."""
    plan = training.plan
    for step in range(plan.evaluations * plan.every):
        losses = training.step()
        part = step % (plan.train // plan.batch)
        rows = training.order[part * plan.batch : (part + 1) * plan.batch]
        for run, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            own = loss(model(training.data.x[run, rows]), training.data.y[run, rows])
            own.backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip.get(run, torch.inf))
            optimizer.step()
            assert losses[run].item() == pytest.approx(own.item(), abs=1e-4)
    found = training.evaluate()
    for run, model in enumerate(models):
        own = loss(model(training.data.x_val[run]), training.data.y_val[run])
        assert found[0, run].item() == pytest.approx(own.item(), abs=1e-4)


def test_sgd_is_that_of_torch_also_beside_a_run_that_diverges() -> None:
    plan = Plan(train=200, val=100, batch=50, evaluations=15, every=4)
    hyper = plain(plan, 5)
    hyper.rate = column(0.1, 0.02, 0.05, 0.05, 1e6)
    hyper.momentum = column(0.0, 0.9, 0.9, 0.5, 0.0)
    hyper.nesterov = column(0, 0, 1, 0, 0)
    hyper.decay = column(0, 0.01, 0, 0.001, 0)
    hyper.clip = column(torch.inf, torch.inf, torch.inf, 0.3, torch.inf)
    net = Net(1, 10, 1, hidden=(12, 9), act="tanh")
    training = Training(friedman(), plan, net, hyper, torch.Generator().manual_seed(0))
    models = [reference(training, run) for run in range(4)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(models[0].parameters(), lr=0.1),
        torch.optim.SGD(models[1].parameters(), lr=0.02, momentum=0.9, weight_decay=0.01),
        torch.optim.SGD(models[2].parameters(), lr=0.05, momentum=0.9, nesterov=True),
        torch.optim.SGD(models[3].parameters(), lr=0.05, momentum=0.5, weight_decay=0.001),
    ]  # fmt: skip
    follow(training, models, optimizers, lambda out, y: ((out[:, 0] - y) ** 2).mean(), {3: 0.3})
    assert not training.evaluate()[:, 4].isfinite().all()


@pytest.mark.parametrize("norm", ["none", "layer"])
def test_adam_and_its_kin_are_those_of_torch(norm: str) -> None:
    plan = Plan(300, 100, batch=100, evaluations=15, every=3, adaptive=True, loss="entropy")
    hyper = plain(plan, 3)
    hyper.rate = column(0.01, 0.02, 0.003)
    hyper.decay = column(0.01, 0.1, 0)
    hyper.decoupled = column(0, 1, 0)
    hyper.rms = column(0, 0, 1)
    hyper.beta, hyper.square = column(0.9, 0.8, 0), column(0.999, 0.98, 0.99)
    net = Net(1, 2, 2, hidden=(16, 8), norm=norm)
    training = Training(moons(), plan, net, hyper, torch.Generator().manual_seed(0))
    models = [reference(training, run) for run in range(3)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Adam(models[0].parameters(), lr=0.01, weight_decay=0.01),
        torch.optim.AdamW(models[1].parameters(), lr=0.02, weight_decay=0.1, betas=(0.8, 0.98)),
        torch.optim.RMSprop(models[2].parameters(), lr=0.003),
    ]
    follow(training, models, optimizers, nn.functional.cross_entropy, {})


def parts(net: Net, weights: torch.Tensor, run: int) -> list[torch.Tensor]:
    pieces = weights[run].split([rows * columns for _, rows, columns in net.shapes])
    return [piece.view(shape[1:]) for piece, shape in zip(pieces, net.shapes, strict=True)]


@pytest.mark.parametrize("stride", [1, 2])
def test_the_shared_stem_on_patches_is_a_convolution(stride: int) -> None:
    images = np.random.default_rng(0).standard_normal((20, 8, 8)).astype(np.float32)
    patches = torch.from_numpy(simulated_tasks._patches(images, 3, stride).copy())
    net = Net(patches.shape[1], 9, 4, stem="shared", channels=5)
    weights = net.initial(torch.ones(2, 1), torch.Generator().manual_seed(0))
    found = net(weights, patches.flatten(1).expand(2, -1, -1), {})
    for run in range(2):
        kernel, bias, out, last = parts(net, weights, run)
        maps = nn.functional.conv2d(
            torch.from_numpy(images)[:, None], kernel.T.reshape(5, 1, 3, 3), bias[0], stride=stride
        )
        own = maps.relu().permute(0, 2, 3, 1).flatten(1) @ out + last
        torch.testing.assert_close(found[run], own, atol=1e-5, rtol=1e-4)


def test_the_recurrent_stem_is_that_of_torch() -> None:
    net = Net(6, 3, 2, stem="rnn", channels=7)
    weights = net.initial(torch.ones(2, 1), torch.Generator().manual_seed(0))
    x = torch.randn(2, 10, 6, 3, generator=torch.Generator().manual_seed(1))
    found = net(weights, x.flatten(2), {})
    for run in range(2):
        enter, bias, again, out, last = parts(net, weights, run)
        cell = nn.RNN(3, 7, batch_first=True)
        values = (enter.T, again.T, bias[0], bias[0] * 0)
        with torch.no_grad():
            for own, value in zip(cell.parameters(), values, strict=True):
                own.copy_(value)
        torch.testing.assert_close(found[run], cell(x[run])[0][:, -1] @ out + last)


def test_batch_normalisation_is_that_of_torch_while_training() -> None:
    net = Net(1, 3, 2, hidden=(5,), norm="batch")
    weights = net.initial(torch.ones(2, 1), torch.Generator().manual_seed(0))
    x = torch.randn(2, 30, 3, generator=torch.Generator().manual_seed(1))
    moments: dict[int, torch.Tensor] = {}
    found = net(weights, x, moments, torch.zeros(2, 1, 1))
    for run in range(2):
        first, bias, gain, shift, out, last = parts(net, weights, run)
        z = nn.functional.batch_norm(
            x[run] @ first + bias, None, None, gain[0], shift[0], training=True
        )
        torch.testing.assert_close(found[run], z.relu() @ out + last)
    torch.testing.assert_close(net(weights, x, moments), found)


def test_metrics_are_those_of_sklearn() -> None:
    generator = torch.Generator().manual_seed(0)
    out, y = (
        torch.randn(3, 40, 4, generator=generator),
        torch.randint(3, (3, 40), generator=generator),
    )
    _, accuracy, error, f1 = metrics(out, y, "entropy")
    value, target = torch.randn(3, 40, 1, generator=generator), torch.zeros(3, 40)
    target = target + value[:, :, 0].roll(1, 1)
    mse, mae, rmse, r2 = metrics(value, target, "mse")
    for run in range(3):
        guess, true = out[run].argmax(1), y[run]
        assert accuracy[run] == pytest.approx((guess == true).float().mean())
        assert f1[run].item() == pytest.approx(f1_score(true, guess, average="macro"))
        said, right = value[run, :, 0], target[run]
        assert mae[run].item() == pytest.approx(mean_absolute_error(right, said), rel=1e-5)
        assert r2[run].item() == pytest.approx(r2_score(right, said), rel=1e-4)
    torch.testing.assert_close(error, 1 - accuracy)
    torch.testing.assert_close(rmse**2, mse)


def test_sane_rates_learn_and_huge_ones_diverge() -> None:
    plan = Plan(200, 100, batch=25, evaluations=20, every=8)
    hyper = plain(plan, 4)
    hyper.rate = column(0.05, 0.1, 0.15, 1e4)
    net = Net(1, 10, 1, hidden=(16,))
    values, losses = train(friedman(), plan, net, hyper, torch.Generator().manual_seed(0))
    assert values.shape == (20, 4, 4)
    assert (values[-1, 0, :3] < 0.6 * values[0, 0, :3]).all()
    assert (losses[-1, :3] < 0.6 * losses[0, :3]).all()
    assert (values[-1, 3, :3] > 0.5).all()
    assert np.isnan(values[-1, :, 3]).all()


def test_the_rate_falls_on_a_plateau_only_where_that_is_wanted() -> None:
    plan = Plan(200, 100, batch=200, evaluations=12, every=1)
    hyper = plain(plan, 2)
    hyper.rate, hyper.plateau = column(0, 0), column(0, 1)
    hyper.patience, hyper.cut = column(3, 3), column(0.5, 0.5)
    training = Training(friedman(), plan, Net(1, 10, 1), hyper, torch.Generator().manual_seed(0))
    factors = []
    for _ in range(12):
        training.step()
        training.evaluate()
        factors.append(training.factor[:, 0].tolist())
    assert factors[3] == [1, 1]
    assert factors[4] == [1, 0.5]
    assert factors[11] == [1, 0.25]


def test_averaged_weights_are_evaluated() -> None:
    plan = Plan(200, 100, batch=50, evaluations=3, every=4, averaged=True)
    hyper = plain(plan, 2)
    hyper.rate, hyper.average = column(0.05, 0.05), column(0, 0.9)
    training = Training(friedman(), plan, Net(1, 10, 1), hyper, torch.Generator().manual_seed(0))
    own = training.weights[1].clone()
    for _ in range(8):
        training.step()
        own = 0.9 * own + 0.1 * training.weights[1]
    torch.testing.assert_close(training.average[0], training.weights[0])
    torch.testing.assert_close(training.average[1], own)


def test_dropout_leaves_out_the_share_of_each_run() -> None:
    net = Net(1, 2, 1, hidden=(4000,), act="relu")
    weights = net.initial(torch.ones(2, 1), torch.Generator().manual_seed(0))
    weights[:, :] = 1.0
    drop, generator = torch.tensor([0.0, 0.4])[:, None, None], torch.Generator().manual_seed(1)
    kept = net(weights, torch.ones(2, 50, 2), {}, drop, generator)
    full = net(weights, torch.ones(2, 50, 2), {})
    torch.testing.assert_close(kept[0], full[0])
    assert kept[1].mean().item() == pytest.approx(full[1].mean().item(), rel=0.02)
    assert kept[1].std() > 10


def test_the_optimizer_changes_nothing_without_a_rate() -> None:
    plan = Plan(200, 100, batch=50, evaluations=1, every=1)
    weights = torch.ones(2, 3)
    Optimizer(plain(plan, 2), weights).step(torch.ones(2, 3), column(0, 1))
    assert weights.tolist() == [[1, 1, 1], [0, 0, 0]]


def test_training_and_validation_share_no_example_and_labels_flip_as_often_as_asked() -> None:
    plan = Plan(300, 100, batch=50, evaluations=1, every=1, loss="entropy")
    hyper = plain(plan, 40)
    hyper.flips[20:] = 0.5
    task = moons()
    data = Training(task, plan, Net(1, 2, 2), hyper, torch.Generator().manual_seed(0)).data
    label = {tuple(x[0]): y for x, y in zip(task.x.tolist(), task.y.tolist(), strict=True)}
    wrong = []
    for run in range(40):
        seen, held = data.x[run].tolist(), data.x_val[run].tolist()
        assert len({*map(tuple, seen), *map(tuple, held)}) == 400
        truth = torch.tensor([label[tuple(x)] for x in seen])
        wrong.append((truth != data.y[run]).float().mean().item())
        assert [label[tuple(x)] for x in held] == data.y_val[run].tolist()
    assert set(wrong[:20]) == {0}
    assert np.mean(wrong[20:]) == pytest.approx(0.25, abs=0.03)
