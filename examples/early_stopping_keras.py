"""Train a small convolutional network with Keras, and stop when the rest is not worth it.

Run it with `python -m examples.early_stopping_keras`, on the backend of your choice
(`KERAS_BACKEND=jax python -m ...`).
"""

from __future__ import annotations

import keras
from keras import layers

from examples.digits import load
from keras_ext import PredictiveEarlyStopping

EPOCHS = 60


def network() -> keras.Model:
    """A compiled model, with the same weights at every call."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(32, activation="relu"),
            layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def fit(*callbacks: keras.callbacks.Callback) -> keras.callbacks.History:
    """Train on the digits 0 to 6, and validate on others of them."""
    known, _, test = load()
    mask = test.y < 7
    return network().fit(
        known.x[..., None],
        known.y,
        batch_size=128,
        epochs=EPOCHS,
        validation_data=(test.x[mask][..., None], test.y[mask]),
        validation_batch_size=1000,
        callbacks=list(callbacks),
        verbose=0,
    )


def run() -> tuple[dict[str, keras.callbacks.History], PredictiveEarlyStopping]:
    """Train to the end, and as far as it is worth it."""
    stopping = PredictiveEarlyStopping(
        "val_loss", preset="safe", restore_best=True, log_forecast=True
    )
    histories = {"all epochs": fit(), "PredictiveEarlyStopping": fit(stopping)}
    return histories, stopping


def main() -> None:
    histories, stopping = run()
    for decision in stopping.decisions_:
        print(f"step {decision.step}: {decision.action}: {decision.reason}")
    for label, history in histories.items():
        losses, accuracies = (history.history[name] for name in ("val_loss", "val_accuracy"))
        best = losses.index(min(losses))
        print(
            f"{label}: {len(losses)} epochs, validation loss {losses[best]:.4f} and accuracy "
            f"{accuracies[best]:.3f} in the best of them"
        )
    print("chance of improving, as forecast every 10 epochs:")
    chances = histories["PredictiveEarlyStopping"].history["val_loss_p_improve"]
    print("  " + ", ".join(f"{chance:.0%}" for chance in chances[9::10]))


if __name__ == "__main__":
    main()
