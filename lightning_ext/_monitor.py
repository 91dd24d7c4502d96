"""What an evaluation is: the metric, where and how often it is logged, and the training loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_ext._compat import Trainer, rank_zero_warn
from lightning_ext._metrics import MeanLoss, mean_over_ranks, metric, on_any_rank, require_logged


class Monitor:
    """Watches a metric in validation or, if it is not there, at the end of training epochs.

    All ranks have to ask alike.

    Args:
        name: The metric.
        train_name: Training loss to look at beside it; None for what `training_step` returned.

    Attributes:
        source: Where the metric is logged, `"validation"` or `"training"`; empty until known.
        pending: A value from validation that is taken in when the epoch ends.
        chances: Validations, or training epochs, since the last evaluation.
    """

    def __init__(self, name: str, train_name: str | None) -> None:
        self.name, self.train_name = name, train_name
        self.source = ""
        self.pending: float | None = None
        self.chances = 0
        self._loss = MeanLoss()
        self._warned = self._validating = self._validated = False
        self._before: dict[str, Tensor | None] = {}
        self._whole_from = 0  # the first epoch that is seen from its beginning

    def train_starts(self, trainer: Trainer) -> None:
        """Note whether an epoch is gone on with."""
        begun = trainer.fit_loop.epoch_loop.batch_progress.current.ready > 0
        self._whole_from = trainer.current_epoch + begun

    def starts(self, trainer: Trainer, source: str) -> None:
        """Note what is known as a validation or a training epoch begins."""
        self._before[source] = trainer.callback_metrics.get(self.name)
        self._validating = source == "validation"

    def batch_ends(self, trainer: Trainer, outputs: Any) -> None:
        """Add what `on_train_batch_end` is given."""
        if self.train_name is None:
            self._loss.add(trainer, outputs)

    def validation_ends(self, trainer: Trainer) -> float | None:
        """The mean of the metric over ranks, None if it was not logged."""
        self._validating, self._validated = False, True
        # It may be one of the training epoch, unless epochs are nothing to go by.
        return self._logged(trainer, "validation", trainer.check_val_every_n_epoch is None)

    def epoch_ends(self, trainer: Trainer) -> float | None:
        """The mean of the metric over ranks, None if it was not logged."""
        last_chance = self._validated or not trainer.enable_validation
        return self._logged(trainer, "training", last_chance)

    def _logged(self, trainer: Trainer, source: str, last_chance: bool) -> float | None:
        value = metric(trainer, self.name, self._before.get(source))
        self.chances += 1
        if on_any_rank(trainer, value is None):
            if not self.source and last_chance:
                require_logged(trainer, "monitor", self.name, "validation_step")
            if self.source and not self._warned:
                self._warned = True
                rank_zero_warn(
                    f"PredictiveEarlyStopping: {self.name!r} is not logged in every {source}; "
                    "where it is not, there is no evaluation"
                )
            return None
        self.source = source
        return mean_over_ranks(trainer, value)

    def wait_for_epoch(self, trainer: Trainer, value: float) -> None:
        """Take in a value later: what the epoch logs counts too, and checkpoints know of it."""
        self.pending, self._loss = value, self._train_loss(trainer)

    def train_value(self, trainer: Trainer, epoch_over: bool) -> float:
        """The training loss of the present evaluation, and the next one begins.

        Args:
            trainer: The running trainer.
            epoch_over: Whether it already counts the present epoch as done.
        """
        # It may be logged as late as at the end of an epoch.
        if self.train_name and trainer.current_epoch + epoch_over > self._whole_from:
            require_logged(trainer, "train_monitor", self.train_name, "training_step")
        loss, self._loss, self.chances = self._train_loss(trainer), MeanLoss(), 0
        return float(loss.value)

    def _train_loss(self, trainer: Trainer) -> MeanLoss:
        logged = self.train_name and trainer.callback_metrics.get(self.train_name)
        # After a resume, what was logged before is in the checkpoint.
        return MeanLoss(mean_over_ranks(trainer, self._loss.value if logged is None else logged), 1)

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "source": self.source,
            "pending": self.pending,
            "chances": self.chances,
            "loss": self._loss.state_dict(),
            "warned": self._warned,
        }

    def state_of_ranks(self, trainer: Trainer) -> dict[str, Any]:
        """What a checkpoint keeps: the same on every rank."""
        if trainer.interrupted:  # by an exception, maybe on this rank alone
            return self.state_dict()
        state, loss = self.state_dict(), self._loss.over_ranks(trainer)
        # Another callback saves as a validation ends, before its value was taken in: a resumed run
        # does not repeat that validation.
        if self._validating and self.source != "training":
            value = metric(trainer, self.name, self._before.get("validation"))
            state["chances"] += 1
            if not on_any_rank(trainer, value is None):
                state |= {"pending": mean_over_ranks(trainer, value), "source": "validation"}
                loss = self._train_loss(trainer)
        return state | {"loss": loss.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.source, self.pending = state["source"], state["pending"]
        self.chances, self._warned = state["chances"], state["warned"]
        self._loss = MeanLoss(*state["loss"])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_before": {}}
