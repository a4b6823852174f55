"""The recipes of docs/operations.md: users that see one namespace only, and TLS."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.exceptions import NoPermissionError

from chairlift_client import Client, SamplingParams, ServerUnavailable, ServerUnsupported
from running_worker import running_worker
from servers import Flavour, Server, find_binary, free_port

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
SHORT = SamplingParams(max_tokens=5, temperature=0.0)


def _acl_rules() -> list[str]:
    """The ACL lines of the page, as an operator would paste them."""
    return re.findall(r"^    (ACL SETUSER .+)$", OPERATIONS.read_text(), re.M)


@pytest.fixture
def guarded(flavour: Flavour) -> Iterator[Server]:
    with Server(flavour) as server:
        admin = server.client()
        for rule in _acl_rules():
            assert admin.execute_command(*rule.split()) == b"OK"
        yield server


def _url(server: Server, user: str) -> str:
    return f"redis://{user}:change-me@127.0.0.1:{server.port}/0"


async def test_worker_and_producer_live_inside_their_namespace(guarded: Server) -> None:
    async with (
        running_worker(_url(guarded, "prod-worker"), "prod", partitions=2),
        Client(_url(guarded, "prod-app"), namespace="prod") as client,
    ):
        result = await client.generate(model="tiny", prompt="Once", sampling=SHORT, allow_unknown_model=True)
    assert result.usage.output_tokens == 5


async def test_another_namespace_is_closed(guarded: Server) -> None:
    async with Client(_url(guarded, "prod-app"), namespace="staging") as client:
        with pytest.raises(ServerUnsupported, match="does not permit"):
            await client.submit(model="tiny", prompt="Once", allow_unknown_model=True)


def test_the_users_cannot_flush(guarded: Server) -> None:
    for user in ("prod-worker", "prod-app"):
        connection = guarded.client()
        connection.execute_command("AUTH", user, "change-me")
        for command in ("FLUSHALL", "CONFIG GET *", "KEYS *", "SHUTDOWN", "FUNCTION FLUSH"):
            with pytest.raises(NoPermissionError):
                connection.execute_command(*command.split())


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, crt = folder / "server.key", folder / "server.crt"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(crt)],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return key, crt


async def test_tls(certificate: tuple[Path, Path]) -> None:
    if find_binary("redis") is None:
        pytest.skip("the embedded Valkey is built without TLS, and redis-server is not installed")
    key, crt = certificate
    port = free_port()
    options = ("--tls-port", f"{port}", "--tls-cert-file", f"{crt}", "--tls-key-file", f"{key}")
    with Server("redis", *options, "--tls-ca-cert-file", f"{crt}", "--tls-auth-clients", "no"):
        url = f"rediss://localhost:{port}?ssl_ca_certs={crt}"
        async with running_worker(url, "tls"), Client(url, namespace="tls") as client:
            await client.generate(model="tiny", prompt="Once", sampling=SHORT, allow_unknown_model=True)
        with pytest.raises(ServerUnavailable, match="certificate"):
            await Client(f"rediss://localhost:{port}", retry_s=60).open()
