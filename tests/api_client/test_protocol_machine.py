"""Interleavings of everything that clients, workers and operators do, against a model in plain Python.

Each message may be sent twice, come late (after whatever else has happened), or have its answer lost.
"""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from chairlift_client.calls import Call
from chairlift_client.operations import (
    cancel,
    dead_list,
    dead_retry,
    find,
    forget,
    submit,
)
from chairlift_client.protocol import (
    TERMINAL_EVENTS,
    Cancelled,
    Failed,
    Finished,
    JobClass,
    JobState,
    decode_event,
    encode,
)
from chairlift_client.worker_operations import (
    ClaimedJob,
    ClaimReply,
    Emission,
    ReapReply,
    emit,
    fail,
    finish,
    hand_back,
    open_partition,
    reap,
    renew,
    tidy,
)
from protocol_driver import (
    LEASE_MS,
    POLICY,
    Driver,
    assert_log_is_whole,
    count_tokens,
    job_number,
    submission,
    tokens_event,
)
from protocol_model import Model
from servers import Flavour, Server

WORKERS = ("old-1", "old-2", "new-1")
VERSIONS = {"old-1": 1, "old-2": 1, "new-1": 2}
MAX_WAITING = 12
MAX_TENANT_JOBS = 9

indexes = st.integers(0, 1_000)
workers = st.sampled_from(WORKERS)
classes: st.SearchStrategy[JobClass] = st.sampled_from(("high", "normal", "low", "batch"))
tenants = st.sampled_from("ab")
howls = st.sampled_from(("once", "once", "twice", "late", "unheard"))
"""How a message goes: once, twice, not before something repeats it, or with its answer lost."""


@dataclass
class Riding:
    """What a worker believes of a job on its board."""

    epoch: int
    seq: int
    num_tokens: int
    is_suspect: bool


@dataclass(frozen=True)
class Message:
    """A call, how the model looks at its answer, and its word beforehand that nothing may change."""

    call: Call[Any]
    check: Callable[[Any], None]
    is_refused: Callable[[], bool] = lambda: False
    is_idempotent: bool = True


class Protocol(RuleBasedStateMachine):
    """One partition, three workers, any number of clients and one careless operator."""

    server: Server

    def __init__(self) -> None:
        super().__init__()
        self.client = self.server.client()
        self.client.flushall()
        self.driver = Driver(self.client, "machine")
        self.driver.load()
        self.model = Model(POLICY, max_waiting=MAX_WAITING, max_tenant_jobs=MAX_TENANT_JOBS)
        self.boards: dict[str, dict[str, Riding]] = {worker: {} for worker in WORKERS}
        self.numbers = dict.fromkeys(WORKERS, 0)
        self.sent: list[Message] = []
        self.num_jobs = 0
        call = open_partition(
            self.driver.prefix, context_tokens=0, pool_tokens=0, max_waiting=MAX_WAITING, max_bytes=0,
            max_tenant_jobs=MAX_TENANT_JOBS,
        )  # fmt: skip
        self.driver.run(call)

    # Sending.

    def send(self, message: Message, how: str) -> Any:
        """The answer, None when nobody hears it."""
        self.sent.append(message)
        if how == "late":
            return None
        answer = self.execute(message)
        if how == "twice":
            before = self.driver.snapshot()
            self.execute(message)
            if message.is_idempotent:
                assert self.driver.snapshot() == before
        return None if how == "unheard" else answer

    def execute(self, message: Message) -> Any:
        before = self.driver.snapshot() if message.is_refused() else None
        answer = self.driver.run(message.call)
        message.check(answer)
        if before is not None:
            assert self.driver.snapshot() == before, "a refused call changed something"
        letters = self.driver.run(dead_list(self.driver.prefix))
        self.model.name_letters([(letter, fields["id"].decode()) for letter, fields in letters])
        return answer

    @precondition(lambda self: self.sent)
    @rule(index=indexes)
    def a_message_comes_again_or_late(self, index: int) -> None:
        self.execute(self.sent[-1 - index % len(self.sent)])

    @initialize(
        jobs=st.lists(st.tuples(classes, tenants, st.sampled_from((1, 1, 1, 2))), min_size=3, max_size=8),
        taken=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    )
    def begin(self, jobs: list[tuple[JobClass, str, int]], taken: list[int]) -> None:
        """Something to play with."""
        for job_class, tenant, version in jobs:
            self.submit("once", job_class, tenant, version, 0, "", b"one")
        for worker, capacity in zip(WORKERS, taken, strict=True):
            self.claim("once", worker, capacity)

    # Clients.

    @rule(
        how=howls,
        job_class=classes,
        tenant=tenants,
        version=st.sampled_from((1, 1, 1, 2)),
        delay_ms=st.sampled_from((0, 0, 0, 3_600_000)),
        key=st.sampled_from(("", "", "k1", "k2")),
        body=st.sampled_from((b"one", b"other")),
    )
    def submit(
        self, how: str, job_class: JobClass, tenant: str, version: int, delay_ms: int, key: str, body: bytes
    ) -> None:
        self.num_jobs += 1
        job = submission(
            job_number(self.num_jobs), body, job_class=job_class, tenant=tenant, version=version,
            delay_ms=delay_ms, idempotency=key, body_hash=body.decode(), allow_unknown=False,
        )  # fmt: skip

        def check(reply: Any) -> None:
            assert (reply.kind, reply.job_id) == self.model.submit(job)
            if reply.kind == "full":
                assert reply.have > reply.limit > 0
                assert reply.retry_ms >= 100

        self.send(
            Message(submit(self.driver.prefix, job), check, is_idempotent=not self.is_full(tenant)), how
        )

    def is_full(self, tenant: str) -> bool:
        """Refusals may end overdue jobs, a few at a time: then a repeat does a bit more of it."""
        return any(job.is_overdue for job in self.model.live())

    @rule(key=st.sampled_from(("k1", "k2")), body=st.sampled_from(("one", "other")))
    def find(self, key: str, body: str) -> None:
        reply = self.driver.run(find(self.driver.prefix, key, body))
        known = self.model.keys.get(key)
        if known is None:
            assert reply is None
        else:
            assert reply is not None
            assert (reply.job_id, reply.kind) == (known[0], "dup" if known[1] == body else "conflict")

    @precondition(lambda self: self.num_jobs)
    @rule(how=howls, index=indexes, is_forgetting=st.sampled_from((False, False, True)))
    def cancel(self, how: str, index: int, is_forgetting: bool) -> None:
        job_id = job_number(1 + index % (self.num_jobs + 1))
        call = (forget if is_forgetting else cancel)(self.driver.prefix, job_id)
        model = self.model.forget if is_forgetting else self.model.cancel

        def check(answer: str) -> None:
            assert answer == model(job_id)

        def is_refused() -> bool:
            job = self.model.jobs.get(job_id)
            return job is None or (not job.is_live and not is_forgetting)

        self.send(Message(call, check, is_refused), how)

    # Workers.

    @rule(how=howls, worker=workers, capacity=st.sampled_from((0, 1, 2, 3, 5)))
    def claim(self, how: str, worker: str, capacity: int) -> None:
        board, version, number = self.boards[worker], VERSIONS[worker], self.numbers[worker]
        on_board, carries = len(board), any(riding.is_suspect for riding in board.values())
        call = self.driver.claim_call(
            worker, number, capacity, on_board=on_board, carries_suspect=carries, version=version
        )

        def check(reply: ClaimReply) -> None:
            self.model.claim(
                worker, number, capacity, version=version, on_board=on_board, carries_suspect=carries,
                reply=reply, newer_line=self.driver.line("q:newer:2"),
            )  # fmt: skip

        reply: ClaimReply | None = self.send(Message(call, check), how)
        if reply is not None:
            self.numbers[worker] += 1
            for job in reply.jobs:
                self.take_on_board(worker, job)
            for job_id, epoch in reply.cancels:
                if job_id in board and board[job_id].epoch == epoch:
                    self.end(worker, job_id, "cancelled", "once")

    def take_on_board(self, worker: str, job: ClaimedJob) -> None:
        events = [decode_event(event) for event in job.log]
        assert_log_is_whole(events)
        self.boards[worker][job.job_id] = Riding(
            job.epoch, job.seq, sum(map(count_tokens, events)), job.losses > 1
        )

    def somebody_rides(self) -> bool:
        return any(self.boards.values())

    def pick_riding(self, index: int) -> tuple[str, str, Riding]:
        """(worker, job id, what the worker believes of it)."""
        riders = [
            (worker, job_id, riding)
            for worker, board in self.boards.items()
            for job_id, riding in sorted(board.items())
        ]
        return riders[index % len(riders)]

    def heard(self, worker: str, job_id: str, answer: str | None, *, is_end: bool) -> None:
        """What a worker does about an answer: it drops what is no longer its own."""
        if answer in ("lost", "gap") or (is_end and answer is not None):
            self.boards[worker].pop(job_id, None)

    @precondition(somebody_rides)
    @rule(how=howls, index=indexes, is_skipping=st.sampled_from((False, False, False, True)))
    def emit(self, how: str, index: int, is_skipping: bool) -> None:
        worker, job_id, riding = self.pick_riding(index)
        epoch, seq = riding.epoch, riding.seq + (2 if is_skipping else 1)
        count, offset = seq % 3, riding.num_tokens + ((seq - 1) % 3 if is_skipping else 0)
        event = tokens_event(seq, epoch, offset, count)
        call = emit(self.driver.prefix, worker, [Emission(job_id, epoch, seq, count, event)])

        def check(answers: tuple[str, ...]) -> None:
            assert answers == (self.model.emit(worker, job_id, epoch, seq, count),)

        answers = self.send(Message(call, check, lambda: self.is_fenced(worker, job_id, epoch)), how)
        if answers is not None:
            riding.seq, riding.num_tokens = seq, offset + count
            riding.is_suspect = riding.is_suspect and not count
            self.heard(worker, job_id, answers[0], is_end=False)

    def is_fenced(self, worker: str, job_id: str, epoch: int) -> bool:
        job = self.model.jobs.get(job_id)
        return job is None or (job.state, job.owner, job.epoch) != ("running", worker, epoch)

    @precondition(somebody_rides)
    @rule(how=howls, index=indexes)
    def renew(self, how: str, index: int) -> None:
        worker = self.pick_riding(index)[0]
        attempts = [(job_id, riding.epoch) for job_id, riding in sorted(self.boards[worker].items())]

        def check(reply: Any) -> None:
            assert (reply.lost, reply.cancelled) == self.model.renew(worker, attempts)

        def is_refused() -> bool:
            return all(self.is_fenced(worker, *attempt) for attempt in attempts)

        reply = self.send(
            Message(renew(self.driver.prefix, worker, LEASE_MS, attempts), check, is_refused), how
        )
        for job_id in reply.lost if reply else ():
            self.boards[worker].pop(job_id, None)
        for job_id, _ in reply.cancelled if reply else ():
            self.end(worker, job_id, "cancelled", "once")

    @precondition(somebody_rides)
    @rule(how=howls, index=indexes, state=st.sampled_from(("finished", "finished", "failed")))
    def finish(self, how: str, index: int, state: JobState) -> None:
        worker, job_id, _ = self.pick_riding(index)
        self.end(worker, job_id, state, how)

    def end(self, worker: str, job_id: str, state: JobState, how: str) -> None:
        riding = self.boards[worker].get(job_id)
        if riding is None:
            return
        epoch, seq = riding.epoch, riding.seq + 1
        kinds = {"finished": Finished, "failed": Failed, "cancelled": Cancelled}
        call = finish(
            self.driver.prefix, worker, job_id, epoch, seq=seq, state=state,
            event=encode(kinds[state](seq, epoch, 0)), result=b"r" if state == "finished" else b"", tokens=5,
        )  # fmt: skip

        def check(answer: str) -> None:
            assert answer == self.model.finish(worker, job_id, epoch, seq, state)

        answer = self.send(Message(call, check, lambda: self.is_fenced(worker, job_id, epoch)), how)
        self.heard(worker, job_id, answer, is_end=True)

    @precondition(somebody_rides)
    @rule(how=howls, index=indexes)
    def fail(self, how: str, index: int) -> None:
        worker, job_id, riding = self.pick_riding(index)
        epoch = riding.epoch
        call = fail(self.driver.prefix, worker, job_id, epoch, reason="broken", jitter=0.5, policy=POLICY)

        def check(answer: str) -> None:
            assert answer == self.model.fail(worker, job_id, epoch)

        answer = self.send(Message(call, check, lambda: self.is_fenced(worker, job_id, epoch)), how)
        self.heard(worker, job_id, answer, is_end=True)

    @precondition(somebody_rides)
    @rule(how=howls, is_all=st.booleans(), index=indexes, spent=st.booleans())
    def hand_back(self, how: str, is_all: bool, index: int, spent: bool) -> None:
        worker, only_id, only = self.pick_riding(index)
        board = sorted(self.boards[worker].items()) if is_all else [(only_id, only)]
        attempts = [(job_id, riding.epoch) for job_id, riding in board]
        call = hand_back(self.driver.prefix, worker, attempts, policy=POLICY, spent=spent)

        def check(answers: tuple[str, ...]) -> None:
            assert answers == self.model.hand_back(worker, attempts, spent=spent)

        def is_refused() -> bool:
            return all(self.is_fenced(worker, *attempt) for attempt in attempts)

        if self.send(Message(call, check, is_refused), how) is not None:
            for job_id, _ in attempts:
                self.boards[worker].pop(job_id, None)

    @rule(how=howls, is_late=st.booleans())
    def reap(self, how: str, is_late: bool = True) -> None:
        if is_late:
            self.a_lease_passes_without_anything()

        def check(reply: ReapReply) -> None:
            expected = self.model.reap()
            assert reply == (ReapReply(True) if expected is None else ReapReply(False, *expected))
            for line in tuple(self.model.lines):
                self.model.settle(line, self.driver.line(line))

        self.send(Message(reap(self.driver.prefix, lease_ms=LEASE_MS, policy=POLICY), check), how)

    @rule()
    def tidy(self) -> None:
        before = self.driver.snapshot()
        self.driver.run(tidy(self.driver.prefix, lease_ms=LEASE_MS, dead_ttl_ms=POLICY.dead_ttl_ms))
        assert self.driver.snapshot() == before

    @precondition(somebody_rides)
    @rule(index=indexes, is_killed=st.booleans())
    def a_worker_loses_its_leases(self, index: int, is_killed: bool) -> None:
        """Killed: its board is gone too, while its messages may still be under way. Else it stands still."""
        worker = self.pick_riding(index)[0]
        if is_killed:
            self.boards[worker].clear()
        self.let_leases_lapse(worker)
        self.reap("once")

    # Time and operators.

    @rule(worker=st.sampled_from((*WORKERS, None)))
    def let_leases_lapse(self, worker: str | None) -> None:
        self.driver.lapse(worker)
        self.model.lapse(worker)

    @rule()
    def delays_are_over(self) -> None:
        for job in self.model.in_state("delayed"):
            self.driver.make_due(job.job.job_id)
            job.is_due = True

    @rule(index=indexes, deadline=st.booleans())
    def a_waiting_job_is_overdue(self, index: int, deadline: bool) -> None:
        jobs = [job for job in self.model.live() if job.state != "running" and job.epoch == 0]
        if jobs:
            job = jobs[index % len(jobs)]
            self.driver.make_overdue(job.job.job_id, deadline=deadline)
            job.is_overdue = True

    @precondition(lambda self: not self.model.is_quiet)
    @rule()
    def the_server_was_away(self) -> None:
        self.driver.go_silent()
        self.model.is_silent = self.client.exists(f"{self.driver.prefix}:tick") == 1

    def a_lease_passes_without_anything(self) -> None:
        self.driver.end_quiet()
        self.model.is_quiet = False
        self.client.delete(f"{self.driver.prefix}:clearing")
        self.model.clearing = ""

    @precondition(lambda self: len(self.model.live()) < len(self.model.jobs))
    @rule(index=indexes)
    def a_result_expires(self, index: int) -> None:
        over = [job for job in self.model.jobs.values() if not job.is_live]
        job = over[index % len(over)]
        prefix, job_id = self.driver.prefix, job.job.job_id
        self.client.delete(f"{prefix}:job:{job_id}", f"{prefix}:ev:{job_id}")
        if self.model.keys.get(job.job.idempotency, ("", ""))[0] == job_id:
            self.client.delete(f"{prefix}:idem:{job.job.idempotency}")
        self.model.expire_result(job_id)

    @precondition(lambda self: self.driver.streams())
    @rule(index=indexes)
    def an_operator_deletes_a_queue_stream(self, index: int) -> None:
        streams = self.driver.streams()
        stream = streams[index % len(streams)]
        self.driver.delete_stream(stream)
        self.model.delete_stream(stream)

    @precondition(lambda self: self.model.letters)
    @rule(how=howls, index=indexes)
    def retry_a_dead_letter(self, how: str, index: int) -> None:
        letter = sorted(self.model.letters)[index % len(self.model.letters)]
        call = dead_retry(self.driver.prefix, letter, queue_ttl_ms=1_000_000, result_ttl_ms=1_000_000)

        def check(answer: str) -> None:
            assert answer == self.model.retry_dead(letter)

        self.send(Message(call, check), how)

    # What always holds.

    @invariant()
    def gauges_tell_what_is_there(self) -> None:
        assert self.driver.gauges() == self.model.gauges()

    @invariant()
    def every_key_has_an_end(self) -> None:
        assert self.driver.without_expiry() == []

    @invariant()
    def logs_are_whole_and_end_once(self) -> None:
        for job_id, job in self.model.jobs.items():
            events = self.driver.log(job_id)
            assert [type(event).__name__.lower() for event in events] == job.kinds
            assert_log_is_whole(events)
            assert any(isinstance(event, TERMINAL_EVENTS) for event in events[-1:]) == (not job.is_live)
            assert not any(isinstance(event, TERMINAL_EVENTS) for event in events[:-1])
            assert self.driver.state(job_id) == job.state

    def teardown(self) -> None:
        """Whatever has happened: from here on one good worker ends everything, and nothing is left."""
        self.model.is_silent = self.model.is_quiet = False
        self.client.delete(f"{self.driver.prefix}:tick", f"{self.driver.prefix}:quiet")
        worker, number = "last", 0
        while self.model.live():
            self.let_leases_lapse(None)
            self.reap("once")
            self.delays_are_over()
            call = self.driver.claim_call(worker, number, 10, version=2)
            reply: ClaimReply = self.driver.run(call)
            newer = self.driver.line("q:newer:2")
            self.model.claim(
                worker,
                number,
                10,
                version=2,
                on_board=0,
                carries_suspect=False,
                reply=reply,
                newer_line=newer,
            )
            number += 1
            assert number < 200, "jobs that nobody gets"
            self.boards[worker] = {}
            for job in reply.jobs:
                self.take_on_board(worker, job)
                self.end(worker, job.job_id, "finished", "once")
        self.logs_are_whole_and_end_once()
        self.driver.assert_nothing_is_left()
        self.client.close()


WEIGHTS = {
    "submit": 10, "claim": 16, "emit": 20, "renew": 5, "finish": 6, "fail": 4, "hand_back": 4, "cancel": 4,
    "reap": 3, "a_worker_loses_its_leases": 10, "a_message_comes_again_or_late": 10, "delays_are_over": 3,
    "a_waiting_job_is_overdue": 1, "the_server_was_away": 1, "a_result_expires": 1, "tidy": 1, "find": 1,
    "an_operator_deletes_a_queue_stream": 2, "retry_a_dead_letter": 3,
}  # fmt: skip


def draw_options(name: str, chance: random.Random) -> dict[str, Any]:
    """Arguments of a rule, as likely as it is good for walking far."""
    options: dict[str, Any] = {
        "how": chance.choice(("once", "once", "once", "twice", "late", "unheard")),
        "worker": chance.choice(WORKERS),
        "index": chance.randrange(1000) if chance.random() < 0.5 else chance.randrange(4),
        "capacity": chance.choice((0, 1, 1, 2, 2, 3, 5)),
        "job_class": chance.choice(("high", "normal", "low", "batch")),
        "tenant": chance.choice("ab"),
        "version": 2 if chance.random() < 0.15 else 1,
        "delay_ms": 3_600_000 if chance.random() < 0.15 else 0,
        "key": chance.choice(("", "", "", "k1", "k2")) if name == "submit" else chance.choice(("k1", "k2")),
        "body": chance.choice((b"one", b"other")) if name == "submit" else chance.choice(("one", "other")),
        "is_skipping": chance.random() < 0.1,
        "is_forgetting": chance.random() < 0.25,
        "state": chance.choice(("finished", "finished", "failed")),
        "is_all": chance.random() < 0.3,
        "spent": chance.random() < 0.5,
        "is_late": chance.random() < 0.8,
        "is_killed": chance.random() < 0.6,
        "deadline": chance.random() < 0.5,
    }
    return {
        key: options[key] for key in inspect.signature(getattr(Protocol, name)).parameters if key in options
    }


def walk(server: Server, number: int, steps: int) -> list[str]:
    """A random walk over the same rules, with weights that lead into the thick of it. What was done."""
    chance = random.Random(number)
    machine = type("Machine", (Protocol,), {"server": server})()
    done: list[str] = []
    try:
        while len(done) < steps:
            name = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            options = draw_options(name, chance)
            act = getattr(machine, name)
            if all(condition(machine) for condition in act.hypothesis_stateful_rule.preconditions):
                done.append(f"{name}({', '.join(f'{key}={value!r}' for key, value in options.items())})")
                act(**options)
                machine.gauges_tell_what_is_there()
                machine.every_key_has_an_end()
                if len(done) % 8 == 0:
                    machine.logs_are_whole_and_end_once()
        machine.teardown()
    except BaseException:
        print(f"CHAIRLIFT_SEED={number}, {len(done)} steps:", *done, sep="\n  ")
        raise
    return done


def first_seed() -> int:
    """Where the random numbers of this run begin. CHAIRLIFT_SEED repeats a run."""
    number = int(os.environ.get("CHAIRLIFT_SEED", random.randrange(2**32)))
    print(f"CHAIRLIFT_SEED={number}")
    return number


def explore(flavour: Flavour, *, examples: int, steps: int) -> None:
    """What Hypothesis finds, made short."""
    with Server(flavour) as server:
        machine: Any = type("Machine", (Protocol,), {"server": server})
        chosen = settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, database=None,
            suppress_health_check=list(HealthCheck), print_blob=True,
        )  # fmt: skip
        run_state_machine_as_test(seed(first_seed())(machine), settings=chosen)


def walk_often(flavour: Flavour, *, walks: int, steps: int) -> None:
    """Many walks, each with the next seed."""
    number = first_seed()
    with Server(flavour) as server:
        for index in range(walks):
            walk(server, number + index, steps)


def test_interleavings(flavour: Flavour) -> None:
    explore(flavour, examples=14, steps=25)


def test_random_walks(flavour: Flavour) -> None:
    walk_often(flavour, walks=16, steps=100)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_interleavings(flavour: Flavour) -> None:
    explore(flavour, examples=1000, steps=100)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_random_walks(flavour: Flavour) -> None:
    walk_often(flavour, walks=500, steps=200)
