"""An error on one rank, said on all: nobody waits for a rank that will never come."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_ext import _torch

_KEY = "lightning_ext/error"
_PATIENCE = 5.0  # seconds for which an error waits to be read
_HEARSAY = 2.0  # seconds for which one whose connection broke looks for the reason
_LONGEST = 4000  # characters of a message

Method = TypeVar("Method", bound=Callable[..., Any])


class Faults:
    """Tells the other ranks of an error here, and looks for theirs.

    A rank that fails writes down why in the store of the process group, then shuts its connections
    to the others: gloo has no other way to wake those that wait for it. Their own calls fail, they
    find the reason, and do the same.
    """

    _ended: Any = None  # the store of a process group whose connections are shut

    def __init__(self) -> None:
        self.rank, self.world, self.place = 0, 1, ""
        self.failed = False
        self._sockets: dict[int, int] = {}
        self._store: Any = None

    def ready(self, rank: int, world: int, place: str) -> None:
        """The process group is there.

        Args:
            rank: Of this process.
            world: Number of processes.
            place: Of this rank, in words.
        """
        self.rank, self.world, self.place = rank, world, place
        self.failed = False
        self._store = _torch.default_store()
        if rank == 0:
            self._store.delete_key(_KEY)
            self._store.delete_key(f"{_KEY}/read")

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """What is opened in here are connections to other ranks.

        Raises:
            RuntimeError: Those that there are have been closed, as an earlier run has failed.
        """
        if dist.is_initialized() and _torch.default_store() is Faults._ended:
            raise RuntimeError(
                "an earlier run has failed, and its connections are closed; start the processes "
                "again"
            )
        before = _open_sockets()
        yield
        self._sockets |= dict(_open_sockets().items() - before.items())

    @contextmanager
    def shared(self) -> Iterator[None]:
        """What is raised in here is raised on all ranks.

        Raises:
            RuntimeError: Another rank has failed.
        """
        try:
            yield
        except StopIteration:  # Lightning's way to end a loop
            raise
        except Exception as error:
            if (reason := self.tell(error)) is not None:
                raise RuntimeError(reason) from error
            raise

    def tell(self, error: BaseException) -> str | None:
        """Tell the others of an error, once.

        Returns:
            The reason, if it is the error of another rank.
        """
        if self.failed or self.world == 1 or self._store is None:
            return None
        self.failed, Faults._ended = True, self._store
        reason, first = None, False
        try:
            if _lost_connection(error):
                reason = self._heard()
            else:
                _explain(error)
                what = f"rank {self.rank} ({self.place}): {_in_words(error)}"
                found = self._store.compare_set(_KEY, "", what[:_LONGEST])
                first = found.decode() == what[:_LONGEST]
            self._shut()
            self._linger(first or self.rank == 0)
        except RuntimeError:  # the process that holds the store is gone
            self._shut()
        return reason

    def _heard(self) -> str | None:
        end = time.monotonic() + _HEARSAY
        while time.monotonic() < end:
            if self._store.check([_KEY]):
                return str(self._store.get(_KEY).decode())
            time.sleep(0.02)
        return None

    def _linger(self, wait: bool) -> None:
        """Stay until the others have read the reason: launchers end all when one has ended."""
        read = self._store.add(f"{_KEY}/read", 1)
        end = time.monotonic() + _PATIENCE
        while wait and read < self.world and time.monotonic() < end:
            time.sleep(0.02)
            read = self._store.add(f"{_KEY}/read", 0)

    def _shut(self) -> None:
        store = self._store
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        keep = getattr(store, "port", None)
        for number, identity in self._sockets.items():
            _shut(number, identity, keep)
        self._sockets.clear()


def guarded(method: Method) -> Method:
    """Share what a method raises, by the `faults` of its object."""

    @wraps(method)
    def shared(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.faults.shared():
            return method(self, *args, **kwargs)

    return shared  # type: ignore[return-value]


def _in_words(error: BaseException) -> str:
    try:
        said = str(error).strip()
    except Exception:  # of the user's own class
        said = "(its message cannot be read)"
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {said}{notes}"


def _explain(error: BaseException) -> None:
    """Say what torch cannot know: why a tensor has no memory, or is a piece."""
    if not isinstance(error, RuntimeError):
        return
    said = _in_words(error).lower()
    if "meta" in said.split():
        error.add_note(
            "parameters and buffers of other stages have no values here (they are on the meta "
            "device); use them inside the parts of the pipelined module, not around its call"
        )
    elif "mixed torch.tensor and dtensor" in said:
        error.add_note(
            "parameters that tensor= splits are DTensors, which do not mix with others; use them "
            "inside their own modules, or keep them whole with tensor_plan={...: 'replicate'}"
        )


def _lost_connection(error: BaseException) -> bool:
    """Whether an error may be that of another rank. Gloo's own are plain RuntimeErrors."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and "gloo" in str(error).lower()


def _open_sockets() -> dict[int, int]:
    """Sockets of this process, by number: what tells them apart when a number is used again."""
    folder, found = Path("/dev/fd"), {}
    if not folder.is_dir():  # no such list on this system: others see the end of the process
        return {}
    for name in os.listdir(folder):
        try:
            status = os.fstat(int(name))
        except OSError:  # the list itself
            continue
        if stat.S_ISSOCK(status.st_mode):
            found[int(name)] = status.st_ino
    return found


def _shut(number: int, identity: int, keep: int | None) -> None:
    """Shut a connection, unless it belongs to the store, which listens on port `keep`."""
    try:
        own = os.dup(number)  # gloo may close it at any time, and something else take its number
    except OSError:
        return
    if os.fstat(own).st_ino != identity:
        os.close(own)
        return
    with socket.socket(fileno=own) as connection:
        try:
            ports = connection.getsockname()[1], connection.getpeername()[1]
            if keep not in ports:
                connection.shutdown(socket.SHUT_RDWR)
        except (OSError, IndexError):  # it listens, is closed, or is none of the network
            pass
