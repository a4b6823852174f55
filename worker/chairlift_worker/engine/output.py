"""What a job has said so far: text, held-back text, and whether it is done.

A pure function of the sampling parameters, the structure and the output tokens. A resumed job appends its
logged tokens again and is then exactly where the undisturbed job was, held-back text included.
"""

from __future__ import annotations

from chairlift_client.protocol import FinishReason, SamplingParams
from chairlift_worker.engine.detokenizer import Detokenizer, TokenDecoder
from chairlift_worker.engine.grammar import GrammarState
from chairlift_worker.engine.stops import StopMatcher


class JobOutput:
    """One choice of a job.

    Endings, in this order: a stop id or end-of-sequence token (an output token without text), a stop
    string (the output ends with the token that completed it), a structure that is complete,
    `max_output_tokens` (0: it has ended before it began). None of the first `min_tokens` tokens can end it
    in the first two ways.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        decoder: TokenDecoder,
        *,
        eos_token_ids: frozenset[int],
        max_output_tokens: int,
        grammar: GrammarState | None = None,
    ) -> None:
        self._sampling = sampling
        self._max_output_tokens = max_output_tokens
        self._detokenizer = Detokenizer(decoder, skip_special_tokens=sampling.skip_special_tokens)
        self._stops = StopMatcher(sampling.stop, include_stop=sampling.include_stop)
        self._ending_ids = ending_token_ids(sampling, eos_token_ids)
        self._texts: list[str] = []
        self.grammar = grammar
        """How far the text has come in its structure."""
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = "length" if max_output_tokens == 0 else None
        self.stop_reason: str | int | None = None
        """The stop string or stop id that ended it; None for an end-of-sequence token."""

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._texts)

    @property
    def banned_token_ids(self) -> frozenset[int]:
        """Tokens that the next one must not be."""
        return frozenset() if self._may_end(len(self.token_ids) + 1) else self._ending_ids

    def append(self, token_id: int) -> str:
        """The text that became final with this token: everything that is left if it is the last.

        Raises GrammarError for a token that the structure does not permit.
        """
        assert self.finish_reason is None, "the output has ended"
        self.token_ids.append(token_id)
        text = self._absorb(token_id)
        if self.finish_reason is None and len(self.token_ids) >= self._max_output_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None and self._stops.matched is None:
            text += self._flush()
        self._texts.append(text)
        return text

    def _absorb(self, token_id: int) -> str:
        may_end = self._may_end(len(self.token_ids))
        if may_end and token_id in self._ending_ids:
            self.finish_reason = "stop"
            self.stop_reason = token_id if token_id in self._sampling.stop_token_ids else None
            return ""
        text = self._stops.append(self._detokenizer.append(token_id), may_match=may_end)
        self._note_match()
        if self.grammar is not None:
            self.grammar.accept(token_id)
            if self.grammar.is_complete and self.finish_reason is None:
                self.finish_reason = "stop"
        return text

    def _flush(self) -> str:
        """The incomplete character, which may complete a stop string, and the held-back text."""
        text = self._stops.append(self._detokenizer.flush(), may_match=self._may_end(len(self.token_ids)))
        self._note_match()
        return text + self._stops.flush()

    def _note_match(self) -> None:
        if self._stops.matched is not None:
            self.finish_reason, self.stop_reason = "stop", self._stops.matched

    def _may_end(self, num_tokens: int) -> bool:
        return num_tokens > self._sampling.min_tokens


def ending_token_ids(sampling: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end a job: its stop ids, and the model's end-of-sequence tokens unless ignored."""
    stop_ids = frozenset(sampling.stop_token_ids)
    return stop_ids if sampling.ignore_eos else stop_ids | eos_token_ids
