"""The merge of live channel and log: whatever is lost, repeated or rewound, one clean sequence."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift_client.errors import LogRewound
from chairlift_client.merge import LogChanged, LogEntry, LogNeeded, Merger
from chairlift_client.protocol import (
    ChoiceDelta,
    Finished,
    FinishReason,
    LoggedEvent,
    Resumed,
    Started,
    TokenLogprobs,
    Tokens,
    Usage,
    encode,
)

VOCABULARY = ["a", "b", "é", " the", "", "漢", "!"]


class Log:
    """The event log of a job on a server. The epoch also stands for the clock."""

    def __init__(self, token_ids: list[int], num_choices: int) -> None:
        self.events: list[LoggedEvent] = []
        self._token_ids = token_ids
        self._num_choices = num_choices
        self._done = 0
        self._epoch = 0

    def begin(self) -> None:
        """Another attempt."""
        self._epoch += 1
        kind = Started if not self.events else Resumed
        self.events.append(kind(len(self.events) + 1, self._epoch, self._epoch))

    def generate(self, num_tokens: int) -> None:
        """One event, with up to this many tokens of each choice; nothing when all are there."""
        if self._done == len(self._token_ids):
            return
        start, end = self._done, min(self._done + num_tokens, len(self._token_ids))
        deltas = tuple(self._delta(index, start, end) for index in range(self._num_choices))
        prompt = None if any(isinstance(event, Tokens) for event in self.events) else Usage(3)
        self.events.append(Tokens(len(self.events) + 1, self._epoch, self._epoch, deltas, prompt))
        self._done = end

    def finish(self) -> None:
        """Everything that is left, and the end."""
        while self._done < len(self._token_ids):
            self.generate(3)
        self.events.append(Finished(len(self.events) + 1, self._epoch, self._epoch, Usage(3, self._done)))

    def lose(self, num_events: int) -> None:
        """A failover: the last events are gone. At least the first one stays."""
        del self.events[max(1, len(self.events) - num_events) :]
        self._done = sum(
            len(event.choices[0].token_ids) for event in self.events if isinstance(event, Tokens)
        )

    def change_tokens(self, token_ids: list[int]) -> None:
        """What is generated from now on comes from here."""
        self._token_ids = token_ids

    def _delta(self, index: int, start: int, end: int) -> ChoiceDelta:
        ids = self._token_ids[start:end]
        reason: FinishReason | None = "stop" if end == len(self._token_ids) else None
        logprobs = tuple(TokenLogprobs(-float(i), 1) for i in ids)
        text = "".join(VOCABULARY[i] for i in ids)
        return ChoiceDelta(index, start, tuple(ids), text, reason, logprobs=logprobs)


class Reader:
    """A subscriber without a network: `hears` live messages, `reads` the log where the merger asks for it."""

    def __init__(self, log: Log, after_seq: int = 0) -> None:
        self.log = log
        self.merger = Merger("m.0.x", after_seq)
        self.got: list[LoggedEvent] = []

    def hears(self, events: Iterable[LoggedEvent]) -> None:
        for event in events:
            try:
                got = self.merger.live(encode(event))
            except LogNeeded:
                self.reads()
            else:
                self.got += [got] if got is not None else []

    def reads(self) -> None:
        try:
            self._read()
        except LogChanged:
            self.merger.rewind()
            self._read()

    def _read(self) -> None:
        log_seq = len(self.log.events)
        self.merger.check_reaches(log_seq)
        entries = [LogEntry(e.seq, encode(e)) for e in self.log.events if e.seq >= self.merger.read_from]
        self.got.extend(self.merger.logged(entries, log_seq))

    def tokens(self, index: int) -> list[int]:
        return [i for delta in self._deltas(index) for i in delta.token_ids]

    def text(self, index: int) -> str:
        return "".join(delta.text for delta in self._deltas(index))

    def _deltas(self, index: int) -> list[ChoiceDelta]:
        tokens = [event for event in self.got if isinstance(event, Tokens)]
        return [delta for event in tokens for delta in event.choices if delta.index == index]

    def check_complete(self, token_ids: list[int], num_choices: int) -> None:
        for index in range(num_choices):
            assert self.tokens(index) == token_ids
            assert self.text(index) == "".join(VOCABULARY[i] for i in token_ids)
            offset = 0
            for delta in self._deltas(index):
                assert delta.offset == offset
                offset += len(delta.token_ids)
                assert [-entry.logprob for entry in delta.logprobs] == list(delta.token_ids)
            assert [d.finish_reason for d in self._deltas(index)].count("stop") <= 1
        assert isinstance(self.got[-1], Finished)
        assert sum(isinstance(event, Finished) for event in self.got) == 1
        prompts = [event for event in self.got if isinstance(event, Tokens) and event.prompt is not None]
        assert len(prompts) == 1


ids = st.lists(st.integers(0, len(VOCABULARY) - 1), min_size=1, max_size=30)


@given(token_ids=ids, num_choices=st.integers(1, 3), data=st.data())
def test_any_loss_and_repetition_on_the_way(
    token_ids: list[int], num_choices: int, data: st.DataObject
) -> None:
    log = Log(token_ids, num_choices)
    log.begin()
    reader = Reader(log)
    backlog: list[LoggedEvent] = [log.events[0]]
    for _ in range(data.draw(st.integers(0, 12), label="steps")):
        action = data.draw(st.sampled_from(["generate", "resume", "hear", "lose", "read", "repeat"]))
        if action == "generate":
            log.generate(data.draw(st.integers(0, 4)))
            backlog.append(log.events[-1])
        elif action == "resume":
            log.begin()
            backlog.append(log.events[-1])
        elif action == "hear":
            reader.hears(backlog)
            backlog.clear()
        elif action == "lose":
            backlog.clear()
        elif action == "repeat":
            reader.hears(data.draw(st.sampled_from([log.events, log.events[-3:]])))
        else:
            reader.reads()
    log.finish()
    reader.hears(log.events[-1:])
    reader.reads()
    assert reader.got == log.events


@given(token_ids=ids, after=st.integers(0, 40))
def test_joining_late_gives_exactly_the_rest(token_ids: list[int], after: int) -> None:
    log = Log(token_ids, 1)
    log.begin()
    log.generate(2)
    log.begin()
    log.finish()
    after_seq = min(after, len(log.events))
    reader = Reader(log, after_seq)
    reader.reads()
    reader.hears(log.events[after_seq:])
    assert reader.got == log.events[after_seq:]


@given(token_ids=ids, num_choices=st.integers(1, 2), data=st.data())
def test_a_failover_that_repeats_the_same_tokens_cannot_be_seen(
    token_ids: list[int], num_choices: int, data: st.DataObject
) -> None:
    log = Log(token_ids, num_choices)
    log.begin()
    reader = Reader(log)
    reader.hears(log.events)
    for _ in range(data.draw(st.integers(1, 3), label="failovers")):
        for _ in range(data.draw(st.integers(0, 5), label="events")):
            log.generate(data.draw(st.integers(1, 4)))
            if data.draw(st.booleans(), label="heard"):
                reader.hears(log.events[-1:])
        log.lose(data.draw(st.integers(1, 6), label="lost"))
        if data.draw(st.booleans(), label="looked"):
            reader.reads()
        log.begin()
        for _ in range(data.draw(st.integers(0, 5), label="again")):
            log.generate(data.draw(st.integers(1, 4)))
        if data.draw(st.booleans(), label="heard again"):
            reader.hears(log.events[-2:])
    log.finish()
    reader.reads()
    reader.check_complete(token_ids, num_choices)


@given(token_ids=ids, data=st.data())
def test_a_failover_to_other_tokens_is_an_error_never_a_wrong_text(
    token_ids: list[int], data: st.DataObject
) -> None:
    log = Log(token_ids, 1)
    log.begin()
    for _ in range(data.draw(st.integers(1, 5))):
        log.generate(2)
    reader = Reader(log)
    reader.reads()
    before = reader.tokens(0)
    log.lose(data.draw(st.integers(1, 5)))
    others = data.draw(ids)
    kept = [i for event in log.events if isinstance(event, Tokens) for i in event.choices[0].token_ids]
    log.change_tokens(kept + others)
    log.begin()
    log.finish()
    regenerated = (kept + others)[: len(before)]
    if regenerated == before:
        reader.reads()
        assert reader.tokens(0) == kept + others
    elif len(regenerated) == len(before) or regenerated != before[: len(regenerated)]:
        with pytest.raises(LogRewound, match="other tokens"):
            reader.reads()


def test_a_log_that_ends_before_what_the_caller_had() -> None:
    log = Log([1, 2, 3], 1)
    log.begin()
    with pytest.raises(LogRewound, match="ends at event 1, before event 5"):
        Reader(log, after_seq=5).reads()


def test_another_event_under_a_known_number_sends_to_the_log() -> None:
    log = Log([1, 2, 3], 1)
    log.begin()
    log.generate(1)
    reader = Reader(log)
    reader.reads()
    assert reader.merger.live(encode(log.events[1])) is None
    log.lose(1)
    log.begin()
    with pytest.raises(LogNeeded):
        reader.merger.live(encode(log.events[1]))


def test_a_log_out_of_order_is_noticed() -> None:
    log = Log([1, 2, 3], 1)
    log.begin()
    log.finish()
    del log.events[1]
    reader = Reader(log)
    with pytest.raises(LogChanged):
        list(reader.merger.logged([LogEntry(e.seq, encode(e)) for e in log.events], 4))


def test_candidates_that_a_failover_repeats_are_not_told_twice() -> None:
    """A `best_of` job: until its last event there is nothing but candidates, and after it whole choices."""
    log = Log([], 0)
    reader = Reader(log)

    def append(epoch: int, *candidates: ChoiceDelta, choices: tuple[ChoiceDelta, ...] = ()) -> None:
        prompt = Usage(3) if len(log.events) == 1 else None
        seq = len(log.events) + 1
        log.events.append(Tokens(seq, epoch, epoch, choices, prompt, None, candidates))

    log.begin()
    append(1, ChoiceDelta(0, 0, (1,)), ChoiceDelta(1, 0, (2,)))
    append(1, ChoiceDelta(0, 1, (3,)), ChoiceDelta(1, 1, (4,)))
    reader.hears(log.events)
    del log.events[2:]
    log.begin()
    append(2, ChoiceDelta(0, 1, (3,)), ChoiceDelta(1, 1, (4,)))
    append(2, ChoiceDelta(0, 2, (5,), "x", "stop"), choices=(ChoiceDelta(0, 0, (1, 3, 5), "x", "stop"),))
    log.events.append(Finished(len(log.events) + 1, 2, 2))
    reader.reads()
    tokens = [event for event in reader.got if isinstance(event, Tokens)]
    assert [len(event.candidates) for event in tokens] == [2, 2, 2, 1]
    assert [delta for event in tokens for delta in event.choices] == [
        ChoiceDelta(0, 0, (1, 3, 5), "x", "stop")
    ]
    assert sum(event.prompt is not None for event in tokens) == 1
    seqs = [event.seq for event in reader.got]
    assert seqs == sorted(seqs)
