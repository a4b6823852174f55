"""What a container platform sees of a worker."""

from __future__ import annotations

from pathlib import Path

from chairlift_worker.probes import Probes
from running_worker import running_worker
from servers import until


def exists(file: Path) -> bool:
    return file.exists()


async def test_the_life_of_both_files(redis_url: str, namespace: str, tmp_path: Path) -> None:
    ready, alive = tmp_path / "ready", tmp_path / "alive"
    ready.touch()
    alive.touch()
    async with running_worker(redis_url, namespace, ready_file=str(ready), alive_file=str(alive)) as worker:
        assert not exists(ready), "an earlier process was ready, not this one"

        async def is_up() -> bool:
            return exists(ready) and exists(alive)

        await until(is_up)
        before = alive.stat().st_mtime_ns

        async def was_touched() -> bool:
            return alive.stat().st_mtime_ns > before

        await until(was_touched)
        worker.drain()
        assert not exists(ready)
    assert not exists(alive)


def test_a_worker_that_hangs_is_not_touched(tmp_path: Path) -> None:
    ready, alive = tmp_path / "ready", tmp_path / "alive"
    is_well = True
    probes = Probes(str(ready), str(alive), is_ready=lambda: True, is_alive=lambda: is_well)
    probes.update()
    before = alive.stat().st_mtime_ns
    is_well = False
    probes.update()
    assert alive.stat().st_mtime_ns == before
    assert exists(ready)
    probes.remove()
    assert not exists(ready)
    assert not exists(alive)


def test_no_files_unless_asked_for() -> None:
    probes = Probes("", "", is_ready=lambda: True, is_alive=lambda: True)
    probes.update()
    probes.remove()
