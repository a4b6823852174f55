"""How a job's tokens are chosen, when it stops, and what form its text must have.

What is done to a row of logits, in this order (`docs/sampling.md` says it at length):

    repetition penalty → presence and frequency penalty → logit_bias → bans and permissions
    → temperature → top_k → top_p → min_p → typical_p → draw
"""

from __future__ import annotations

from typing import Any, TypeAlias

from msgspec import Struct


class SamplingParams(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How tokens are chosen and when to stop.

    Length: `max_tokens` None means as many as the context has room for, 0 no output at all: the job ends
    with `length`, after its prompt logprobs if those are asked for. `min_tokens` bans every ending but
    `length` before that many tokens. `truncate_prompt` keeps only the last so many tokens of the prompt.

    Choices: `n` outputs of one prompt. With `best_of` that many are made, and the `n` with the largest
    mean logprob are kept: nothing of them is streamed before the last one has ended.

    Filters: `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0 and `typical_p` 1 switch these
    filters off. `seed` None lets the client draw one, so that every job can be repeated.

    Penalties are computed from tokens, never from what a step happens to compute: `repetition_penalty`
    (1 is off; Keskar et al. 2019) divides positive and multiplies negative logits of all tokens of prompt
    and output; `presence_penalty` is subtracted once and `frequency_penalty` once for each occurrence of
    a token in the output.

    Bans: `logit_bias` is added to logits. Only `allowed_token_ids` can be drawn (None: all),
    `banned_token_ids` cannot, and no tokenization of one of `bad_words` is ever completed.

    Endings: a stop string ends the text just before it unless `include_stop`; a stop id or an
    end-of-sequence token counts as an output token and adds no text.

    Logprobs are of the model's own distribution, before everything above: `logprobs` k gives the chosen
    token's and the k most likely ones for every output token, `prompt_logprobs` the same for the prompt.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    truncate_prompt: int | None = None
    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def num_choices(self) -> int:
        """Outputs that are made, whether or not they are kept."""
        return self.n if self.best_of is None else self.best_of


class JsonSchema(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="json_schema", tag_field="type"):
    """The text is a JSON value that the schema permits; `True` or `{}` permits any."""

    schema: dict[str, Any] | bool


class Regex(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="regex", tag_field="type"):
    """The whole text matches the pattern: Rust's regular expressions, without look-around."""

    pattern: str


class Grammar(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="grammar", tag_field="type"):
    """The text is a sentence of a grammar, which is written in Lark's EBNF and begins at `start`."""

    grammar: str


class OneOf(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="choice", tag_field="type"):
    """The text is one of these."""

    options: tuple[str, ...]


Structured: TypeAlias = JsonSchema | Regex | Grammar | OneOf
