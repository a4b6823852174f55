"""A job inside the engine, as the scheduler sees it: tokens known, tokens computed.

    token_ids      [ prompt ........ | output ...... ]      all known tokens
    num_computed   [ in the cache ..... | pending .. ]      pending >= 1 while it lives

The newest token is never in the cache: computing it is what yields the next one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable: the engine adds to `token_ids`, the scheduler changes the counts."""

    job_id: str
    order: int
    """Boarding order: smaller is older, and the older goes first in everything."""
    token_ids: list[int]
    """Prompt and output together."""
    max_total_tokens: int
    """It ends at the latest when it has this many tokens."""
    num_computed: int = 0
    num_preemptions: int = 0

    @property
    def num_pending(self) -> int:
        """Known tokens whose KV is not in the cache yet."""
        return len(self.token_ids) - self.num_computed

    @property
    def max_slots(self) -> int:
        """Slots it may come to need: its last token is never computed."""
        return self.max_total_tokens - 1
