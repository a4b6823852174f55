"""Work in a process of its own: it is killed in time, and knows no secrets."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from chairlift_worker.apart import ApartBusyError, ApartError, run_apart

SHOW = "import json, os, sys; print(json.dumps([sys.stdin.read(), list(os.environ)]))"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Modules in here can be run."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_it_sees_its_input_and_no_secret(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAIRLIFT_REDIS_URL", "redis://:hunter2@localhost")
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    (folder / "show.py").write_text(SHOW)
    given, names = msgspec.json.decode(run_apart("show", b"data", 20.0), type=tuple[str, list[str]])
    assert given == "data"
    assert "PATH" in names
    assert {"CHAIRLIFT_REDIS_URL", "HF_TOKEN"}.isdisjoint(names)


def test_it_imports_nothing_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stray.py").write_text("print('imported')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ApartError, match="ended with status 1"):
        run_apart("stray", b"", 20.0)


def test_it_is_killed_when_its_time_is_over(folder: Path) -> None:
    (folder / "endless.py").write_text(
        "from chairlift_worker.apart import serve_apart\n"
        "def work(data):\n    while True: pass\n"
        "serve_apart(work)"
    )
    with pytest.raises(ApartError, match=r"not done after 0\.5 s of computing"):
        run_apart("endless", b"", 0.5)


def test_a_machine_without_time_is_not_the_inputs_fault(folder: Path) -> None:
    (folder / "starved.py").write_text("import time; time.sleep(60)")
    with pytest.raises(ApartBusyError, match=r"had no 0\.02 s of computing within 0\.3 s"):
        run_apart("starved", b"", 0.02)


def test_its_memory_is_bounded(folder: Path) -> None:
    (folder / "greedy.py").write_text(
        "from chairlift_worker.apart import serve_apart\nserve_apart(lambda data: bytes(3 << 30))"
    )
    with pytest.raises(ApartError, match="ended with status 1"):
        run_apart("greedy", b"", 20.0)
