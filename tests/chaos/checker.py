"""Judges what subscribers heard and what Redis holds. Reads Redis by plain commands and knows nothing of the
code under test but the protocol page."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import msgspec
import redis

from chairlift_client.protocol import LoggedEvent, Tokens
from chaos.cases import Case
from chaos.oracle import Answer, Oracle

TERMINAL = {"finished", "failed", "cancelled"}
GAUGES = ("waiting", "running", "delayed", "bytes", "jobs")


class Verdict(NamedTuple):
    """`faults`: what is wrong, in words; `outcome` of a job that has ended."""

    outcome: str
    faults: list[str]
    is_tie: bool = False
    is_absent: bool = False


class _Log(NamedTuple):
    events: list[list[Any]]
    tokens: list[int]
    text: str


class Checker:
    """Looks at one namespace of a server."""

    def __init__(
        self, client: redis.Redis, namespace: str, oracle: Oracle, *, is_lossy: bool = False
    ) -> None:
        self._redis = client
        self._namespace = namespace
        self._oracle = oracle
        self._is_lossy = is_lossy

    def judge(self, case: Case) -> Verdict:
        """A job whose stream has ended, or should have."""
        prefix = self._prefix(case.job_id)
        job = {name.decode(): value for name, value in self._hash(f"{prefix}:job:{case.job_id}").items()}
        entries: Any = self._redis.xrange(f"{prefix}:ev:{case.job_id}")
        if not job:
            return Verdict("lost", ["lost: the job is not there"], is_absent=True)
        state = job["state"].decode()
        if state not in TERMINAL:
            return Verdict("lost", [f"lost: the job is {state}: {job}"])
        faults: list[str] = []
        log = _read_log(entries, state, faults)
        heard = _heard(case.heard)
        if not self._is_lossy:
            _compare_numbers(case.heard, log, faults)
        if state == "finished" or not self._is_lossy:
            _compare_tokens(heard, log, faults)
        elif not _is_beginning(heard, self._oracle.answers[case.ask.order]):
            faults.append(f"wrong: heard {heard.tokens}")
        for name in (f"{prefix}:job:{case.job_id}", f"{prefix}:ev:{case.job_id}"):
            if int(self._redis.pttl(name)) < 0:  # type: ignore[arg-type]
                faults.append(f"leaked: {name} has no end")
        is_tie = self._judge_tokens(case, state, job, log, faults)
        return Verdict(_outcome(state, log), faults, is_tie)

    def has_ended(self, case: Case) -> bool:
        """Whether the job is over or gone, whatever its subscriber has heard."""
        state: Any = self._redis.hget(f"{self._prefix(case.job_id)}:job:{case.job_id}", "state")
        return state is None or state.decode() in TERMINAL

    def leaks(self) -> list[str]:
        """What should not be there when nothing runs any more."""
        found: list[str] = []
        for raw in self._redis.scan_iter(f"cl:{{{self._namespace}*", count=1000):
            name = raw.decode()
            if int(self._redis.pttl(raw)) == -1:  # type: ignore[arg-type]
                found.append(f"leaked: {name} has no end")
            rest = name.partition("}:")[2]
            found += self._leaks_of(name, rest)
        return found

    def busy_workers(self) -> list[str]:
        """Workers whose last heartbeat says that something is on board, or that blocks are in use."""
        busy: list[str] = []
        for raw in self._redis.scan_iter(f"cl:{{{self._namespace}}}:worker:*"):
            beat = self._hash(raw.decode())
            if beat and (beat[b"used_blocks"] != b"0" or beat[b"on_board"] != b"0"):
                busy.append(f"leaked: {raw.decode()} says {beat}")
        return busy

    def _leaks_of(self, name: str, rest: str) -> list[str]:
        kind = rest.partition(":")[0]
        if kind in ("held", "live", "later", "active", "served"):
            return [f"leaked: {name} is not empty: {self._redis.dump(name)!r:.80}"]
        if kind == "q":
            return [f"leaked: {name} has {self._redis.xlen(name)} entries"]
        if kind == "n":
            return [
                f"leaked: {name} counts {field.decode()} {value.decode()}"
                for field, value in self._hash(name).items()
                if field.decode().partition(":")[0] in GAUGES
            ]
        state: Any = self._redis.hget(name, "state") if kind == "job" else None
        return [] if state is None or state.decode() in TERMINAL else [f"lost: {name} is {state.decode()}"]

    def _judge_tokens(
        self, case: Case, state: str, job: dict[str, bytes], log: _Log, faults: list[str]
    ) -> bool:
        answer = self._oracle.answers[case.ask.order]
        if state == "finished":
            choice = msgspec.msgpack.decode(job["result"])["choices"][0]
            if list(choice["token_ids"]) != log.tokens or choice["text"] != log.text:
                faults.append("wrong: the result is not what the log says")
            if (tuple(log.tokens), log.text) == (answer.token_ids, answer.text):
                return False
        elif _is_beginning(log, answer):
            return False
        if self._oracle.is_tie(case.ask.order, log.tokens):
            return True
        faults.append(f"wrong: {log.tokens} {log.text!r}, not {answer.token_ids} {answer.text!r}")
        return False

    def _hash(self, name: str) -> dict[bytes, bytes]:
        reply: Any = self._redis.hgetall(name)
        return dict(reply)

    def _prefix(self, job_id: str) -> str:
        model, partition, _ = job_id.rsplit(".", 2)
        return f"cl:{{{self._namespace}/{model}/{partition}}}"


def _read_log(entries: list[tuple[bytes, dict[bytes, bytes]]], state: str, faults: list[str]) -> _Log:
    """Numbers, order, kinds and offsets; one ending, and that at the end."""
    log = _Log([msgspec.msgpack.decode(fields[b"e"]) for _, fields in entries], [], "")
    if [entry_id.decode() for entry_id, _ in entries] != [f"{n}-0" for n in range(1, len(entries) + 1)]:
        faults.append(f"wrong: seqs are {[entry_id for entry_id, _ in entries]}")
    if [event[1] for event in log.events] != list(range(1, len(entries) + 1)):
        faults.append("wrong: the events' own seqs are not 1 to n")
    endings = [event[0] for event in log.events if event[0] in TERMINAL]
    if endings != [state] or log.events[-1][0] != state:
        faults.append(f"doubled: endings {endings} of a job that is {state}")
    epochs = [event[2] for event in log.events]
    if epochs != sorted(epochs):
        faults.append(f"wrong: epochs {epochs}")
    text = ""
    for event in log.events:
        if event[0] == "tokens":
            _, offset, token_ids, piece = [*event[4][0], None, None][:4]
            if offset != len(log.tokens):
                faults.append(f"doubled: offset {offset} after {len(log.tokens)} tokens")
            log.tokens.extend(token_ids or ())
            text += piece or ""
    return log._replace(text=text)


def _compare_numbers(heard: list[LoggedEvent], log: _Log, faults: list[str]) -> None:
    """What the subscriber heard is the log, event by event."""
    ours = [(event.seq, event.epoch, event.at_ms) for event in heard]
    theirs = [(event[1], event[2], event[3]) for event in log.events]
    if ours != theirs:
        counts = Counter(seq for seq, _, _ in ours)
        doubled = [seq for seq, count in counts.items() if count > 1]
        kind = "doubled" if doubled else "wrong"
        faults.append(f"{kind}: heard {len(ours)} events of {len(theirs)}; twice: {doubled}")


def _heard(events: list[LoggedEvent]) -> _Log:
    deltas = [delta for event in events if isinstance(event, Tokens) for delta in event.choices]
    tokens = [token for delta in deltas for token in delta.token_ids]
    return _Log([], tokens, "".join(delta.text for delta in deltas))


def _compare_tokens(heard: _Log, log: _Log, faults: list[str]) -> None:
    """And so are its tokens and its text."""
    if heard.tokens != log.tokens:
        kind = "doubled" if len(heard.tokens) > len(log.tokens) else "wrong"
        faults.append(f"{kind}: heard {heard.tokens}, the log has {log.tokens}")
    if heard.text != log.text:
        faults.append(f"wrong: heard {heard.text!r}, the log has {log.text!r}")


def _is_beginning(log: _Log, answer: Answer) -> bool:
    return answer.token_ids[: len(log.tokens)] == tuple(log.tokens) and answer.text.startswith(log.text)


def _outcome(state: str, log: _Log) -> str:
    return f"failed ({log.events[-1][4]})" if state == "failed" else state
