"""The continuous batch: jobs join and leave at every step.

No Redis and no asyncio in here, and no threads: all methods are called from the engine's thread.
"""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

from chairlift_client.errors import InvalidJob
from chairlift_worker.engine.admission import max_output_tokens
from chairlift_worker.engine.blocks import BlockPool
from chairlift_worker.engine.detokenizer import TokenDecoder
from chairlift_worker.engine.output import JobOutput
from chairlift_worker.engine.prefix import CacheIdentity, PrefixHashes
from chairlift_worker.engine.request import (
    EngineConfig,
    EngineRequest,
    Failure,
    StepReport,
    StepStats,
    TokenDelta,
)
from chairlift_worker.engine.runner import Runner
from chairlift_worker.engine.sampler import Draw, sample
from chairlift_worker.engine.scheduler import Schedule, Scheduler
from chairlift_worker.engine.sequence import Sequence


class _Job(NamedTuple):
    request: EngineRequest
    sequence: Sequence
    output: JobOutput


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
        self._jobs: dict[str, _Job] = {}
        self._num_steps = 0
        # Not told to the service yet. Kept here, so that a forward that raises loses none of it.
        self._deltas: dict[str, TokenDelta] = {}
        self._failures: dict[str, Failure] = {}

    @property
    def num_running(self) -> int:
        """Jobs that hold blocks."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Jobs on board that hold no blocks, preempted ones included."""
        return self._scheduler.num_waiting

    @property
    def num_free_seats(self) -> int:
        """Jobs that may still be added without having to wait for a seat."""
        return max(0, self._config.max_num_seqs - len(self._jobs))

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
        if request.job_id in self._jobs or request.job_id in self._deltas:
            raise InvalidJob(f"job {request.job_id} is on board already")
        max_tokens = max_output_tokens(request, self._spec)
        output = JobOutput(
            request.sampling,
            self._decoder,
            eos_token_ids=self._spec.eos_token_ids,
            max_output_tokens=max_tokens,
        )
        _replay(output, request.logged_token_ids)
        sequence = Sequence(
            job_id=request.job_id,
            order=request.order,
            token_ids=[*request.prompt_token_ids, *request.logged_token_ids],
            max_total_tokens=len(request.prompt_token_ids) + max_tokens,
            prefix=self._prefix(request),
        )
        job = _Job(request, sequence, output)
        if output.finish_reason is not None:
            self._deltas[request.job_id] = _delta(job, num_new=0, text="")
            return
        self._jobs[request.job_id] = job
        self._scheduler.add(sequence)

    def cancel(self, job_id: str) -> bool:
        """Forget a job, whatever it is doing, and report nothing of it; False if there is none of this id."""
        known = self._deltas.pop(job_id, None) is not None
        if job_id not in self._jobs:
            return known
        self._remove(job_id)
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
        if schedule.chunks:
            logits = self._runner.forward(schedule.chunks)
            forwarded = perf_counter()
            rows = _sampled_jobs(schedule, self._jobs)
            tokens = sample(logits, [_draw(job) for job in rows]) if rows else []
            self._scheduler.commit(schedule)
            for job, token_id in zip(rows, tokens, strict=True):
                self._advance(job, token_id)
        return self._report(
            schedule,
            schedule_s=scheduled - started,
            forward_s=forwarded - scheduled,
            sample_s=perf_counter() - forwarded,
        )

    def check(self) -> None:
        """Prove the books of blocks and sequences; for tests, and cheap enough to run when idle."""
        self._scheduler.check()
        assert len(self._jobs) == self.num_running + self.num_waiting

    def _prefix(self, request: EngineRequest) -> PrefixHashes | None:
        if not (self._config.prefix_cache and request.cache):
            return None
        identity = CacheIdentity(self._fingerprint, salt=request.cache_salt)
        return PrefixHashes(identity, self._pool.block_size)

    def _advance(self, job: _Job, token_id: int | None) -> None:
        """Add the sampled token to the job; None says that its logits were not finite."""
        job_id = job.request.job_id
        if token_id is None:
            position = len(job.output.token_ids)
            self._fail(
                job_id, Failure(job_id, "numerics", f"logits of output token {position} are not finite")
            )
            return
        text = job.output.append(token_id)
        job.sequence.token_ids.append(token_id)
        self._deltas[job_id] = _delta(job, num_new=1, text=text)
        if job.output.finish_reason is not None:
            self._remove(job_id)

    def _expire(self, now_ms: int) -> None:
        for job_id, job in list(self._jobs.items()):
            deadline_ms = job.request.deadline_ms
            if deadline_ms is not None and deadline_ms <= now_ms:
                message = f"the deadline {deadline_ms} ms has passed (now {now_ms} ms)"
                self._fail(job_id, Failure(job_id, "deadline", message))

    def _fail(self, job_id: str, failure: Failure) -> None:
        self._remove(job_id, forget=failure.code == "numerics")
        self._failures[job_id] = failure

    def _remove(self, job_id: str, *, forget: bool = False) -> None:
        self._scheduler.remove(self._jobs.pop(job_id).sequence, forget=forget)

    def _report(
        self, schedule: Schedule, *, schedule_s: float, forward_s: float, sample_s: float
    ) -> StepReport:
        self._num_steps += 1
        stats = StepStats(
            step=self._num_steps,
            job_ids=tuple(sequence.job_id for sequence in schedule.sequences),
            num_prefill_tokens=schedule.num_prefill_tokens,
            num_decode_tokens=schedule.num_decode_tokens,
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
        report = StepReport(tuple(self._deltas.values()), tuple(self._failures.values()), stats)
        self._deltas.clear()
        self._failures.clear()
        return report


def _replay(output: JobOutput, logged_token_ids: tuple[int, ...]) -> None:
    """Bring the output to where the log ends; its text has been told already."""
    for position, token_id in enumerate(logged_token_ids):
        if output.finish_reason is not None:
            raise InvalidJob(
                f"the log has {len(logged_token_ids)} output tokens, but the job ends after {position}"
            )
        output.append(token_id)


def _sampled_jobs(schedule: Schedule, jobs: dict[str, _Job]) -> list[_Job]:
    """The jobs of the logits' rows."""
    chunks = zip(schedule.sequences, schedule.chunks, strict=True)
    return [jobs[sequence.job_id] for sequence, chunk in chunks if chunk.num_logits]


def _draw(job: _Job) -> Draw:
    return Draw(
        sampling=job.request.sampling,
        seed=job.request.seed,
        position=len(job.output.token_ids),
        banned=job.output.banned_token_ids,
    )


def _delta(job: _Job, *, num_new: int, text: str) -> TokenDelta:
    output = job.output
    ended = output.finish_reason is not None
    return TokenDelta(
        job_id=job.request.job_id,
        offset=len(output.token_ids) - num_new,
        token_ids=tuple(output.token_ids[len(output.token_ids) - num_new :]),
        text=text,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        prompt_tokens=len(job.request.prompt_token_ids),
        output_tokens=len(output.token_ids),
        full_text=output.text if ended else None,
        full_token_ids=tuple(output.token_ids) if ended else None,
        cached_tokens=min(job.sequence.num_cached or 0, len(job.request.prompt_token_ids)),
    )
