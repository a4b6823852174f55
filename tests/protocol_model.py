"""The protocol in plain Python: what every function has to answer, and what there has to be afterwards.

Where the order in which the server did something cannot be known from outside (classes are weighed by age,
expired leases are swept in the order of the streams), the model takes the order from the server and checks
that it is one of the allowed ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from chairlift_client.operations import Submission
from chairlift_client.protocol import TERMINAL_STATES
from chairlift_client.worker_operations import ClaimedJob, ClaimReply, RetryPolicy

RESUMED, SUSPECT, ALONE, ADOPTED = "q:resumed", "q:suspect", "q:alone", "q:adopted"


@dataclass
class ModelJob:
    """What the model knows of one job. `line`: the stream it stands in, waiting or running."""

    job: Submission
    state: str = "waiting"
    line: str = ""
    epoch: int = 0
    owner: str = ""
    seq: int = 0
    losses: int = 0
    failures: int = 0
    ended: tuple[int, str] = (0, "")
    is_cancelled: bool = False
    is_forgotten: bool = False
    is_placed: bool = True
    has_lapsed: bool = False
    is_due: bool = False
    is_overdue: bool = False
    letter: str = ""
    kinds: list[str] = field(default_factory=list)

    @property
    def is_live(self) -> bool:
        return self.state not in TERMINAL_STATES

    @property
    def home(self) -> str:
        return f"q:{self.job.job_class}:{self.job.tenant}"


@dataclass
class Memory:
    """What a worker's last claim was answered with."""

    number: int
    boarded: tuple[tuple[str, int], ...]
    cancels: tuple[tuple[str, int], ...]


class Model:
    """One partition."""

    def __init__(self, policy: RetryPolicy, *, max_waiting: int, max_tenant_jobs: int) -> None:
        self.policy = policy
        self.max_waiting = max_waiting
        self.max_tenant_jobs = max_tenant_jobs
        self.jobs: dict[str, ModelJob] = {}
        self.keys: dict[str, tuple[str, str]] = {}
        self.lines: dict[str, list[str]] = {}
        self.cancels: dict[str, list[tuple[str, int]]] = {}
        self.memories: dict[str, Memory] = {}
        self.letters: dict[str, Submission] = {}
        self.epochs: dict[str, int] = {}
        self.retried: set[str] = set()
        """Of each letter: how many attempts there were."""
        self.unnamed: list[tuple[Submission, int]] = []
        self.clearing = ""
        self.is_silent = False
        self.is_quiet = False
        self.num_terminal: Counter[str] = Counter()
        self.owners: dict[tuple[str, int], str] = {}

    # What there is.

    def live(self) -> list[ModelJob]:
        return [job for job in self.jobs.values() if job.is_live]

    def in_state(self, state: str) -> list[ModelJob]:
        return [job for job in self.jobs.values() if job.state == state]

    def gauges(self) -> dict[str, int]:
        """The counters as they have to be."""
        found: Counter[str] = Counter()
        for job in self.live():
            found[job.state] += 1
            found["bytes"] += len(job.job.body)
            found[f"jobs:{job.job.tenant}"] += 1
            if job.state == "waiting" and job.line == job.home:
                found[job.home.replace("q:", "waiting:", 1)] += 1
        return dict(found)

    # Producers.

    def submit(self, job: Submission) -> tuple[str, str]:
        """(kind, job id)."""
        if job.job_id in self.jobs:
            return "dup", job.job_id
        if job.idempotency in self.keys:
            known, body_hash = self.keys[job.idempotency]
            return ("dup" if body_hash == job.body_hash else "conflict"), known
        self._expire(8)
        tenant_jobs = sum(other.job.tenant == job.tenant for other in self.live())
        if len(self.in_state("waiting")) + 1 > self.max_waiting or tenant_jobs + 1 > self.max_tenant_jobs:
            return "full", ""
        if job.idempotency:
            self.keys[job.idempotency] = (job.job_id, job.body_hash)
        self._begin(job)
        return "ok", job.job_id

    def cancel(self, job_id: str) -> str:
        job = self.jobs.get(job_id)
        if job is None:
            return "absent"
        if not job.is_live:
            return "ended"
        if job.state != "running":
            self._end(job, "cancelled")
            return "ok"
        if not job.is_cancelled:
            job.is_cancelled = True
            self.cancels.setdefault(job.owner, []).append((job_id, job.epoch))
        return "asked"

    def forget(self, job_id: str) -> str:
        job = self.jobs.get(job_id)
        if job is None:
            return "absent"
        job.is_forgotten = True
        if not job.is_live:
            self._erase(job)
            return "ok"
        return self.cancel(job_id)

    def retry_dead(self, letter: str) -> str:
        """A letter is taken out again, by the server's name for it."""
        if letter not in self.letters:
            return "dup" if letter in self.retried else "absent"
        job = self.letters[letter]
        old = self.jobs.get(job.job_id)
        if old is not None and old.is_live:
            return "live"
        epoch = self.epochs.pop(letter)
        del self.letters[letter]
        self.retried.add(letter)
        self._begin(job._replace(idempotency="", delay_ms=0), epoch)
        return "ok"

    def name_letters(self, actual: Sequence[tuple[str, str]]) -> None:
        """Learn the server's names, (letter, job id) in order, of the dead letters there are."""
        names = [letter for letter, _ in actual]
        assert [letter for letter in names if letter in self.letters] == list(self.letters)
        new = [(letter, job_id) for letter, job_id in actual if letter not in self.letters]
        assert sorted(job_id for _, job_id in new) == sorted(job.job_id for job, _ in self.unnamed)
        buried = {job.job_id: (job, epoch) for job, epoch in self.unnamed}
        for letter, job_id in new:
            self.letters[letter], self.epochs[letter] = buried[job_id]
            if job_id in self.jobs:
                self.jobs[job_id].letter = letter
        self.unnamed.clear()

    def expire_result(self, job_id: str) -> None:
        """The result's time is over."""
        job = self.jobs.pop(job_id)
        self._drop_key(job)

    # Workers.

    def claim(
        self,
        worker: str,
        number: int,
        capacity: int,
        *,
        version: int,
        on_board: int,
        carries_suspect: bool,
        reply: ClaimReply,
        newer_line: Sequence[str],
    ) -> None:
        """Check a claim's answer. `newer_line` is what stands aside for newer workers afterwards."""
        self._sign_of_life()
        memory = self.memories.get(worker)
        if memory is not None and number <= memory.number:
            again = memory if number == memory.number else Memory(number, (), ())
            self._check_repeat(worker, again, reply)
            return
        self._promote()
        self._expire(256)
        assert list(reply.cancels) == self.cancels.pop(worker, [])
        boarded = [(job.job_id, job.epoch) for job in reply.jobs]
        assert len(set(boarded)) == len(boarded) <= capacity
        if capacity:
            self._take(worker, capacity, version, on_board, carries_suspect, reply.jobs, newer_line)
        else:
            assert boarded == []
        self.memories[worker] = Memory(number, tuple(boarded), reply.cancels)

    def _check_repeat(self, worker: str, memory: Memory, reply: ClaimReply) -> None:
        assert reply.cancels == memory.cancels
        still = [
            (job_id, epoch)
            for job_id, epoch in memory.boarded
            if job_id in self.jobs
            and self.jobs[job_id].state == "running"
            and self.jobs[job_id].epoch == epoch
        ]
        assert [(job.job_id, job.epoch) for job in reply.jobs] == still
        for job in reply.jobs:
            self._check_claimed(worker, job)

    def _take(
        self,
        worker: str,
        capacity: int,
        version: int,
        on_board: int,
        carries_suspect: bool,
        taken: Sequence[ClaimedJob],
        newer_line: Sequence[str],
    ) -> None:
        left = list(taken)
        if self.lines.get(ALONE):
            if on_board == 0:
                self.clearing = ""
                if self._take_in_order(worker, ALONE, 1, version, left, once=True):
                    assert list(newer_line) == self.lines.get("q:newer:2", [])
                    assert left == []
                    return
            elif self.clearing in ("", worker):
                self.clearing = worker
                assert left == []
                return
        free = capacity
        if version >= 2:
            free -= self._take_in_order(worker, "q:newer:2", free, version, left)
        free -= self._take_in_order(worker, RESUMED, free, version, left)
        free -= self._take_in_order(worker, SUSPECT, min(free, 0 if carries_suspect else 1), version, left)
        self._take_classes(worker, free, version, left, newer_line)

    def _take_in_order(
        self, worker: str, line: str, limit: int, version: int, left: list[ClaimedJob], *, once: bool = False
    ) -> int:
        """Board up to `limit` from one line; jobs of a newer version go aside. How many boarded."""
        num_boarded = 0
        waiting = self.lines.get(line, [])
        while waiting and num_boarded < limit:
            job = self.jobs[waiting.pop(0)]
            if job.job.version > version:
                self._stand(job, f"q:newer:{job.job.version}")
            else:
                self._board(worker, job, left.pop(0), line)
                num_boarded += 1
            if once:
                break
        return num_boarded

    def _take_classes(
        self, worker: str, free: int, version: int, left: list[ClaimedJob], newer_line: Sequence[str]
    ) -> None:
        known = self.lines.get("q:newer:2", [])
        aside = set(newer_line[len(known) :])
        assert list(newer_line[: len(known)]) == known
        assert not aside or version < 2
        for job_id in newer_line[len(known) :]:
            job = self.jobs[job_id]
            assert job.state == "waiting"
            assert job.line == job.home
            assert job.job.version > version
        homes = {
            name: list(line)
            for name, line in self.lines.items()
            if name.count(":") == 2 and "newer" not in name
        }
        assert len(left) <= free
        for name, line in homes.items():
            gone = aside | {job.job_id for job in left}
            num_gone = sum(job_id in gone for job_id in line)
            assert all(job_id in gone for job_id in line[:num_gone]), "boarded out of order"
            in_order = [job_id for job_id in line[:num_gone] if job_id not in aside]
            assert in_order == [job.job_id for job in left if job.job_id in line]
            self.lines[name] = line[num_gone:]
        for job_id in newer_line[len(known) :]:
            self._stand(self.jobs[job_id], "q:newer:2")
        if len(left) < free:
            assert not any(self.lines[name] for name in homes), "places were left empty while jobs wait"
        for claimed in left:
            job = self.jobs[claimed.job_id]
            assert job.state == "waiting"
            assert job.line == job.home
            self._board(worker, job, claimed, job.home)

    def _board(self, worker: str, job: ModelJob, claimed: ClaimedJob, line: str) -> None:
        assert job.state == "waiting"
        assert job.line == line
        job.epoch += 1
        job.seq += 1
        job.losses += 1
        job.state, job.owner, job.has_lapsed = "running", worker, False
        job.kinds.append("started" if job.seq == 1 else "resumed")
        assert (job.job.job_id, job.epoch) not in self.owners, "an epoch was given twice"
        self.owners[job.job.job_id, job.epoch] = worker
        assert claimed.alone == (line == ALONE)
        self._check_claimed(worker, claimed)

    def _check_claimed(self, worker: str, claimed: ClaimedJob) -> None:
        job = self.jobs[claimed.job_id]
        assert job.owner == worker
        assert (claimed.epoch, claimed.seq, claimed.losses, claimed.failures) == (
            job.epoch,
            job.seq,
            job.losses,
            job.failures,
        )
        assert claimed.body == job.job.body
        assert len(claimed.log) == job.seq

    def emit(self, worker: str, job_id: str, epoch: int, seq: int, num_tokens: int) -> str:
        job = self.jobs.get(job_id)
        if job is None or not self._owns(job, worker, epoch):
            return "lost"
        if seq <= job.seq:
            return "dup"
        if seq != job.seq + 1:
            return "gap"
        job.seq = seq
        job.kinds.append("tokens")
        if num_tokens:
            job.losses = 0
        return "ok"

    def renew(
        self, worker: str, attempts: Iterable[tuple[str, int]]
    ) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...]]:
        self._sign_of_life()
        lost: list[str] = []
        cancelled: list[tuple[str, int]] = []
        for job_id, epoch in attempts:
            job = self.jobs.get(job_id)
            if job is None or not self._owns(job, worker, epoch):
                lost.append(job_id)
                continue
            job.has_lapsed = False
            if not job.is_placed:
                job.is_placed, job.line = True, ADOPTED
            if job.is_cancelled:
                cancelled.append((job_id, epoch))
        return tuple(lost), tuple(cancelled)

    def reap(self) -> tuple[int, int, int, int] | None:
        """(moved, buried, cancelled, mended), None for quiet. Lines that got more are to be settled."""
        self._sign_of_life()
        if self.is_quiet:
            return None
        moved = buried = cancelled = mended = 0
        for job in [job for job in self.in_state("running") if job.has_lapsed and job.is_placed]:
            if job.is_cancelled:
                self._end(job, "cancelled")
                cancelled += 1
            elif job.losses >= self.policy.max_losses:
                self._bury(job)
                buried += 1
            else:
                self._requeue(job)
                moved += 1
        for job in [job for job in self.live() if not job.is_placed]:
            job.is_placed = True
            mended += 1
            if job.state == "waiting":
                self._stand(job, job.line)
            else:
                job.line, job.has_lapsed = ADOPTED, False
        return moved, buried, cancelled, mended

    def settle(self, line: str, actual: Sequence[str]) -> None:
        """Take over the order of what came into a line in one sweep."""
        assert sorted(actual) == sorted(self.lines.get(line, []))
        self.lines[line] = list(actual)

    def finish(self, worker: str, job_id: str, epoch: int, seq: int, state: str) -> str:
        job = self.jobs.get(job_id)
        answer = self._fence(job, worker, epoch)
        if answer != "ok":
            return answer
        assert job is not None
        if seq != job.seq + 1:
            return "gap"
        job.ended = (epoch, worker)
        self._end(job, state)
        return "ok"

    def fail(self, worker: str, job_id: str, epoch: int) -> str:
        job = self.jobs.get(job_id)
        answer = self._fence(job, worker, epoch)
        if answer != "ok":
            return answer
        assert job is not None
        job.ended = (epoch, worker)
        if job.is_cancelled:
            self._end(job, "cancelled")
            return "cancelled"
        job.failures += 1
        job.losses = 0
        if job.failures >= self.policy.max_failures:
            self._bury(job)
            return "dead"
        job.state, job.line, job.is_placed, job.is_due = "delayed", "", True, False
        return "ok"

    def hand_back(self, worker: str, attempts: Iterable[tuple[str, int]], *, spent: bool) -> tuple[str, ...]:
        return tuple(self._hand_one_back(worker, job_id, epoch, spent) for job_id, epoch in attempts)

    def _hand_one_back(self, worker: str, job_id: str, epoch: int, spent: bool) -> str:
        job = self.jobs.get(job_id)
        answer = self._fence(job, worker, epoch)
        if answer != "ok":
            return answer
        assert job is not None
        job.ended = (epoch, worker)
        if job.is_cancelled:
            self._end(job, "cancelled")
            return "cancelled"
        losses = max(1, job.losses) if spent else max(0, job.losses - 1)
        if losses >= self.policy.max_losses:
            self._bury(job)
            return "dead"
        job.losses = losses
        self._requeue(job)
        return "ok"

    # Time and operators.

    def lapse(self, worker: str | None) -> None:
        for job in self.in_state("running"):
            if worker in (None, job.owner) and job.is_placed:
                job.has_lapsed = True

    def delete_stream(self, line: str) -> None:
        """An operator deletes a queue stream: those in it stand nowhere."""
        self.lines.pop(line, None)
        for job in self.live():
            if job.state in ("waiting", "running") and job.line == line:
                job.is_placed = job.has_lapsed = False

    # Within.

    def _owns(self, job: ModelJob, worker: str, epoch: int) -> bool:
        return job.state == "running" and job.epoch == epoch and job.owner == worker

    def _fence(self, job: ModelJob | None, worker: str, epoch: int) -> str:
        if job is None:
            return "lost"
        if self._owns(job, worker, epoch):
            return "ok"
        return "dup" if job.ended == (epoch, worker) else "lost"

    def _sign_of_life(self) -> None:
        self.is_quiet = self.is_quiet or self.is_silent
        self.is_silent = False

    def _begin(self, job: Submission, epoch: int = 0) -> None:
        new = self.jobs[job.job_id] = ModelJob(job, epoch=epoch)
        if epoch == 0:
            self.owners = {key: owner for key, owner in self.owners.items() if key[0] != job.job_id}
        self.num_terminal[job.job_id] = 0
        if job.delay_ms:
            new.state = "delayed"
        else:
            self._stand(new, new.home)

    def _stand(self, job: ModelJob, line: str) -> None:
        job.state, job.line, job.is_placed = "waiting", line, True
        self.lines.setdefault(line, []).append(job.job.job_id)

    def _requeue(self, job: ModelJob) -> None:
        alone = job.losses >= self.policy.max_losses - 1
        self._stand(job, RESUMED if job.losses == 0 else ALONE if alone else SUSPECT)

    def _promote(self) -> None:
        for job in sorted(self.in_state("delayed"), key=lambda job: job.job.job_id):
            if job.is_due:
                job.is_due = False
                self._stand(job, job.home if job.seq == 0 else RESUMED)

    def _expire(self, most: int) -> None:
        overdue = [job for job in self.live() if job.is_overdue and job.state != "running"]
        for job in sorted(overdue, key=lambda job: job.job.job_id)[:most]:
            self._end(job, "failed")

    def _bury(self, job: ModelJob) -> None:
        if not job.is_forgotten:
            self.unnamed.append((job.job, job.epoch))
        self._end(job, "failed")

    def _end(self, job: ModelJob, state: str) -> None:
        if job.state == "waiting" and job.job.job_id in self.lines.get(job.line, []):
            self.lines[job.line].remove(job.job.job_id)
        job.state, job.line, job.is_placed = state, "", True
        job.seq += 1
        job.kinds.append(state)
        self.num_terminal[job.job.job_id] += 1
        assert self.num_terminal[job.job.job_id] == 1
        if job.is_forgotten:
            self._erase(job)

    def _erase(self, job: ModelJob) -> None:
        del self.jobs[job.job.job_id]
        self._drop_key(job)
        self.letters.pop(job.letter, None)

    def _drop_key(self, job: ModelJob) -> None:
        key = job.job.idempotency
        if key and self.keys.get(key, ("", ""))[0] == job.job.job_id:
            del self.keys[key]
