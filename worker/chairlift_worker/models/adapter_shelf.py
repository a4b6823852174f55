"""The adapters of a folder that are in memory: loaded at first use, shared, the longest unused let go first.

    place   loading ──→ held, lent n times ──→ held, lent to nobody ──→ gone, when room is needed
               └──→ gone, when it fails

There are `max_held` places. Who finds none free waits its turn, by boarding order: while somebody waits,
nobody who boarded later is served, or adapters in steady use would keep all others out for ever.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import NamedTuple

from chairlift_client.errors import ConfigError, InvalidJob, ModelError
from chairlift_worker.engine.adapter import Adapter
from chairlift_worker.models.lora_config import CONFIG_FILE
from chairlift_worker.models.lora_weights import WEIGHTS_FILE

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,95}")

_Stamp = tuple[tuple[int, int, int], ...]
"""Of the files of an adapter: other files have another one."""


class NoRoom(Exception):
    """All places have adapters in use, or are promised to who came before: come again when one is free.

    `num_changes` is the shelf's when it said so: if that has another now, one may be free already.
    """

    def __init__(self, num_changes: int) -> None:
        super().__init__("no room for another adapter")
        self.num_changes = num_changes


class _Key(NamedTuple):
    name: str
    stamp: _Stamp


class _Place:
    def __init__(self) -> None:
        self.adapter: Future[Adapter] = Future()
        self.num_loans = 0


class Loan:
    """An adapter in use; it stays until the loan is given back."""

    def __init__(self, adapter: Adapter, give_back: Callable[[], None]) -> None:
        self.adapter = adapter
        self._give_back: Callable[[], None] | None = give_back

    def give_back(self) -> None:
        """It is not used any more; telling so again changes nothing."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class AdapterShelf:
    """May be called from any thread but the engine's. Its folder may change at any time."""

    def __init__(self, folder: Path, load: Callable[[Path], Adapter], *, max_held: int) -> None:
        """`load` reads one adapter; it raises ModelError. ConfigError if there is no such folder."""
        if not folder.is_dir():
            raise ConfigError(f"adapters: no such folder: {folder}")
        self._folder = folder
        self._load = load
        self._max_held = max_held
        self._lock = threading.Lock()
        self._places: OrderedDict[_Key, _Place] = OrderedDict()  # the last lent at the end
        self._refused: dict[str, tuple[_Stamp, str]] = {}
        self._waiting: set[int] = set()
        self.num_changes = 0
        """Times that somebody who was told NoRoom might have been told otherwise after."""

    @property
    def names(self) -> list[str]:
        """All that the folder has just now, sorted; none if it is gone."""
        try:
            return sorted(path.name for path in self._folder.iterdir() if self._is_adapter(path))
        except OSError:
            return []

    @property
    def num_held(self) -> int:
        """Adapters in memory."""
        return len(self._places)

    def holds(self, name: str) -> bool:
        """Whether `borrow` would not have to load it, be it that it is there or that it is no good."""
        key = self._find(name)
        with self._lock:
            place = self._places.get(key)
            known_bad = self._refused.get(name, (None, ""))[0] == key.stamp
        return known_bad or (place is not None and place.adapter.done())

    def borrow(self, name: str, order: int) -> Loan:
        """The adapter, loaded if need be. `order` is the place in the boarding order.

        InvalidJob if there is none of this name, or if it cannot be used. NoRoom: come again with the same
        order, or tell `give_up`.
        """
        key = self._find(name)
        stamp, problem = self._refused.get(name, (None, ""))
        if stamp == key.stamp:
            raise InvalidJob(problem)
        place, is_new = self._take_place(key, order)
        if is_new:
            self._fill(place, key)
        try:
            return Loan(place.adapter.result(), partial(self._give_back, place))
        except ModelError as error:
            raise InvalidJob(str(error)) from None

    def give_up(self, order: int) -> None:
        """Who was told NoRoom does not come again."""
        with self._lock:
            self._stop_waiting(order)

    def _give_back(self, place: _Place) -> None:
        with self._lock:
            place.num_loans -= 1
            self.num_changes += 1

    def _stop_waiting(self, order: int) -> None:
        if order in self._waiting:
            self._waiting.remove(order)
            self.num_changes += 1

    def _find(self, name: str) -> _Key:
        path = self._folder / name
        if not (_NAME.fullmatch(name) and self._is_adapter(path)):
            raise InvalidJob(f"there is no adapter {name!r}; this worker knows {len(self.names)}")
        return _Key(name, tuple(_stamp(path / file) for file in (CONFIG_FILE, WEIGHTS_FILE)))

    def _is_adapter(self, path: Path) -> bool:
        return _NAME.fullmatch(path.name) is not None and (path / CONFIG_FILE).is_file()

    def _take_place(self, key: _Key, order: int) -> tuple[_Place, bool]:
        """Lent already; True if it has to be filled."""
        with self._lock:
            place = self._places.get(key)
            is_new = place is None
            if any(other < order for other in self._waiting) or (is_new and not self._make_room()):
                self._waiting.add(order)
                raise NoRoom(self.num_changes)
            self._stop_waiting(order)
            place = self._places[key] = place or _Place()
            self._places.move_to_end(key)
            place.num_loans += 1
            return place, is_new

    def _make_room(self) -> bool:
        if len(self._places) < self._max_held:
            return True
        unused = next((key for key, place in self._places.items() if not place.num_loans), None)
        if unused is None:
            return False
        del self._places[unused]
        log.info("adapter %s is let go", unused.name)
        return True

    def _fill(self, place: _Place, key: _Key) -> None:
        try:
            place.adapter.set_result(self._load(self._folder / key.name))
            log.info("adapter %s is loaded", key.name)
        except BaseException as error:
            with self._lock:
                del self._places[key]
                self.num_changes += 1
                if isinstance(error, ModelError):
                    problem = f"adapter {key.name!r} cannot be used: {error}"
                    self._refused[key.name] = (key.stamp, problem)
                    log.warning("%s", problem)
                    error = ModelError(problem)
            place.adapter.set_exception(error)


def _stamp(path: Path) -> tuple[int, int, int]:
    """Changes with the file; of one that is not there (yet) too."""
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return found.st_mtime_ns, found.st_size, found.st_ino
