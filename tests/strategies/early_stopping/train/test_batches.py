"""What stopping at a moment costs, against a direct computation."""

from __future__ import annotations

import numpy as np
import pytest

from strategies.early_stopping.train.batches import Batches
from strategies.early_stopping.train.curves import LearningCurve
from strategies.early_stopping.train.rows import names, rows_of


@pytest.fixture(scope="module")
def curve() -> LearningCurve:
    random = np.random.default_rng(3)
    values = np.cumsum(random.normal(size=40))
    values[[7, 20]] = np.nan
    return LearningCurve(values, np.cumsum(random.normal(size=40)), "made", "one")


def test_costs(curve: LearningCurve) -> None:
    columns = names()
    stream = Batches([rows_of(curve)], np.ones(1), columns, np.random.default_rng(0), curves=200)
    batch = next(stream)
    log_done = batch.x[..., columns.index("log_done")]
    for i in range(200):
        used = batch.used[i]
        at = np.exp(log_done[i][used]).round().astype(int)
        budgets = (at / batch.spent[i][used]).round().astype(int)
        assert len(set(budgets)) <= 1
        for t, budget, row in zip(at, budgets, np.flatnonzero(used), strict=True):
            values = curve.filled[:budget]
            best, so_far = values.max(), values[:t]
            lost = best - so_far.max()
            assert batch.regret[i, row] == pytest.approx(lost / np.ptp(values), abs=1e-6)
            assert batch.gain[i, row] == pytest.approx(lost / np.ptp(so_far), rel=1e-5)
            rest = values[int(0.1 * budget) - 1 if budget >= 20 else 0 :]
            late = min(lost / (best - rest.min()), 1.0)
            assert batch.late_regret[i, row] == pytest.approx(late, abs=1e-6)
            if lost > 0:
                when = int(np.argmax(values == best)) + 1
                assert batch.place[i, row] == pytest.approx((when - t) / (budget - t))
            else:
                assert np.isnan(batch.place[i, row])


def test_budgets_of_many_lengths_some_unknown_some_inflated(curve: LearningCurve) -> None:
    columns = names()
    stream = Batches([rows_of(curve)], np.ones(1), columns, np.random.default_rng(0), curves=400)
    batch = next(stream)
    first = batch.used[:, 0]
    done = np.exp(batch.x[first, 0, columns.index("log_done")])
    real = (done / batch.spent[first, 0]).round()
    known = batch.x[first, 0, len(columns)]
    claimed = done / batch.x[first, 0, len(columns) + 2]
    assert 0.4 < np.mean(real == 40) < 0.7
    assert len(set(real)) > 15
    assert 0.05 < np.mean(known == 0) < 0.15
    inflated = (known == 1) & (claimed > real + 0.5)
    assert 0.01 < inflated.mean() < 0.1


def test_the_train_loss_is_hidden_half_of_the_time(curve: LearningCurve) -> None:
    columns = names()
    stream = Batches([rows_of(curve)], np.ones(1), columns, np.random.default_rng(0), curves=200)
    batch = next(stream)
    shown = batch.x[batch.used[:, 0], 0, columns.index("train_known")]
    assert 0.35 < shown.mean() < 0.65
