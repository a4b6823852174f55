"""A job inside the engine: one sequence for each choice, and what the choices share."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from chairlift_client.errors import InvalidJob
from chairlift_client.protocol import TokenLogprobs
from chairlift_worker.engine.admission import max_output_tokens
from chairlift_worker.engine.bans import StandingBans
from chairlift_worker.engine.detokenizer import TokenDecoder
from chairlift_worker.engine.due import due_ms
from chairlift_worker.engine.grammar import GrammarError
from chairlift_worker.engine.output import JobOutput
from chairlift_worker.engine.penalties import TokenCounts, has_penalties
from chairlift_worker.engine.prefix import PrefixHashes
from chairlift_worker.engine.prompt_logprobs import PromptLogprobs
from chairlift_worker.engine.request import EngineRequest, TokenDelta
from chairlift_worker.engine.runner import RunnerSpec
from chairlift_worker.engine.sampler import Draw
from chairlift_worker.engine.sequence import Sequence

MAX_CHOICES = 1024
"""Choices of one job that its boarding order leaves room for; far more than anybody may ask for."""


class NothingAllowed(Exception):
    """The bans of a job leave no token to draw."""


@dataclass(slots=True, eq=False)
class Choice:
    """One output of a job."""

    index: int
    sequence: Sequence
    output: JobOutput
    counts: TokenCounts | None
    """Kept where the job has penalties."""

    @property
    def is_live(self) -> bool:
        """It goes on."""
        return self.output.finish_reason is None

    def append(self, token_id: int) -> str:
        """One more output token; the text that became final with it. Raises GrammarError."""
        text = self.output.append(token_id)
        self.sequence.token_ids.append(token_id)
        if self.counts is not None:
            self.counts.append(token_id)
        return text


@dataclass(slots=True, eq=False)
class Job:
    """Mutable; the engine's alone."""

    request: EngineRequest
    choices: tuple[Choice, ...]
    bans: StandingBans
    vocab_size: int
    prompt: PromptLogprobs | None
    """What is still to be told of the prompt's tokens."""
    held_back: list[Choice] = field(default_factory=list)
    """Choices that board when the first one has computed what they share."""

    @property
    def has_ended(self) -> bool:
        """Every choice is complete, and everything of the prompt is told."""
        return self.prompt is None and not any(choice.is_live for choice in self.choices)

    @property
    def num_top_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told beside the chosen one; None: not even its own logprob."""
        sampling = self.request.sampling
        if sampling.logprobs is None and sampling.best_of is not None:
            return 0  # which ones are kept is decided by logprobs
        return sampling.logprobs

    @property
    def num_live(self) -> int:
        """Choices that go on, on board or held back."""
        return sum(choice.is_live for choice in self.choices)

    def draw(self, choice: Choice) -> Draw:
        """How to choose the next token. Raises NothingAllowed and GrammarError."""
        output = choice.output
        bans = self.bans.after(output.token_ids, output.banned_token_ids, output.grammar)
        if bans.leave_none(self.vocab_size):
            raise NothingAllowed(f"no token is allowed to be output token {len(output.token_ids)}")
        return Draw(
            sampling=self.request.sampling,
            seed=self.request.seed,
            position=len(output.token_ids),
            banned=bans.banned,
            choice=choice.index,
            allowed=bans.allowed,
            counts=choice.counts,
        )

    def delta(self, choice: Choice, *, num_new: int, text: str, logprobs: Seq[TokenLogprobs]) -> TokenDelta:
        """What the choice's last `num_new` tokens added; the first one takes the prompt's logprobs along."""
        output = choice.output
        ended = output.finish_reason is not None
        prompt, self.prompt = self.prompt, None
        num_prompt = len(self.request.prompt_token_ids)
        return TokenDelta(
            job_id=self.request.job_id,
            offset=len(output.token_ids) - num_new,
            token_ids=tuple(output.token_ids[len(output.token_ids) - num_new :]),
            text=text,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            prompt_tokens=num_prompt,
            output_tokens=len(output.token_ids),
            full_text=output.text if ended else None,
            full_token_ids=tuple(output.token_ids) if ended else None,
            cached_tokens=min(self.choices[0].sequence.num_cached or 0, num_prompt),
            choice=choice.index,
            logprobs=tuple(logprobs),
            prompt_logprobs=None if prompt is None else prompt.logprobs,
        )


def make_job(
    request: EngineRequest,
    spec: RunnerSpec,
    decoder: TokenDecoder,
    make_prefix: Callable[[EngineRequest], PrefixHashes | None],
) -> Job:
    """The job as it stands after its logged tokens. InvalidJob, with the numbers, if it can never run."""
    max_tokens = max_output_tokens(request, spec)
    logged = logged_outputs(request)
    choices = tuple(
        _replayed(
            _make_choice(index, request, spec, decoder, max_tokens, make_prefix(request)), logged[index]
        )
        for index in range(request.sampling.num_choices)
    )
    prompt = None
    if request.sampling.prompt_logprobs is not None and not request.prompt_is_told:
        prompt = PromptLogprobs(request.prompt_token_ids, request.sampling.prompt_logprobs)
    return Job(
        request=request,
        choices=choices,
        bans=StandingBans(request.sampling, request.bad_words, spec.vocab_size),
        vocab_size=spec.vocab_size,
        prompt=prompt,
    )


def logged_outputs(request: EngineRequest) -> tuple[tuple[int, ...], ...]:
    """The logged tokens of every choice."""
    known = (request.logged_token_ids, *request.more_logged_token_ids)
    return known + ((),) * (request.sampling.num_choices - len(known))


def _make_choice(
    index: int,
    request: EngineRequest,
    spec: RunnerSpec,
    decoder: TokenDecoder,
    max_tokens: int,
    prefix: PrefixHashes | None,
) -> Choice:
    output = JobOutput(
        request.sampling,
        decoder,
        eos_token_ids=spec.eos_token_ids,
        max_output_tokens=max_tokens,
        grammar=None if request.grammar is None else request.grammar.begin(),
    )
    sequence = Sequence(
        job_id=request.job_id if index == 0 else f"{request.job_id}#{index}",
        order=request.order * MAX_CHOICES + index,
        due_ms=due_ms(request.job_class, request.submitted_ms, request.deadline_ms),
        token_ids=list(request.prompt_token_ids),
        num_prompt=len(request.prompt_token_ids),
        max_total_tokens=len(request.prompt_token_ids) + max(max_tokens, 1),
        prefix=prefix,
        adapter=request.adapter,
    )
    counts = TokenCounts(request.prompt_token_ids) if has_penalties(request.sampling) else None
    return Choice(index, sequence, output, counts)


def _replayed(choice: Choice, logged_token_ids: tuple[int, ...]) -> Choice:
    """Brought to where the log ends; its text has been told already."""
    for position, token_id in enumerate(logged_token_ids):
        if not choice.is_live:
            raise InvalidJob(
                f"the log has {len(logged_token_ids)} output tokens, but the job ends after {position}"
            )
        try:
            choice.append(token_id)
        except GrammarError as error:
            raise InvalidJob(f"logged output token {position} does not fit the structure: {error}") from error
    return choice
