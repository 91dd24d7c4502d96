"""Several real fits in one process, taking turns step by step."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping

Pause = Callable[[], None]


class Runner:
    """A fit in a thread of its own, which runs only while it holds the baton.

    Args:
        fit: Runs the fit and calls what it is given where a step begins. A step lasts from one
            such call to the next, so it takes in every hook and the loop's own work.
    """

    def __init__(self, fit: Callable[[Pause], None]) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.finished = False
        self._fit = fit
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._began: tuple[float, float] | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._body, daemon=True)
        self._thread.start()

    def turn(self) -> None:
        """Let the fit run until its next step begins or the fit ends."""
        self._go.release()
        self._back.acquire()
        if self._error is not None:
            raise RuntimeError("a fit failed") from self._error

    def _pause(self) -> None:
        now = time.perf_counter(), time.process_time()
        if self._began is not None:
            self.wall.append(now[0] - self._began[0])
            self.cpu.append(now[1] - self._began[1])
        self._back.release()
        self._go.acquire()
        self._began = time.perf_counter(), time.process_time()

    def _body(self) -> None:
        self._go.acquire()
        try:
            self._fit(self._pause)
        except BaseException as error:
            self._error = error
        self.finished = True
        self._back.release()


def alternate(
    fits: Mapping[str, Callable[[Pause], None]], steps: int, warmup: int, seed: int = 0
) -> dict[str, Runner]:
    """Run all fits to their end, a step of each in turn.

    Every second round takes the order of the one before backwards, so that each fit comes before
    each other as often as after it.

    Args:
        fits: The fits by name; each must begin `warmup + steps + 1` steps.
        steps: Timed steps of each.
        warmup: Steps of each that are run first and not kept.
        seed: Of the random orders. Default: 0.

    Returns:
        The finished runners by name, with the last `steps` steps as `wall` and `cpu` seconds.
    """
    runners = {name: Runner(fit) for name, fit in fits.items()}
    order, generator = list(runners.values()), random.Random(seed)
    generator.shuffle(order)
    for runner in order:
        runner.turn()
    for i in range(warmup + steps):
        if i % 2:
            order.reverse()
        else:
            generator.shuffle(order)
        for runner in order:
            runner.turn()
    for runner in order:
        while not runner.finished:
            runner.turn()
        runner.wall, runner.cpu = runner.wall[warmup:][:steps], runner.cpu[warmup:][:steps]
    return runners
