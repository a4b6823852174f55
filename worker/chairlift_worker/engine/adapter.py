"""Weights of a job's own on top of the model's, as the engine sees them: something with a name."""

from __future__ import annotations

from typing import Protocol


class Adapter(Protocol):
    """Made and understood by the runner; the engine hands it from the request to the chunks."""

    @property
    def digest(self) -> str:
        """Stands for everything that it changes: two with the same digest are interchangeable."""
        ...
