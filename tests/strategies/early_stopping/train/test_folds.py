"""No family is on both sides of a split, and nothing is trained on without a licence."""

from __future__ import annotations

import numpy as np

from strategies.early_stopping.train.curves import LearningCurve, usable
from strategies.early_stopping.train.folds import folds


def curve(kind: str, group: str, free: bool = True) -> LearningCurve:
    return LearningCurve(np.arange(10.0), None, kind, group, free=free)


TESTED = [curve("yolo", f"project {i % 13}", free=i % 3 == 0) for i in range(60)]
TESTED += [curve("algoperf", number) for number in ("90", "99", "91", "103", "96")]
OTHERS = [curve("algoperf", f"algoperf/{name}") for name in (
    "librispeech_conformer_layernorm", "criteo1tb", "wmt_glu_tanh", "ogbg_gelu",
)] + [curve("keras_other", "elsewhere")]  # fmt: skip


def test_each_curve_is_tested_once() -> None:
    tested = [id(c) for fold in folds(TESTED, OTHERS) for c in fold.test]
    assert sorted(tested) == sorted(map(id, TESTED))


def test_families_are_kept_apart_and_licences_respected() -> None:
    for fold in folds(TESTED, OTHERS):
        assert not {c.family for c in fold.train} & {c.family for c in fold.test}
        assert all(c.free for c in fold.train)
        assert any(c.group == "elsewhere" for c in fold.train)


def test_numbered_workloads_are_known_by_their_names() -> None:
    families = {c.group: c.family for c in TESTED + OTHERS}
    assert families["90"] == families["99"] == families["algoperf/librispeech_conformer_layernorm"]
    assert families["91"] == families["algoperf/criteo1tb"]
    assert families["103"] == families["algoperf/ogbg_gelu"]
    assert families["project 1"] == "project 1"


def test_the_split_is_seeded() -> None:
    def test_groups(seed: int) -> list[set[str]]:
        return [{c.group for c in fold.test} for fold in folds(TESTED, OTHERS, seed=seed)]

    assert test_groups(0) == test_groups(0) != test_groups(1)


def test_flat_and_short_curves_are_left_out_and_long_ones_thinned() -> None:
    values = [np.ones(20), np.arange(7.0), np.full(20, np.nan), np.arange(20.0), np.arange(5000.0)]
    kept = usable(LearningCurve(v, v, "made", "one") for v in values)
    assert [len(c) for c in kept] == [20, 1000]
    assert (kept[1].values[0], kept[1].values[-1]) == (0.0, 4999.0)
