"""Fixtures that all tests share: a real server of each flavour per session, a namespace per test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from servers import ClusterServers, Flavour, Server, available_flavours

os.environ.setdefault("OMP_NUM_THREADS", "1")

# What a busy machine makes slow is no fault of a test.
settings.register_profile("chairlift", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("chairlift")

FLAVOURS: list[Flavour] = available_flavours() or ["valkey"]


@pytest.fixture(scope="session", params=FLAVOURS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A running server, once per flavour. Shared by all tests: never stop it, never flush it."""
    with Server(request.param) as running:
        yield running


@pytest.fixture
def redis_url(server: Server) -> str:
    """Where the shared server listens."""
    return server.url


@pytest.fixture(scope="session", params=FLAVOURS)
def cluster(request: pytest.FixtureRequest) -> Iterator[ClusterServers]:
    """A running cluster of three primaries, once per flavour, since it takes seconds to come together."""
    with ClusterServers(request.param) as running:
        yield running


@pytest.fixture(params=FLAVOURS)
def flavour(request: pytest.FixtureRequest) -> Flavour:
    """For tests that start servers of their own."""
    chosen: Flavour = request.param
    return chosen


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test uses."""
    return f"t-{os.urandom(8).hex()}"
