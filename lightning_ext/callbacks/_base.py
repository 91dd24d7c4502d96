"""What every callback of this package shares: its decision log, and the table at the end."""

from __future__ import annotations

import inspect
from typing import Any

from lightning_ext._compat import Callback, LightningModule, Trainer, callbacks_of
from strategies.decisions import DecisionLog
from strategies.report import print_decisions


class DecidingCallback(Callback):
    """A callback that records its decisions, saves them, and shows them when the run ends.

    Numbers go to the user's own loggers as `"<callback>/<name>"`. When the fit ends, the last
    such callback of a trainer prints one table for all of them, on rank zero and only where the
    progress bar is on.
    """

    def __init__(self) -> None:
        self.decisions_ = DecisionLog(type(self).__name__)

    def record(self, trainer: Trainer, action: str, reason: str, **numbers: float) -> None:
        """Record a decision and send its numbers to the trainer's loggers.

        Args:
            trainer: The running trainer.
            action: What was done, in a few words.
            reason: Why, in one sentence.
            **numbers: The figures behind the reason.
        """
        decision = self.decisions_.record(trainer.global_step, action, reason, **numbers)
        metrics = {f"{decision.callback}/{key}": value for key, value in decision.numbers.items()}
        for logger in trainer.loggers if metrics else ():
            logger.log_metrics(metrics, step=decision.step)

    def reset(self) -> None:
        """Forget what an earlier fit left behind."""
        self.decisions_.clear()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Under every strategy this comes before the state of a checkpoint is loaded.
        if stage == "fit":
            self.reset()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        ours = [c for c in callbacks_of(trainer) if isinstance(c, DecidingCallback)]
        if trainer.is_global_zero and trainer.progress_bar_callback and ours[-1] is self:
            print_decisions(d for callback in ours for d in callback.decisions_)

    def state_dict(self) -> dict[str, Any]:
        return {"decisions": self.decisions_.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.decisions_.load_state_dict(state_dict["decisions"])

    # What Keras asks of a callback first, depending on its backend; here to name the mistake.

    @property
    def on_batch_end(self) -> Any:
        raise self._wrong_framework()

    def set_model(self, model: Any) -> None:
        raise self._wrong_framework()

    def _wrong_framework(self) -> AttributeError:  # so that `hasattr` says no
        name = type(self).__name__
        return AttributeError(
            f"{name} of lightning_ext is for a Lightning Trainer; "
            f"pass keras_ext.{name} to model.fit"
        )

    def __repr__(self) -> str:
        parameters = list(inspect.signature(type(self)).parameters.values())
        shown = [
            f"{p.name}={getattr(self, p.name)!r}"
            for i, p in enumerate(parameters)
            if i == 0 or getattr(self, p.name) != p.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"
