"""What comes out on pipeline x data x tensor ranks is what comes out on one process."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import torch

from tests.lightning_ext.parallel.cases import QUICK, Case, everything
from tests.lightning_ext.parallel.compare import alone, check, read, run
from tests.lightning_ext.parallel.ranks import JOBS, RESUMED

pytestmark = pytest.mark.timeout(900)  # the first test waits for all that its ranks run


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("quick"), [*QUICK, *JOBS])


@pytest.mark.parametrize("name", list(QUICK))
def test_quick(name: str, quick: Path) -> None:
    check(QUICK[name], read(quick, name))


def test_seven_layers_are_balanced(quick: Path) -> None:
    # The embedding and two blocks; two; two; one, the norm and the head.
    assert read(quick, "seven layers")["parts"] == [3, 2, 2, 3]


@pytest.mark.parametrize("name", RESUMED)
def test_resumed_and_loaded_by_one_process(name: str, quick: Path) -> None:
    case, folder = QUICK[name], quick / f"{name} resumed"
    module, _ = alone(case)
    found = read(folder, "found")
    assert found["seen"] == pytest.approx(module.seen[4:], abs=1e-10)

    plain, trainer = case.module(), case.trainer(devices=1)
    trainer.fit(plain, ckpt_path=folder / "half.ckpt")
    # Lightning itself loads into single precision before it converts to double.
    assert plain.seen == pytest.approx(module.seen[4:], abs=1e-6)
    (tested,) = trainer.validate(plain, ckpt_path=folder / "half.ckpt", verbose=False)
    assert tested["val_loss"] == pytest.approx(found["val_loss"], abs=1e-12)


def test_callbacks_act_as_on_one_process(quick: Path, tmp_path: Path) -> None:
    first, *others = read(quick, "callbacks")
    assert all(other == first for other in others)
    expected = everything(tmp_path, devices=1)
    assert (expected["sane"], 1 < expected["stopped"] < 5) == (2, True)
    for name in ("seen", "logged", "val_loss", "test_loss"):
        assert first.pop(name) == pytest.approx(expected.pop(name), abs=1e-10, rel=0)
    assert first == expected


def test_ranks_that_share_tensors_drop_the_same_units(quick: Path) -> None:
    first, *others = read(quick, "dropout")
    assert all(torch.equal(other, first) for other in others)


def test_a_divided_module_says_that_it_is(quick: Path) -> None:
    ranks = read(quick, "divided")
    assert {own for own, _, _ in ranks} == {0}
    assert all(ranks[0][1])
    assert all("holds only what this rank has" in m for m in chain(*ranks[0][1]))
    for _, _, called in ranks:
        assert called.startswith("the pipelined module 'model' is divided into stages")


class TestNoise:
    """Two stages, two copies, two microbatches, two epochs of four steps."""

    def test_stages_of_a_copy_draw_alike_and_copies_do_not(self, quick: Path) -> None:
        ranks = [drawn for drawn, _, _ in read(quick, "noise")["ranks"]]
        draws = [
            {(step, *noise.flatten().tolist(), scale, sign) for step, noise, scale, sign in drawn}
            for drawn in ranks
        ]
        one, other = draws[:2]
        # Ranks 0 and 2 are the stages of the first copy, 1 and 3 those of the second.
        assert (draws[2], draws[3]) == (one, other)
        # In each step and for each microbatch others, of all three libraries.
        assert len({row[1:-2] for row in one | other}) == 2 * 8 * 2
        assert len({row[-2] for row in one | other}) == 2 * 8 * 2
        assert {row[-1] for row in one | other} == {-1.0, 1.0}

    def test_training_is_that_on_what_was_drawn(self, quick: Path) -> None:
        """What the last stage saw, fitted again by hand."""
        found = read(quick, "noise")
        module = Case("noisy", {}).module().double()
        optimizer = module.configure_optimizers()
        for step in range(8):
            rows = [row for _, used, _ in found["ranks"][2:] for row in used if row[0] == step]
            assert len(rows) == 2 * 2
            optimizer.zero_grad()
            for _, given, target in rows:
                loss = torch.nn.functional.mse_loss(module.model(given)[0], target)
                (loss / len(rows)).backward()
            optimizer.step()
        for name, value in module.state_dict().items():
            assert (found["state"][name] - value).abs().max() < 1e-12, name

    def test_all_ranks_know_the_same_loss(self, quick: Path) -> None:
        assert len({loss for _, _, loss in read(quick, "noise")["ranks"]}) == 1
