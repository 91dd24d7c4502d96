"""Blocks run again in the backward pass on jax, compiled or not.

Loaded on the jax backend only. What a step saves is found by tracing it, which takes no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import keras

from keras_ext._table import Call, Measured, size_of
from keras_ext.backends.jaxpr_cost import cost_of
from keras_ext.backends.pure_call import PureCall, Result, is_float
from strategies.checkpointing.shapes import Shapes

if TYPE_CHECKING:
    from keras_ext.backends.recompute import Recompute

KEEPS_GRADIENTS = False
IS_PURE = True
# Keras tells losses of layers apart by their address, which is used again once one is gone.
_losses: list[Any] = []


def step(recompute: Recompute, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a training step, after a look at what it saves if the shapes of the batch are new.

    Args:
        recompute: What is run again.
        function: Of Keras, for training.
        args: That it gets: the state, and an iterator over batches.
    """
    state, batches = args

    def watched() -> Iterator[Any]:
        for batch in batches:
            _look(recompute, state, batch)
            yield batch

    try:
        return function(state, watched())
    finally:
        _losses.clear()


def _look(recompute: Recompute, state: Any, batch: Any) -> None:
    shapes = tuple(tuple(x.shape) for x in jax.tree.leaves(batch) if hasattr(x, "shape"))
    if recompute.knows(shapes):
        return
    meter = Meter(shapes)

    def trace() -> None:
        jax.eval_shape(lambda *given: meter.step(recompute.model, *given), state, batch)

    recompute.look(shapes, meter, trace)
    recompute.prove(shapes, lambda: _prove(recompute.model, state, batch))


def _prove(model: keras.Model, state: Any, batch: Any) -> None:
    """Trace a step, and fail if it uses what was made inside of a block otherwise."""
    # A new function is traced anew.
    jaxpr = jax.make_jaxpr(lambda *given: model.train_step(*given))(state, batch)
    if any(isinstance(x, jax.core.Tracer) for x in jaxpr.consts):
        # Traces of functions that are run again are kept, and what leaked is in them.
        jax.clear_caches()
        raise ValueError("outside of a block, something is used that only its inside knows")


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

    def block(inputs: Any, state: Any) -> tuple[Any, ...]:
        result = pure(inputs, state)
        _losses.extend(result.losses)
        return result.leaves, result.masks, result.losses, result.changed

    return pure.finish(Result(*jax.checkpoint(block)(pure.inputs, pure.state)))


class Meter:
    """Measures what blocks, and the code between them, save for the backward pass.

    Args:
        shapes: Of the batch.
    """

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._calls: list[Call] = []
        self._returned: list[list[Any]] = []
        self._held: list[Any] = []  # what blocks take from outside
        self._other = 0

    def measured(self) -> Measured | None:
        """What the step told, or none if no block took part."""
        advice = "Bytes are those of the traced step; a compiler may need more or less."
        return Measured(self._calls, self._other, self._shapes, (advice,)) if self._calls else None

    def step(self, model: keras.Model, state: Any, batch: Any) -> None:
        """Trace a step.

        Args:
            model: In training.
            state: Of it, as the training step gets it.
            batch: Of data.
        """
        if type(model).train_step is not keras.Model.train_step:
            model.train_step(state, batch)  # what it saves outside of blocks is not known
            return
        trained, others, optimizer, metrics = state
        data = keras.utils.unpack_x_y_sample_weight(batch)

        def loss(trained: Any) -> Any:
            return model.compute_loss_and_updates(
                trained, others, metrics, *data, training=True, optimizer_variables=optimizer
            )

        _, backward, _ = jax.vjp(loss, trained, has_aux=True)
        if not self._calls:
            return
        total = sum(map(_bytes, _apart(jax.tree.leaves(backward), jax.tree.leaves((state, batch)))))
        counted = sum(
            call.saved + call.before + (call.output if following is None or following.linked else 0)
            for call, following in zip(self._calls, [*self._calls[1:], None], strict=True)
        )
        self._other = max(total - counted, 0)

    def call(
        self,
        layer: keras.Layer,
        name: str,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a block, and trace beside it what its backward pass needs."""
        found, taken = Call(name), [x for x in keras.tree.flatten((args, kwargs)) if is_float(x)]
        before = self._returned[-1] if self._returned else []
        found.linked = bool(taken) and any(taken[0] is x for x in before)
        for x in taken[1:] if found.linked else taken:
            found.before += self._hold(x)
        pure = PureCall(layer, call, args, kwargs)

        def probe(inputs: list[Any], state: list[Any]) -> None:
            def block(inputs: list[Any]) -> list[Any]:
                result = pure(inputs, state)
                _losses.extend(result.losses)
                return result.differentiable()

            outputs, backward = jax.vjp(block, inputs)
            saved = _apart(jax.tree.leaves(backward), [*inputs[len(taken) :], *state])
            found.saves_input = any(x is inputs[0] for x in saved) if taken else False
            own = _apart(saved, inputs)
            if outputs:
                found.output = _bytes(outputs[0])
                found.saves_output = any(x is outputs[0] for x in own)
            found.saved = sum(map(_bytes, _apart(own, outputs[:1])))
            found.cost = cost_of(jax.make_jaxpr(block)(inputs))

        jax.eval_shape(probe, pure.inputs, pure.state)
        self._calls.append(found)
        output = call(*args, **kwargs)
        self._returned.append([x for x in keras.tree.flatten(output) if is_float(x)])
        return output

    def _hold(self, x: Any) -> int:
        """Bytes of an array that a block takes from outside, the first time that one does."""
        if any(x is held for held in self._held):
            return 0
        self._held.append(x)
        for call, returned in zip(self._calls, self._returned, strict=True):
            call.held |= any(x is output for output in returned)
        return _bytes(x)


def _apart(found: list[Any], known: list[Any]) -> list[Any]:
    """Arrays that are not among others, each once."""
    seen = {id(x) for x in known}
    return [x for x in {id(x): x for x in found}.values() if id(x) not in seen]


def _bytes(x: Any) -> int:
    return size_of(x.shape, x.dtype)
