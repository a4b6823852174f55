"""The files for Docker say what they should, and every command that they run exists."""

from __future__ import annotations

import asyncio
import re
import shlex
import socket
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import entry_points
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from chairlift_client import calls, keys
from chairlift_client.connection import Shards
from chairlift_client.worker_operations import announce
from chairlift_worker.config import WorkerConfig

ROOT = Path(__file__).parents[1]
COMPOSE = [ROOT / "docker-compose.yml", ROOT / "deploy" / "compose.gpu.yml"]


def services() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(COMPOSE[0].read_text())
    found: dict[str, Any] = document["services"]
    return found


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def tool(name: str) -> str:
    return str(Path(sys.executable).parent / name)


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_compose_file_follows_the_schema(path: Path) -> None:
    checked = run(tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(path))
    assert checked.returncode == 0, checked.stdout


def test_compose_schema_check_can_fail(tmp_path: Path) -> None:
    (tmp_path / "c.yml").write_text("services: {redis: {imag: redis}}\n")
    checked = run(
        tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(tmp_path / "c.yml")
    )
    assert "imag" in checked.stdout


def test_dockerfile_passes_the_linter() -> None:
    checked = run(tool("hadolint"), "--failure-threshold", "style", str(ROOT / "Dockerfile"))
    assert (checked.returncode, checked.stdout) == (0, "")


def torch_arguments(**build_arguments: str) -> subprocess.CompletedProcess[str]:
    """What pip is told where the image gets its torch."""
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", "").splitlines()
    (command,) = (line.removeprefix("RUN ") for line in lines if line.startswith("RUN case"))
    script = f'pip() {{ printf "%s\\n" "$@"; }}\n{command}'
    return subprocess.run(
        ["sh", "-uc", script], env=build_arguments, capture_output=True, text=True, check=False
    )


def test_torch_comes_from_another_index_only_where_one_is_given() -> None:
    ordinary = ["install", "torch", "--constraint", "constraints.txt"]
    index = ["--index-url", "https://index.example/a b"]
    assert torch_arguments(TORCH="cuda", TORCH_CPU_INDEX=index[1]).stdout.splitlines() == ordinary
    assert torch_arguments(TORCH="cpu", TORCH_CPU_INDEX="").stdout.splitlines() == ordinary
    assert torch_arguments(TORCH="cpu", TORCH_CPU_INDEX=index[1]).stdout.splitlines() == ordinary + index
    refused = torch_arguments(TORCH="rocm", TORCH_CPU_INDEX="")
    assert (refused.returncode, refused.stderr) == (1, "TORCH is 'rocm', should be cuda or cpu\n")


def test_build_arguments_of_the_compose_files_exist() -> None:
    declared = set(re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
    for path in COMPOSE:
        assert set(yaml.safe_load(path.read_text())["services"]["worker"]["build"]["args"]) <= declared


def test_commands_of_the_compose_file_exist() -> None:
    known = {entry.name for entry in entry_points(group="chairlift.commands")}
    commands = {name: service["command"][0] for name, service in services().items() if name != "redis"}
    assert commands == {"worker": "worker", "producer": "submit"}
    for command in commands.values():
        shown = run(tool("chairlift"), command, "--help")
        assert shown.returncode == 0, shown.stderr
    assert "worker" in known


def test_the_producer_uses_flags_that_submit_has() -> None:
    check_flags(services()["producer"]["command"])


def test_commands_in_the_documentation_exist_with_their_flags() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    written = [
        command
        for page in pages
        for command in re.findall(r"(?:`|\n *)chairlift ([^`\n]+)", page.read_text())
    ]
    assert len(written) >= 10
    for command in written:
        check_flags(shlex.split(command, comments=True))


def test_links_in_the_documentation_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text())]
    assert len(links) >= 5
    assert [(page.name, link) for page, link in links if not (page.parent / link).is_file()] == []


def check_flags(command: Sequence[str]) -> None:
    """A command of ours exists and knows every flag that is given."""
    names = list(takewhile(lambda word: not word.startswith("-"), command))
    shown = run(tool("chairlift"), *names, "--help")
    assert shown.returncode == 0, (command, shown.stderr)
    flags = {word for word in command if word.startswith("--")}
    assert flags <= {"--help", *re.findall(r"--[a-z-]+", shown.stdout)}, command


def test_environment_of_the_worker_is_made_of_settings() -> None:
    fields = {field.name for field in msgspec.structs.fields(WorkerConfig)}
    environment = services()["worker"]["environment"]
    assert {name.removeprefix("CHAIRLIFT_").lower() for name in environment} <= fields


def test_drain_fits_into_the_grace_period_of_the_container() -> None:
    worker = services()["worker"]
    assert float(worker["environment"]["CHAIRLIFT_GRACE_S"]) < float(worker["stop_grace_period"].rstrip("s"))


def test_redis_is_kept_on_disk_and_evicts_nothing() -> None:
    command = services()["redis"]["command"]
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert options["--appendonly"] == "yes"
    assert options["--maxmemory-policy"] == "noeviction"
    assert "--appendfsync" in options


def test_every_dependency_is_pinned_exactly_and_explained() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(line.count("==") == 1 and "+" not in line and "/" not in line for line in lines)
    pinned = {_normal(line.partition("==")[0]) for line in lines}
    names = {_normal(requirement) for requirement in requirements()} - {"chairlift"}
    assert names - pinned == set()
    explained = (ROOT / "docs" / "dependencies.md").read_text().replace("_", "-")
    assert [name for name in names if not re.search(rf"^\|.*\b{name}\b.*\|", explained, re.MULTILINE)] == []


def requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *chain(*project["optional-dependencies"].values())]


def _normal(requirement: str) -> str:
    name = requirement
    for stop in ";[<>=~ ":
        name = name.partition(stop)[0]
    return name.lower().replace("_", "-")


def health(redis_url: str, namespace: str) -> tuple[int, str]:
    return health_with(CHAIRLIFT_REDIS_URL=redis_url, CHAIRLIFT_NAMESPACE=namespace)


def health_with(**environment: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "chairlift_worker.health"]
    checked = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return checked.returncode, checked.stdout.strip()


def test_health_reads_the_workers_table_of_the_configuration_file(redis_url: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f'model = "m"\n[worker]\nredis_url = "{redis_url}"\nlease_s = 3.0\n')
    assert health_with(CHAIRLIFT_CONFIG=str(path)) == (1, f"no live worker on {socket.gethostname()}")
    path.write_text("[worker]\nlease = 3.0\n")
    code, said = health_with(CHAIRLIFT_CONFIG=str(path))
    assert (code, "did you mean `lease_s`?" in said) == (1, True)


def test_health_says_no_without_a_worker(redis_url: str, namespace: str) -> None:
    assert health(redis_url, namespace) == (1, f"no live worker on {socket.gethostname()}")


async def test_health_says_yes_with_a_heartbeat_from_this_host(redis_url: str, namespace: str) -> None:
    shared = keys.shared(namespace)
    async with await Shards.open(redis_url) as shards:
        for worker_id, host in (("here-1", socket.gethostname()), ("there-1", "elsewhere")):
            beat = announce(
                shared,
                worker_id,
                60_000,
                "m",
                "f",
                partitions=1,
                context_tokens=8,
                pool_tokens=8,
                heartbeat={"host": host},
            )
            await calls.run(shards.shard_of(shared).redis, beat)
    assert await asyncio.to_thread(health, redis_url, namespace) == (0, "here-1")


def test_health_is_one_line_when_redis_is_away(tmp_path: Path) -> None:
    code, said = health(f"unix://{tmp_path}/none", "default")
    assert code == 1
    assert len(said.splitlines()) == 1
