"""Training of the shipped weights, and of your own: `python -m strategies.early_stopping.train`."""
