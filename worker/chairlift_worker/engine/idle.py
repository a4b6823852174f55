"""Blocks that nobody owns but whose content may be wanted again, and which of them goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class IdleBlocks:
    """Least recently used goes first.

    A sequence gives its blocks back from the end, so that among its own the later ones go first: a
    block is of no use once one before it is gone.
    """

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def add(self, block: int) -> None:
        """Its last owner has left it."""
        self._blocks[block] = None

    def discard(self, block: int) -> None:
        """It has an owner again, or its content is not to be used any more."""
        self._blocks.pop(block, None)

    def pop(self) -> int:
        """The block whose content is least likely to be wanted again."""
        return self._blocks.popitem(last=False)[0]
