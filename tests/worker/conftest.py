"""One process that forks all workers of the whole-lift tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fleet import Fleet


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Workers in milliseconds; what a test leaves running is killed in the end."""
    with Fleet(tmp_path_factory.mktemp("fleet")) as running:
        yield running
