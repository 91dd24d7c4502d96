"""Blocks run again in the backward pass on tensorflow, in graphs and eagerly.

Loaded on the tensorflow backend only. What a step saves is read from a graph of it, which is traced
before the first step and never runs.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_ext.backends.graph_memory import Meter
from keras_ext.backends.pure_call import PureCall, Result, is_float

if TYPE_CHECKING:
    from keras_ext.backends.recompute import Recompute

KEEPS_GRADIENTS = False
IS_PURE = True


def step(recompute: Recompute, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a training step, after a look at its graph if it is the first.

    Args:
        recompute: What is run again.
        function: Of Keras, for training.
        args: That it gets: an iterator over batches.
    """
    if recompute.settled:
        return function(*args)
    batches = list(islice(args[0], recompute.model.steps_per_execution))
    if not batches:
        return function(*args)
    shapes = tuple(tuple(x.shape) for x in tf.nest.flatten(batches[0]) if hasattr(x, "shape"))
    meter = Meter(shapes)

    def trace() -> None:
        model = recompute.model
        meter.read(_graph(model, batches[0]), _is_linear(model), recompute.refuse)

    recompute.look(shapes, meter, trace)
    recompute.prove(shapes, lambda: _graph(recompute.model, batches[0]))
    return function(_iterator(args[0], batches))


def _graph(model: keras.Model, batch: Any) -> Any:
    """The graph of a step, for shapes that are all known."""
    step = tf.function(lambda data: model.train_step(data), autograph=False)
    return step.get_concrete_function(tf.nest.map_structure(_spec, batch)).graph


def _is_linear(model: keras.Model) -> bool:
    """Whether an update is the sum of those by parts of a gradient.

    Others of Keras take the square or the norm of every row, as often as it was looked up.
    """
    optimizer = model.optimizer
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # under a scale of the loss
    clips = optimizer.clipnorm, optimizer.global_clipnorm, optimizer.clipvalue
    plain = type(optimizer) is keras.optimizers.SGD and not any(clips)
    return plain and type(model).train_step is keras.Model.train_step


def _spec(x: Any) -> Any:
    return (
        tf.type_spec_from_value(x)
        if tf.is_tensor(x)
        else tf.TensorSpec.from_tensor(tf.convert_to_tensor(x))
    )


def _iterator(original: Any, batches: list[Any]) -> Any:
    """An iterator over batches that were taken from another, for which nothing is traced anew."""
    if not isinstance(original, tf.data.Iterator):
        return iter(batches)
    spec = original.element_spec
    return iter(tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec))


def run(
    layer: keras.Layer, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a block so that it is called again in the backward pass.

    Args:
        layer: The block.
        call: What it does.
        args: That it gets.
        kwargs: Others.
    """
    pure = PureCall(layer, call, args, kwargs)
    # The variables will have changed by then.
    state = [tf.identity(value) for value in pure.state]
    results: list[Result] = []

    def block(*inputs: Any) -> tuple[Any, ...]:
        result = pure(inputs, state)
        results.append(result)
        return tuple(result.differentiable())

    made = iter(tf.recompute_grad(block)(*map(tf.convert_to_tensor, pure.inputs)))
    # What is whole numbers, and new values of variables, have no gradients.
    first = results[0]
    first.leaves = [next(made) if is_float(leaf) else leaf for leaf in first.leaves]
    first.losses = list(made)
    return pure.finish(first)
