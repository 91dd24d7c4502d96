"""Early stopping by forecast: how much better a curve will still get, and whether that pays.

Example:
    >>> from strategies.early_stopping import forecast
    >>> losses = [1 / (1 + epoch) for epoch in range(10)]
    >>> forecast(losses, mode="min", max_epochs=20).p_improve > 0.5
    True
"""

from strategies.early_stopping.forecast import Forecast, forecast
from strategies.early_stopping.plot import plot
from strategies.early_stopping.rule import PredictiveStopping, StopDecision, stopping_epoch

__all__ = ["Forecast", "PredictiveStopping", "StopDecision", "forecast", "plot", "stopping_epoch"]
