"""Fine-tune a small residual network with Keras, with and without layer-wise decay.

Run it with `python -m examples.layerwise_lr_decay_keras`, on the backend of your choice
(`KERAS_BACKEND=jax python -m ...`).
"""

from __future__ import annotations

import keras
from keras import layers

from examples.digits import KNOWN, Split, load
from keras_ext import LayerwiseLRDecay


def residual_network(width: int = 24, depth: int = 4) -> keras.Model:
    """Stem, residual blocks and pooling, without a head."""
    images = keras.Input((8, 8, 1))
    x = layers.Conv2D(width, 3, padding="same", name="stem")(images)
    for i in range(depth):
        y = layers.LayerNormalization(name=f"block_{i}_norm")(x)
        y = layers.Conv2D(width, 3, padding="same", activation="relu", name=f"block_{i}_conv1")(y)
        y = layers.Conv2D(width, 3, padding="same", name=f"block_{i}_conv2")(y)
        x = layers.Add(name=f"block_{i}_add")([x, y])
    x = layers.GlobalAveragePooling2D(name="pool")(layers.LayerNormalization(name="norm")(x))
    return keras.Model(images, x, name="backbone")


def classifier(backbone: keras.Model, lr: float, steps: int) -> keras.Model:
    """A compiled model with a fresh head."""
    keras.utils.set_random_seed(0)
    logits = layers.Dense(10, name="head")(backbone.output)
    model = keras.Model(backbone.input, logits)
    model.compile(
        optimizer=keras.optimizers.AdamW(
            keras.optimizers.schedules.CosineDecay(lr, steps), weight_decay=0.05
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def fit(
    backbone: keras.Model, lr: float, data: Split, test: Split, epochs: int, callbacks: list
) -> keras.callbacks.History:
    model = classifier(backbone, lr, steps=epochs * -(-len(data.x) // 32))
    return model.fit(
        data.x[..., None],
        data.y,
        batch_size=32,
        epochs=epochs,
        validation_data=(test.x[..., None], test.y),
        validation_batch_size=1000,
        callbacks=callbacks,
        verbose=0,
    )


def run() -> tuple[dict[str, keras.callbacks.History], LayerwiseLRDecay]:
    """Pretrain once, then fine-tune twice from there."""
    known, few, test = load()
    assert set(known.y) == set(range(KNOWN))
    keras.utils.set_random_seed(0)
    backbone = residual_network()
    fit(backbone, 3e-3, known, test, 6, [])
    weights = backbone.get_weights()

    decay = LayerwiseLRDecay(decay=0.75)
    # With decay a higher base rate is best; each has the one that the benchmark found for it.
    settings = {
        "equal rates at 1e-3": (1e-3, []),
        "LayerwiseLRDecay(0.75) at 3e-3": (3e-3, [decay]),
    }
    histories = {}
    for label, (lr, callbacks) in settings.items():
        backbone.set_weights(weights)
        histories[label] = fit(backbone, lr, few, test, 20, callbacks)
    return histories, decay


def main() -> None:
    histories, decay = run()
    for decision in decay.decisions_:
        print(f"step {decision.step}: {decision.action}: {decision.reason}")
    for label, history in histories.items():
        print(f"{label}: test accuracy {history.history['val_accuracy'][-1]:.3f}")


if __name__ == "__main__":
    main()
