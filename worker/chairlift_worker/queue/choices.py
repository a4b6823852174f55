"""What is known of a job's choices: from its log, and from what the engine has said since."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from chairlift_client.protocol import (
    Choice,
    ChoiceDelta,
    FinishReason,
    LoggedEvent,
    SamplingParams,
    TokenLogprobs,
    Tokens,
)


class ChoiceRecord:
    """One output, as its deltas told it."""

    __slots__ = ("finish_reason", "logprobs", "stop_reason", "texts", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    def hear(self, delta: ChoiceDelta) -> None:
        """Add one delta."""
        self.token_ids.extend(delta.token_ids)
        self.texts.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    @property
    def mean_logprob(self) -> float:
        """By which `best_of` ranks; 0 without tokens."""
        total = sum(entry.logprob for entry in self.logprobs)
        return total / len(self.logprobs) if self.logprobs else 0.0


class ChoiceRecords:
    """All outputs of a job, by index."""

    def __init__(self, events: Iterable[LoggedEvent]) -> None:
        tokens = [event for event in events if isinstance(event, Tokens)]
        has_candidates = any(event.candidates for event in tokens)
        self._records: dict[int, ChoiceRecord] = {}
        self.best_is_told = has_candidates and any(event.choices for event in tokens)
        """The log says already which candidates are kept."""
        for event in tokens:
            for delta in event.candidates if has_candidates else event.choices:
                self.hear(delta)

    def hear(self, delta: ChoiceDelta) -> None:
        """Add one delta to its choice."""
        self._records.setdefault(delta.index, ChoiceRecord()).hear(delta)

    def has_news(self, delta: ChoiceDelta) -> bool:
        """Whether the delta says anything that is not known."""
        record = self._records.get(delta.index)
        is_end = delta.finish_reason is not None and (record is None or record.finish_reason is None)
        return bool(delta.token_ids or delta.text or is_end)

    @property
    def token_ids(self) -> tuple[tuple[int, ...], ...]:
        """The output tokens of every choice up to the last that has any."""
        num_known = max(self._records, default=-1) + 1
        known = (self._records.get(index) for index in range(num_known))
        return tuple(() if record is None else tuple(record.token_ids) for record in known)

    @property
    def num_tokens(self) -> int:
        """Output tokens of all choices."""
        return sum(len(record.token_ids) for record in self._records.values())

    def are_complete(self, sampling: SamplingParams) -> bool:
        """Whether every choice has ended."""
        ended = sum(record.finish_reason is not None for record in self._records.values())
        return ended == sampling.num_choices

    def kept(self, sampling: SamplingParams) -> tuple[Choice, ...]:
        """The result's choices: all of them, or with `best_of` the best, the best one first."""
        records: Seq[ChoiceRecord] = [self._records[index] for index in sorted(self._records)]
        if sampling.best_of is not None:
            # Stable: of equals the earlier one goes first.
            records = sorted(records, key=lambda record: -record.mean_logprob)[: sampling.n]
        return tuple(_choice(index, record, sampling) for index, record in enumerate(records))


def _choice(index: int, record: ChoiceRecord, sampling: SamplingParams) -> Choice:
    assert record.finish_reason is not None
    return Choice(
        index=index,
        text="".join(record.texts),
        token_ids=tuple(record.token_ids),
        finish_reason=record.finish_reason,
        stop_reason=record.stop_reason,
        logprobs=None if sampling.logprobs is None else tuple(record.logprobs),
    )
