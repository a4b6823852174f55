"""What crosses the border between the service and the engine: frozen plain data, both ways."""

from __future__ import annotations

from typing import NamedTuple

from chairlift_client.errors import ConfigError
from chairlift_client.protocol import FailureCode, FinishReason, SamplingParams


class EngineConfig(NamedTuple):
    """How much one step may do."""

    max_num_seqs: int = 16
    max_step_tokens: int = 512
    """Token budget of a step over all sequences; at least max_num_seqs, so that nobody takes turns."""
    max_chunk_tokens: int = 256
    """Most tokens of one sequence in a step."""
    max_preemptions: int = 4
    """Preemptions of a job before it waits for room for its whole possible length."""
    prefix_cache: bool = True
    """Whether blocks are kept for jobs that begin alike."""

    def check(self) -> None:
        """ConfigError, with the numbers, where no schedule could keep its promises."""
        if self.max_num_seqs < 1:
            raise ConfigError(f"max_num_seqs is {self.max_num_seqs}; it must be at least 1")
        if self.max_chunk_tokens < 1:
            raise ConfigError(f"max_chunk_tokens is {self.max_chunk_tokens}; it must be at least 1")
        if self.max_preemptions < 0:
            raise ConfigError(f"max_preemptions is {self.max_preemptions}; it must not be negative")
        if self.max_step_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_step_tokens ({self.max_step_tokens}) is below max_num_seqs ({self.max_num_seqs}): "
                "each running job takes at least one token of every step"
            )


class EngineRequest(NamedTuple):
    """One attempt of a job."""

    job_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    logged_token_ids: tuple[int, ...] = ()
    """Output tokens that are in the job's log already: the job goes on after them."""
    deadline_ms: int | None = None
    """By the server's clock, as `Engine.step` is told it."""
    order: int = 0
    """Boarding order: smaller is older. It must grow from job to job."""
    cache: bool = True
    """Whether the job uses the prefix cache, and leaves its blocks there."""
    cache_salt: str = ""
    """Only jobs with the same salt share blocks."""


class TokenDelta(NamedTuple):
    """What one step added to one job."""

    job_id: str
    offset: int
    """Output tokens before `token_ids`; logged ones count."""
    token_ids: tuple[int, ...]
    """Includes tokens whose text is held back. Empty for a job whose logged tokens were complete."""
    text: str
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    """The stop string or stop id; None for an end-of-sequence token, or while the job goes on."""
    prompt_tokens: int
    output_tokens: int
    full_text: str | None = None
    """The whole text, set with `finish_reason`."""
    full_token_ids: tuple[int, ...] | None = None
    """All output tokens, set with `finish_reason`."""
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""


class Failure(NamedTuple):
    """A job that ended without a result. It holds nothing in the engine any more."""

    job_id: str
    code: FailureCode
    message: str


class StepStats(NamedTuple):
    """What a step did, for the log, the metrics and the demo."""

    step: int
    """Number of the step, from 1."""
    job_ids: tuple[str, ...]
    """The jobs that rode in it, oldest first."""
    num_prefill_tokens: int
    num_decode_tokens: int
    num_preemptions: int
    """Since the engine began."""
    num_running: int
    num_waiting: int
    num_owned_blocks: int
    """After the step."""
    num_blocks: int
    num_cached_blocks: int
    """Without an owner, but of use to a job that begins alike. After the step."""
    num_boarded_tokens: int
    """Tokens that jobs knew when they boarded, since the engine began …"""
    num_cached_tokens: int
    """… and those among them that the prefix cache had: their ratio is the hit rate."""
    schedule_s: float
    forward_s: float
    sample_s: float
    """Sampling and detokenizing."""

    @property
    def num_sequences(self) -> int:
        """Size of the step's batch."""
        return len(self.job_ids)


class StepReport(NamedTuple):
    """Everything the service has to tell the world after a step. A job has at most one delta or failure."""

    deltas: tuple[TokenDelta, ...]
    failures: tuple[Failure, ...]
    stats: StepStats
