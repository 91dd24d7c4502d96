"""Ranks, coordinates and groups, against Megatron's published example and first principles."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from strategies.parallel import Coordinates, Layout

SIZES = (1, 2, 3, 4)
LAYOUTS = [Layout(*sizes) for sizes in itertools.product(SIZES, repeat=3)]
AXES = ("pipeline", "data", "tensor")


def test_groups_of_megatron() -> None:
    """16 devices as in the docstring of `initialize_model_parallel` in Megatron-LM."""
    layout = Layout.resolve(16, pipeline=4, tensor=2)
    assert layout == Layout(pipeline=4, data=2, tensor=2)
    assert layout.groups("tensor") == tuple((i, i + 1) for i in range(0, 16, 2))
    assert layout.groups("data") == (
        (0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)
    )  # fmt: skip
    assert layout.groups("pipeline") == (
        (0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)
    )  # fmt: skip
    assert layout.groups("pipeline", "tensor") == (
        (0, 1, 4, 5, 8, 9, 12, 13),
        (2, 3, 6, 7, 10, 11, 14, 15),
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.in_words)
def test_each_rank_has_a_place_of_its_own(layout: Layout) -> None:
    places = itertools.product(
        range(layout.pipeline), range(layout.data), range(layout.tensor)
    )  # the last one fastest
    for rank, (pipeline, data, tensor) in enumerate(places):
        assert layout.coordinates(rank) == Coordinates(pipeline, data, tensor)
        assert layout.rank(pipeline, data, tensor) == rank
    assert layout.world_size == rank + 1


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.in_words)
def test_groups_differ_in_their_axes_only(layout: Layout) -> None:
    for count in (1, 2, 3):
        for axes in itertools.permutations(AXES, count):
            groups = layout.groups(*axes)
            assert sorted(itertools.chain(*groups)) == list(range(layout.world_size))
            assert list(groups) == sorted(groups)
            for group in groups:
                assert list(group) == sorted(group)
                places = [layout.coordinates(rank) for rank in group]
                for axis in AXES:
                    size = getattr(layout, axis) if axis in axes else 1
                    assert len({getattr(place, axis) for place in places}) == size
                assert all(layout.group_of(rank, *axes) == group for rank in group)


def test_all_axes_make_one_group() -> None:
    assert Layout(2, 3, 2).groups(*AXES) == (tuple(range(12)),)


def test_layouts_are_values() -> None:
    assert len({Layout(2, 1, 1), Layout(pipeline=2), Layout()}) == 2
    with pytest.raises(AttributeError):
        Layout().data = 2  # type: ignore[misc]


@pytest.mark.parametrize("world_size", range(1, 25))
def test_resolve_takes_what_remains_for_data(world_size: int) -> None:
    for pipeline, tensor in itertools.product(range(1, 6), repeat=2):
        if world_size % (pipeline * tensor):
            with pytest.raises(ValueError, match=f"not a multiple of {pipeline * tensor};"):
                Layout.resolve(world_size, pipeline, tensor)
        else:
            layout = Layout.resolve(world_size, pipeline, tensor)
            assert (layout.pipeline, layout.tensor) == (pipeline, tensor)
            assert layout.world_size == world_size
            assert Layout.resolve(world_size, pipeline, tensor, layout.data) == layout


def test_resolve_says_what_would_do() -> None:
    with pytest.raises(ValueError, match="multiple") as error:
        Layout.resolve(6, pipeline=2, tensor=2)
    assert str(error.value) == (
        "devices=6 cannot be laid out as pipeline=2 x tensor=2: 6 is not a multiple of 4; "
        "use a multiple of 4 devices or smaller pipeline/tensor"
    )
    with pytest.raises(ValueError, match=r"or smaller tensor$"):
        Layout.resolve(2, tensor=4)
    with pytest.raises(ValueError, match="cannot be laid out") as error:
        Layout.resolve(8, pipeline=2, data=3)
    assert str(error.value) == (
        "devices=8 cannot be laid out as pipeline=2 x data=3 x tensor=1, which takes 6; "
        "pass data=4, data='auto' or devices=6"
    )


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("size", [True, 2.0, "2", None])
def test_sizes_are_whole_numbers(axis: str, size: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(f"{axis}={size!r} must be a whole number >= 1")):
        Layout(**{axis: size})


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("size", [0, -1])
def test_sizes_are_at_least_one(axis: str, size: int) -> None:
    with pytest.raises(ValueError, match=f"{axis}={size} must be .* pass 1 not to use this axis"):
        Layout(**{axis: size})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"world_size": 0}, ValueError, "devices=0"),
        ({"world_size": True}, TypeError, "devices=True"),
        ({"world_size": 4, "pipeline": 0}, ValueError, "pipeline=0"),
        ({"world_size": 4, "tensor": 1.0}, TypeError, "tensor=1.0"),
        ({"world_size": 4, "data": 0}, ValueError, "data=0"),
        ({"world_size": 4, "data": False}, TypeError, "data=False"),
        ({"world_size": 4, "data": "all"}, ValueError, "data='all' must be .* or 'auto'"),
    ],
)
def test_resolve_checks_its_arguments(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Layout.resolve(**arguments)


def test_places_outside_of_the_mesh() -> None:
    layout = Layout(pipeline=2, data=3, tensor=1)
    for rank in (-1, 6):
        with pytest.raises(ValueError, match=f"rank={rank} .* 0 to 5 in a layout of pipeline=2 x"):
            layout.coordinates(rank)
        with pytest.raises(ValueError, match=f"rank={rank} "):
            layout.group_of(rank, "data")
    with pytest.raises(TypeError, match="rank=True"):
        layout.coordinates(True)
    for axis, place in (("pipeline", 2), ("data", 3), ("tensor", 1), ("data", -1)):
        with pytest.raises(ValueError, match=f"{axis}={place} must be a whole number from 0 to"):
            layout.rank(**{axis: place})
    with pytest.raises(TypeError, match=r"data=1\.0"):
        layout.rank(data=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("axes", [("tp",), ("data", "model"), ()])
def test_unknown_axes(axes: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"one .*'pipeline', 'data', 'tensor'"):
        Layout().groups(*axes)
    with pytest.raises(ValueError, match=r"one .*'pipeline', 'data', 'tensor'"):
        Layout().group_of(0, *axes)
