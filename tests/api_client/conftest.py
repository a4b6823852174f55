"""Fixtures for tests of the protocol's functions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from protocol_driver import Driver
from servers import Server


@pytest.fixture
def driver(server: Server, namespace: str) -> Iterator[Driver]:
    """A fresh partition on the shared server."""
    with server.client() as client:
        driver = Driver(client, namespace)
        driver.load()
        yield driver
