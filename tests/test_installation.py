"""What `pip install` of the client alone brings, and what it says of the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_ALWAYS_THERE = {"pip", "setuptools", "wheel"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a fresh environment with nothing but `pip install .`."""
    folder = tmp_path_factory.mktemp("client")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin" / "pip", "install", "--quiet", ROOT], check=True)
    return folder / "bin"


def output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout


def test_client_brings_msgspec_and_redis_and_what_these_need(client_only: Path) -> None:
    listed = json.loads(output(client_only / "pip", "list", "--format", "json"))
    names = {package["name"].lower() for package in listed} - _ALWAYS_THERE
    shown = output(client_only / "pip", "show", "redis", "msgspec")
    needs = {
        name.strip().lower()
        for line in shown.splitlines()
        if line.startswith("Requires:")
        for name in line.removeprefix("Requires:").split(",")
    }
    assert {"chairlift", "msgspec", "redis"} <= names
    assert names - {"chairlift", "msgspec", "redis"} <= needs


def test_client_imports_and_refuses_like_the_full_one(client_only: Path) -> None:
    script = "import chairlift_client as c; print(c.SamplingParams(max_tokens=3).max_tokens)"
    assert output(client_only / "python", "-c", script) == "3\n"


def refusal(*command: str | Path) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr
    return ran.stderr


def test_the_command_line_names_the_extra_that_it_lacks(client_only: Path) -> None:
    assert "chairlift[cli]" in refusal(client_only / "chairlift", "submit", "--help")
    assert "chairlift[worker]" in refusal(client_only / "chairlift", "worker", "--help")


@pytest.fixture(scope="module")
def with_commands(client_only: Path) -> Path:
    """The same environment with [cli] on top: runs after the tests of the client alone."""
    subprocess.run([client_only / "pip", "install", "--quiet", f"{ROOT}[cli]"], check=True)
    return client_only


def test_commands_name_the_extras_that_they_lack(with_commands: Path) -> None:
    chairlift = with_commands / "chairlift"
    assert "--model" in output(chairlift, "submit", "--help")
    assert "chairlift[worker]" in refusal(chairlift, "worker", "--model", "m")
    assert "chairlift[demo]" in refusal(chairlift, "demo")
