"""Which rank sits where on a mesh of pipeline, data and tensor axes.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM" (arXiv 2104.04473), section 3.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from numbers import Integral

AXES = ("pipeline", "data", "tensor")


@dataclass(frozen=True)
class Coordinates:
    """Where one rank sits.

    Args:
        pipeline: Which stage of the model it has.
        data: Which share of each batch it sees.
        tensor: Which piece of each split weight it has.
    """

    pipeline: int
    data: int
    tensor: int


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes of the mesh, and which rank has which place on it.

    Ranks are counted along the tensor axis fastest, then data, then pipeline, as in Megatron:
    the ranks that talk most are neighbours, usually on one machine.

    Args:
        pipeline: Stages that the model is cut into. Default: 1.
        data: Copies of the model, each with its own share of the batch. Default: 1.
        tensor: Ranks that share the weights of each layer. Default: 1.

    Raises:
        TypeError: A size is not a whole number.
        ValueError: A size is below 1.

    Example:
        >>> layout = Layout(pipeline=2, data=2, tensor=2)
        >>> layout.world_size, layout.coordinates(5)
        (8, Coordinates(pipeline=1, data=0, tensor=1))
        >>> layout.groups("tensor")
        ((0, 1), (2, 3), (4, 5), (6, 7))
    """

    pipeline: int = 1
    data: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            check_whole(axis, getattr(self, axis), "pass 1 not to use this axis")

    @classmethod
    def resolve(
        cls, world_size: int, pipeline: int = 1, tensor: int = 1, data: int | str = "auto"
    ) -> Layout:
        """Lay out a number of devices.

        Args:
            world_size: Devices in all.
            pipeline: Size of the pipeline axis. Default: 1.
            tensor: Size of the tensor axis. Default: 1.
            data: Size of the data axis, or `"auto"` for what remains. Default: `"auto"`.

        Returns:
            The layout, with as many ranks as there are devices.

        Raises:
            TypeError: A size is not a whole number.
            ValueError: A size is below 1, or the sizes do not multiply to `world_size`.

        Example:
            >>> Layout.resolve(8, pipeline=2, tensor=2)
            Layout(pipeline=2, data=2, tensor=2)
        """
        check_whole("devices", world_size, "pass how many there are")
        if isinstance(data, str) and data != "auto":
            raise ValueError(f"data={data!r} must be a whole number >= 1 or 'auto'")
        layout = cls(pipeline, 1 if isinstance(data, str) else data, tensor)
        model = pipeline * tensor
        if world_size % model:
            smaller = "/".join(
                axis for axis, n in (("pipeline", pipeline), ("tensor", tensor)) if n > 1
            )
            raise ValueError(
                f"devices={world_size} cannot be laid out as pipeline={pipeline} x "
                f"tensor={tensor}: {world_size} is not a multiple of {model}; use a multiple of "
                f"{model} devices or smaller {smaller}"
            )
        if isinstance(data, str):
            return cls(pipeline, world_size // model, tensor)
        if layout.world_size != world_size:
            raise ValueError(
                f"devices={world_size} cannot be laid out as {layout.in_words}, which takes "
                f"{layout.world_size}; pass data={world_size // model}, data='auto' or "
                f"devices={layout.world_size}"
            )
        return layout

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.pipeline * self.data * self.tensor

    @property
    def in_words(self) -> str:
        """Such as `"pipeline=2 x data=2 x tensor=1"`."""
        return " x ".join(f"{axis}={getattr(self, axis)}" for axis in AXES)

    def coordinates(self, rank: int) -> Coordinates:
        """Where a rank sits.

        Args:
            rank: From 0 to `world_size - 1`.

        Raises:
            TypeError: `rank` is not a whole number.
            ValueError: There is no such rank.
        """
        self._check_below("rank", rank, self.world_size)
        rest, tensor = divmod(rank, self.tensor)
        return Coordinates(*divmod(rest, self.data), tensor)

    def rank(self, pipeline: int = 0, data: int = 0, tensor: int = 0) -> int:
        """The rank at some place.

        Args:
            pipeline: Place on the pipeline axis, from 0. Default: 0.
            data: Place on the data axis, from 0. Default: 0.
            tensor: Place on the tensor axis, from 0. Default: 0.

        Raises:
            TypeError: A place is not a whole number.
            ValueError: There is no such place.

        Example:
            >>> Layout(pipeline=2, data=2, tensor=2).rank(pipeline=1, tensor=1)
            5
        """
        for axis, place in zip(AXES, (pipeline, data, tensor), strict=True):
            self._check_below(axis, place, getattr(self, axis))
        return (pipeline * self.data + data) * self.tensor + tensor

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Ranks that talk to each other along one axis or several.

        Args:
            axes: One or more of `"pipeline"`, `"data"` and `"tensor"`.

        Returns:
            Groups of ranks that differ in these axes only, ascending, by their first rank.

        Raises:
            ValueError: An axis is unknown, or there is none.

        Example:
            >>> Layout(pipeline=2, data=2).groups("data"), Layout(2, 2).groups("data", "pipeline")
            (((0, 1), (2, 3)), ((0, 1, 2, 3),))
        """
        for axis in axes:
            if axis not in AXES:
                raise ValueError(f"axis {axis!r} must be one of {', '.join(map(repr, AXES))}")
        if not axes:
            raise ValueError(f"no axis given; pass one or more of {', '.join(map(repr, AXES))}")
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            places = zip(AXES, astuple(self.coordinates(rank)), strict=True)
            found.setdefault(tuple(p for axis, p in places if axis not in axes), []).append(rank)
        return tuple(tuple(group) for group in found.values())

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The one of `groups(*axes)` that a rank is in.

        Args:
            rank: From 0 to `world_size - 1`.
            axes: One or more of `"pipeline"`, `"data"` and `"tensor"`.

        Raises:
            TypeError: `rank` is not a whole number.
            ValueError: There is no such rank, an axis is unknown, or there is none.

        Example:
            >>> Layout(pipeline=2, data=2, tensor=2).group_of(5, "pipeline")
            (1, 5)
        """
        self._check_below("rank", rank, self.world_size)
        return next(group for group in self.groups(*axes) if rank in group)

    def _check_below(self, name: str, value: object, size: int) -> None:
        hint = f"pass 0 to {size - 1} in a layout of {self.in_words}"
        check_whole(name, value, hint, least=0, most=size - 1)


def check_whole(
    name: str, value: object, hint: str, least: int = 1, most: int | None = None
) -> None:
    """Raise an error that says what to pass instead, unless a value is a whole number in range.

    Args:
        name: Of the argument.
        value: What the user passed.
        hint: What to pass instead.
        least: Lowest value. Default: 1.
        most: Highest value. Default: None, for no bound.

    Raises:
        TypeError: It is not a whole number.
        ValueError: It is out of range.
    """
    wanted = f">= {least}" if most is None else f"from {least} to {most}"
    message = f"{name}={value!r} must be a whole number {wanted}; {hint}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(message)
    if int(value) < least or (most is not None and int(value) > most):
        raise ValueError(message)
