"""A job inside the engine, as the scheduler sees it: tokens known, tokens computed.

    token_ids      [ prompt ........ | output ...... ]      all known tokens
    num_computed   [ in the cache ..... | pending .. ]      pending >= 1 while it lives

The newest token is never in the cache: computing it is what yields the next one.
"""

from __future__ import annotations

from dataclasses import dataclass

from chairlift_worker.engine.adapter import Adapter
from chairlift_worker.engine.prefix import PrefixHashes


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable: the engine adds to `token_ids`, the scheduler changes the counts."""

    job_id: str
    order: int
    """Boarding order: smaller is older. Of those due at the same time, the older goes first."""
    token_ids: list[int]
    """Prompt and output together."""
    max_total_tokens: int
    """It ends at the latest when it has this many tokens."""
    num_prompt: int = 0
    """Of its tokens, those that are not output; all that it begins with where nothing is said."""
    due_ms: int = 0
    """The earlier due goes first in everything; see `due`."""
    prefix: PrefixHashes | None = None
    """Its chain of hashes; None keeps it out of the prefix cache."""
    source: Sequence | None = None
    """One that begins alike (see `Scheduler.fork`); let go of when this one boards."""
    num_computed: int = 0
    num_cached: int | None = None
    """Tokens that it found computed when it first boarded."""
    num_preemptions: int = 0
    logits_from: int | None = None
    """Every token from this position on needs its logits, and not just the newest one: what asks for them
    must be computed, and cannot come out of a prefix cache."""
    adapter: Adapter | None = None

    def __post_init__(self) -> None:
        self.num_prompt = self.num_prompt or len(self.token_ids)

    @property
    def rank(self) -> tuple[int, int]:
        """Its place in the order: smaller goes first."""
        return self.due_ms, self.order

    @property
    def num_output(self) -> int:
        """Known tokens that are output."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Known tokens whose KV is not in the cache yet."""
        return len(self.token_ids) - self.num_computed

    def num_logits(self, end: int) -> int:
        """Rows of logits that a chunk ending before position `end` has to yield: always its last ones."""
        newest = 1 if end == len(self.token_ids) else 0
        if self.logits_from is None:
            return newest
        return max(newest, end - max(self.num_computed, self.logits_from))

    @property
    def max_slots(self) -> int:
        """Slots it may come to need: its last token is never computed."""
        return self.max_total_tokens - 1
