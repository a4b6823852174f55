"""The adapters in memory: who is let go, who waits, and what a changing folder does to them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from chairlift_client.errors import ConfigError, InvalidJob, ModelError
from chairlift_worker.models.adapter_shelf import AdapterShelf, NoRoom


@dataclass(frozen=True)
class Weights:
    """What the loader of these tests makes: the content of the weights file."""

    digest: str


class Loader:
    def __init__(self) -> None:
        self.loaded: list[str] = []

    def __call__(self, folder: Path) -> Weights:
        content = (folder / "adapter_model.safetensors").read_text()
        if content == "bad":
            raise ModelError("its rank is 99")
        self.loaded.append(f"{folder.name} {content}")
        return Weights(content)


def put(folder: Path, name: str, content: str = "1") -> None:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "adapter_config.json").write_text("{}")
    path = folder / name / "adapter_model.safetensors"
    path.write_text(content)
    # As if a second had gone by: some file systems do not tell two writes in a row apart.
    stamp = path.stat().st_mtime + len(content)
    os.utime(path, (stamp, stamp))


@pytest.fixture
def loader() -> Loader:
    return Loader()


@pytest.fixture
def shelf(tmp_path: Path, loader: Loader) -> AdapterShelf:
    for name in "abcd":
        put(tmp_path, name)
    return AdapterShelf(tmp_path, loader, max_held=2)


def use(shelf: AdapterShelf, name: str, order: int = 0) -> str:
    loan = shelf.borrow(name, order)
    loan.give_back()
    return loan.adapter.digest


def test_the_longest_unused_goes_first(shelf: AdapterShelf, loader: Loader) -> None:
    for name in "abacab":
        use(shelf, name)
    assert loader.loaded == ["a 1", "b 1", "c 1", "b 1"]
    assert shelf.num_held == 2


def test_what_is_in_use_stays(shelf: AdapterShelf, loader: Loader) -> None:
    first, again = shelf.borrow("a", 0), shelf.borrow("a", 1)
    for name in "bcd":
        use(shelf, name)
    first.give_back()
    first.give_back()  # once more changes nothing
    use(shelf, "b")
    use(shelf, "a")
    assert loader.loaded == ["a 1", "b 1", "c 1", "d 1", "b 1"]
    again.give_back()
    use(shelf, "c")
    use(shelf, "d")
    assert use(shelf, "a") == "1"
    assert loader.loaded[-3:] == ["c 1", "d 1", "a 1"]


def test_who_waits_for_room_is_served_before_those_who_boarded_later(shelf: AdapterShelf) -> None:
    loans = {"a": shelf.borrow("a", 0), "b": shelf.borrow("b", 1)}
    for _ in range(2):
        with pytest.raises(NoRoom):
            shelf.borrow("c", 2)
        with pytest.raises(NoRoom):  # in memory, but c would never get its turn
            shelf.borrow("a", 3)
    loans["b"].give_back()
    with pytest.raises(NoRoom):
        shelf.borrow("d", 4)
    loans["c"] = shelf.borrow("c", 2)
    loans["a again"] = shelf.borrow("a", 3)
    with pytest.raises(NoRoom):
        shelf.borrow("d", 4)
    shelf.give_up(4)
    assert use(shelf, "c", 5) == "1"


def test_other_files_are_another_adapter(shelf: AdapterShelf, tmp_path: Path, loader: Loader) -> None:
    old = shelf.borrow("a", 0)
    put(tmp_path, "a", "22")
    assert use(shelf, "a", 1) == "22"
    assert old.adapter.digest == "1"
    assert loader.loaded == ["a 1", "a 22"]


def test_what_is_no_good_is_read_once_until_it_changes(shelf: AdapterShelf, tmp_path: Path) -> None:
    put(tmp_path, "a", "bad")
    for is_known in (False, True):
        assert shelf.holds("a") == is_known
        with pytest.raises(InvalidJob, match="adapter 'a' cannot be used: its rank is 99"):
            shelf.borrow("a", 0)
    put(tmp_path, "a", "mended")
    assert use(shelf, "a") == "mended"
    assert shelf.num_held == 1


@pytest.mark.parametrize("name", ["e", "../a", ".", "..", "a/", "", "A" * 200, "a\n", "/etc"])
def test_unknown_names(shelf: AdapterShelf, name: str) -> None:
    with pytest.raises(InvalidJob, match=r"there is no adapter .*; this worker knows 4"):
        shelf.borrow(name, 0)


def test_the_folder_is_looked_at_anew(shelf: AdapterShelf, tmp_path: Path) -> None:
    put(tmp_path, "new-1.0", "hot")
    (tmp_path / "notes").mkdir()
    (tmp_path / ".hidden").mkdir()
    put(tmp_path, ".hidden")
    assert shelf.names == ["a", "b", "c", "d", "new-1.0"]
    assert not shelf.holds("new-1.0")
    assert use(shelf, "new-1.0") == "hot"
    assert shelf.holds("new-1.0")


def test_a_folder_that_is_not_there(tmp_path: Path, loader: Loader) -> None:
    with pytest.raises(ConfigError, match="adapters: no such folder"):
        AdapterShelf(tmp_path / "none", loader, max_held=1)
    gone = tmp_path / "gone"
    gone.mkdir()
    shelf = AdapterShelf(gone, loader, max_held=1)
    gone.rmdir()
    assert shelf.names == []
    with pytest.raises(InvalidJob, match="this worker knows 0"):
        shelf.borrow("a", 0)


def waiting_load(gate: threading.Event, entered: threading.Semaphore) -> Callable[[Path], Weights]:
    def load(folder: Path) -> Weights:
        entered.release()
        assert gate.wait(20)
        if folder.name == "b":
            raise ModelError("it is b")
        return Weights(folder.name)

    return load


@pytest.mark.parametrize("name", ["a", "b"])
def test_two_who_ask_at_once_wait_for_one_load(shelf: AdapterShelf, tmp_path: Path, name: str) -> None:
    gate, entered = threading.Event(), threading.Semaphore(0)
    shelf = AdapterShelf(tmp_path, waiting_load(gate, entered), max_held=1)
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(shelf.borrow, name, order) for order in range(3)]
        assert entered.acquire(timeout=20)
        assert not shelf.holds(name)
        gate.set()
        if name == "a":
            assert {one.result(20).adapter.digest for one in asked} == {"a"}
        else:
            assert all("it is b" in str(one.exception(20)) for one in asked)
    assert not entered.acquire(blocking=False), "loaded twice"
    if name == "a":
        with pytest.raises(NoRoom):
            shelf.borrow("c", 3)
        for one in asked:
            one.result().give_back()
        shelf.give_up(3)
        gate.set()
    assert shelf.borrow("c", 4).adapter.digest == "c"
