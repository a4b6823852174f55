"""What crosses the border between the service and the engine: frozen plain data, both ways."""

from __future__ import annotations

from typing import NamedTuple

from chairlift_client.errors import ConfigError
from chairlift_client.protocol import FailureCode, FinishReason, JobClass, SamplingParams, TokenLogprobs
from chairlift_worker.engine.adapter import Adapter
from chairlift_worker.engine.grammar import Grammar


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
    max_prefill_tokens: int = 0
    """Most prompt tokens of a step in which others decode; 0 is max_step_tokens."""
    target_itl_s: float = 0.0
    """If set, prompt tokens beside decodes are chosen so that a step takes no longer."""

    def check(self) -> None:
        """ConfigError, with the numbers, where no schedule could keep its promises."""
        if self.max_num_seqs < 1:
            raise ConfigError(f"max_num_seqs is {self.max_num_seqs}; it must be at least 1")
        if self.max_chunk_tokens < 1:
            raise ConfigError(f"max_chunk_tokens is {self.max_chunk_tokens}; it must be at least 1")
        if self.max_preemptions < 0:
            raise ConfigError(f"max_preemptions is {self.max_preemptions}; it must not be negative")
        if self.max_prefill_tokens < 0 or self.target_itl_s < 0:
            raise ConfigError(
                f"max_prefill_tokens is {self.max_prefill_tokens} and target_itl_s {self.target_itl_s}; "
                "they must not be negative"
            )
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
    """Output tokens of the first choice that are in the job's log already: the job goes on after them."""
    deadline_ms: int | None = None
    """By the server's clock, as `Engine.step` is told it."""
    order: int = 0
    """Boarding order: smaller is older. It must grow from job to job."""
    cache: bool = True
    """Whether the job uses the prefix cache, and leaves its blocks there."""
    cache_salt: str = ""
    """Only jobs with the same salt share blocks."""
    job_class: JobClass = "normal"
    submitted_ms: int = 0
    """By the server's clock. With class and deadline it says when the job is due."""
    more_logged_token_ids: tuple[tuple[int, ...], ...] = ()
    """The same as `logged_token_ids`, of the choices after the first."""
    prompt_is_told: bool = False
    """The log holds the prompt's logprobs, if they were asked for."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Runs of tokens that must not come to stand in the output."""
    grammar: Grammar | None = None
    """The structure that the text must have."""
    adapter: Adapter | None = None
    """What it is computed with on top of the model."""


class TokenDelta(NamedTuple):
    """What one step added to one choice of a job."""

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
    choice: int = 0
    """Index of the choice."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `token_ids`, where the job asked for them."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """Of the prompt's tokens, in the job's first delta, where it asked for them."""


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
    num_sequences: int
    """Size of its batch: a job rides with one sequence for each choice."""
    num_prefill_tokens: int
    num_decode_tokens: int
    num_context_tokens: int
    """Tokens that its sequences attend to, together."""
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
    def hit_rate(self) -> float:
        """Part of the boarding jobs' tokens that the prefix cache had, since the engine began."""
        return self.num_cached_tokens / max(1, self.num_boarded_tokens)


class StepReport(NamedTuple):
    """Everything the service has to tell the world after a step.

    A choice has at most one delta, a job at most one failure, and then no deltas in the same step.
    """

    deltas: tuple[TokenDelta, ...]
    failures: tuple[Failure, ...]
    stats: StepStats
    ended: tuple[str, ...] = ()
    """Jobs of which every choice is complete now: `deltas` has the last that there is to tell of them."""
