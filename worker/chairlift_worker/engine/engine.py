"""The continuous batch: jobs join and leave at every step.

No Redis and no asyncio in here, and no threads: all methods are called from the engine's thread.
"""

from __future__ import annotations

from time import perf_counter

from torch import Tensor

from chairlift_client.errors import InvalidJob
from chairlift_worker.engine.blocks import BlockPool
from chairlift_worker.engine.detokenizer import TokenDecoder
from chairlift_worker.engine.grammar import GrammarError
from chairlift_worker.engine.job import Choice, Job, make_job
from chairlift_worker.engine.logprobs import token_logprobs
from chairlift_worker.engine.prefix import CacheIdentity, PrefixHashes
from chairlift_worker.engine.request import (
    EngineConfig,
    EngineRequest,
    Failure,
    StepReport,
    StepStats,
    TokenDelta,
)
from chairlift_worker.engine.rows import Heard, Seat, draw_tokens, failure, hear
from chairlift_worker.engine.runner import Runner
from chairlift_worker.engine.scheduler import Schedule, Scheduler
from chairlift_worker.engine.sequence import Sequence


class Engine:
    """Runs every job that was added until it ends, a step at a time.

    What a job is given depends on its request alone, not on who rides beside it, on chunks,
    preemptions, or on where an earlier attempt broke off.
    """

    def __init__(
        self, runner: Runner, decoder: TokenDecoder, config: EngineConfig, *, fingerprint: str = ""
    ) -> None:
        """`fingerprint` names the model in the prefix cache."""
        self._runner = runner
        self._fingerprint = fingerprint
        self._decoder = decoder
        self._config = config
        spec = runner.spec
        # A model's config may name end tokens that its vocabulary does not have.
        known_eos = frozenset(token_id for token_id in spec.eos_token_ids if 0 <= token_id < spec.vocab_size)
        self._spec = spec._replace(eos_token_ids=known_eos)
        self._pool = BlockPool(spec.num_blocks, spec.block_size)
        self._scheduler = Scheduler(self._pool, config)
        self._jobs: dict[str, Job] = {}
        self._seats: dict[str, Seat] = {}  # by the id of the sequence; held back choices have none yet
        self._num_steps = 0
        # Not told to the service yet. Kept here, so that a forward that raises loses none of it.
        self._deltas: list[TokenDelta] = []
        self._failures: dict[str, Failure] = {}
        self._ended: list[str] = []

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Sequences on board that hold no blocks, preempted ones included."""
        return self._scheduler.num_waiting

    @property
    def num_free_seats(self) -> int:
        """Jobs of one choice that may still be added without having to wait for a seat."""
        return max(0, self._config.max_num_seqs - sum(job.num_live for job in self._jobs.values()))

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the KV pool that nobody owns, cached ones included."""
        return self._pool.num_available

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV pool."""
        return self._pool.num_blocks

    @property
    def has_work(self) -> bool:
        """Whether `step` would report something."""
        return bool(self._jobs or self._deltas or self._failures)

    def add(self, request: EngineRequest) -> None:
        """Take a job on board. InvalidJob, with the numbers, if it can never run; nothing is kept then."""
        if request.job_id in self._jobs or request.job_id in self._ended:
            raise InvalidJob(f"job {request.job_id} is on board already")
        job = make_job(request, self._spec, self._decoder, self._prefix)
        if job.has_ended:
            self._deltas += [job.delta(choice, num_new=0, text="", logprobs=()) for choice in job.choices]
            self._ended.append(request.job_id)
            return
        self._jobs[request.job_id] = job
        # Without output there is still a prompt to compute.
        first, *others = [choice for choice in job.choices if choice.is_live] or job.choices[:1]
        job.held_back += others
        if job.prompt is not None:
            first.sequence.logits_from = job.prompt.logits_from
        self._seats[first.sequence.job_id] = Seat(job, first)
        self._scheduler.add(first.sequence)

    def cancel(self, job_id: str) -> bool:
        """Forget a job, whatever it is doing, and report nothing of it; False if there is none of this id."""
        if job_id not in self._jobs and job_id not in self._ended:
            return False
        self._forget(job_id)
        return True

    def step(self, now_ms: int) -> StepReport | None:
        """One iteration; None if there is nothing to do. `now_ms` is the server's clock, for deadlines.

        What the runner raises passes through; the engine is then as it was before the step, which may
        be tried again.
        """
        if not self.has_work:
            return None
        self._expire(now_ms)
        started = perf_counter()
        schedule = self._scheduler.schedule()
        scheduled = forwarded = perf_counter()
        riders = (self._seats[sequence.job_id].job.request.job_id for sequence in schedule.sequences)
        job_ids = tuple(dict.fromkeys(riders))
        if schedule.chunks:
            logits = self._runner.forward(schedule.chunks)
            forwarded = perf_counter()
            heard = hear(schedule, self._seats, logits)
            tokens = draw_tokens(logits, heard.rows)
            self._scheduler.commit(schedule)
            self._advance(heard, tokens, logits)
            self._end_bare_prompts(schedule)
        return self._report(
            schedule,
            job_ids,
            schedule_s=scheduled - started,
            forward_s=forwarded - scheduled,
            sample_s=perf_counter() - forwarded,
        )

    def check(self) -> None:
        """Prove the books of blocks and sequences; for tests, and cheap enough to run when idle."""
        self._scheduler.check()
        assert len(self._seats) == self.num_running + self.num_waiting
        assert all(self._jobs[seat.job.request.job_id] is seat.job for seat in self._seats.values())

    def _prefix(self, request: EngineRequest) -> PrefixHashes | None:
        if not (self._config.prefix_cache and request.cache):
            return None
        adapter = "" if request.adapter is None else request.adapter.digest
        identity = CacheIdentity(self._fingerprint, adapter, request.cache_salt)
        return PrefixHashes(identity, self._pool.block_size)

    def _advance(self, heard: Heard, tokens: list[int | None], logits: Tensor) -> None:
        """Add the drawn tokens to their choices; jobs that cannot go on leave."""
        failures = list(heard.failures)
        for row, token_id in zip(heard.rows, tokens, strict=True):
            position = len(row.seat.choice.output.token_ids)
            if token_id is None:
                problem = f"logits of output token {position} are not finite"
                failures.append(failure(row.seat, "numerics", problem))
                continue
            try:
                self._append(row.seat, token_id, logits[row.place])
            except GrammarError as error:
                failures.append(failure(row.seat, "invalid", f"output token {position}: {error}"))
        for failed in failures:
            self._fail(failed)

    def _append(self, seat: Seat, token_id: int, logits: Tensor) -> None:
        job, choice = seat
        text = choice.append(token_id)
        num_top = job.num_top_logprobs
        logprobs = () if num_top is None else token_logprobs(logits[None], [token_id], num_top)
        self._deltas.append(job.delta(choice, num_new=1, text=text, logprobs=logprobs))
        self._board_held_back(job, choice)
        if not choice.is_live:
            self._scheduler.learn_length(choice.sequence)
            self._leave(choice.sequence)
            self._end_if_complete(job)

    def _end_bare_prompts(self, schedule: Schedule) -> None:
        """Jobs without output end when their prompt is computed."""
        for sequence in schedule.sequences:
            seat = self._seats.get(sequence.job_id)
            if seat is None or seat.choice.is_live or sequence.num_pending:
                continue
            self._leave(sequence)
            job = seat.job
            self._deltas += [job.delta(choice, num_new=0, text="", logprobs=()) for choice in job.choices]
            self._end_if_complete(job)

    def _board_held_back(self, job: Job, first: Choice) -> None:
        """The first choice has its first token: the others share what it has computed."""
        for choice in job.held_back:
            self._seats[choice.sequence.job_id] = Seat(job, choice)
            if choice.output.token_ids:
                self._scheduler.add(choice.sequence)
            else:
                self._scheduler.fork(first.sequence, choice.sequence)
        job.held_back.clear()

    def _end_if_complete(self, job: Job) -> None:
        if job.has_ended:
            del self._jobs[job.request.job_id]
            self._ended.append(job.request.job_id)

    def _leave(self, sequence: Sequence, *, forget: bool = False) -> None:
        del self._seats[sequence.job_id]
        self._scheduler.remove(sequence, forget=forget)

    def _expire(self, now_ms: int) -> None:
        for job_id, job in list(self._jobs.items()):
            deadline_ms = job.request.deadline_ms
            if deadline_ms is not None and deadline_ms <= now_ms:
                message = f"the deadline {deadline_ms} ms has passed (now {now_ms} ms)"
                self._fail(Failure(job_id, "deadline", message))

    def _fail(self, failed: Failure) -> None:
        self._forget(failed.job_id, bad=failed.code == "numerics")
        self._failures.setdefault(failed.job_id, failed)

    def _forget(self, job_id: str, *, bad: bool = False) -> None:
        """Take a job out, with all that is to be told of it; `bad`: its blocks hold what nobody must use."""
        self._deltas = [delta for delta in self._deltas if delta.job_id != job_id]
        self._ended = [ended for ended in self._ended if ended != job_id]
        job = self._jobs.pop(job_id, None)
        for choice in () if job is None else job.choices:
            if choice.sequence.job_id in self._seats:
                self._leave(choice.sequence, forget=bad)

    def _report(
        self,
        schedule: Schedule,
        job_ids: tuple[str, ...],
        *,
        schedule_s: float,
        forward_s: float,
        sample_s: float,
    ) -> StepReport:
        self._num_steps += 1
        self._scheduler.learn_time(schedule, schedule_s + forward_s + sample_s)
        stats = StepStats(
            step=self._num_steps,
            job_ids=job_ids,
            num_sequences=len(schedule.sequences),
            num_prefill_tokens=schedule.num_prefill_tokens,
            num_decode_tokens=schedule.num_decode_tokens,
            num_context_tokens=schedule.num_context_tokens,
            num_preemptions=self._scheduler.num_preemptions,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_owned_blocks=self._pool.num_owned,
            num_blocks=self._pool.num_blocks,
            num_cached_blocks=self._pool.num_cached,
            num_boarded_tokens=self._scheduler.num_boarded_tokens,
            num_cached_tokens=self._scheduler.num_cached_tokens,
            schedule_s=schedule_s,
            forward_s=forward_s,
            sample_s=sample_s,
        )
        report = StepReport(
            tuple(self._deltas), tuple(self._failures.values()), stats, ended=tuple(self._ended)
        )
        self._deltas.clear()
        self._failures.clear()
        self._ended.clear()
        return report
