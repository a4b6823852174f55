"""What a step's rows of logits are for: judging a prompt's tokens, or yielding the next token of a choice.

chunk of a prompt that is judged    [ judge judge judge ]
last chunk of it                    [ judge judge yield ]
any other sequence                  [                 yield ]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from chairlift_client.protocol import FailureCode
from chairlift_worker.engine.grammar import GrammarError
from chairlift_worker.engine.job import Choice, Job, NothingAllowed
from chairlift_worker.engine.prompt_logprobs import NotFinite
from chairlift_worker.engine.request import Failure
from chairlift_worker.engine.sampler import Draw, sample
from chairlift_worker.engine.scheduler import Schedule


class Seat(NamedTuple):
    """Whose sequence it is."""

    job: Job
    choice: Choice


class Row(NamedTuple):
    """A row of logits that yields a token."""

    seat: Seat
    place: int
    draw: Draw


class Heard(NamedTuple):
    """Rows to draw from, and jobs that cannot go on."""

    rows: list[Row]
    failures: list[Failure]


def hear(schedule: Schedule, seats: Mapping[str, Seat], logits: Tensor) -> Heard:
    """Take in the logits of prompts, and find the rows that yield a token with how to draw it."""
    heard = Heard([], [])
    end = 0
    for sequence, chunk in zip(schedule.sequences, schedule.chunks, strict=True):
        start, end = end, end + chunk.num_logits
        seat, position = seats[sequence.job_id], chunk.start + len(chunk.token_ids)
        try:
            _hear_prompt(seat, logits[start:end], position - chunk.num_logits)
            if position == len(sequence.token_ids) and seat.choice.is_live:
                heard.rows.append(Row(seat, end - 1, seat.job.draw(seat.choice)))
        except NotFinite as error:
            heard.failures.append(failure(seat, "numerics", str(error)))
        except (NothingAllowed, GrammarError) as error:
            heard.failures.append(failure(seat, "invalid", str(error)))
    return heard


def draw_tokens(logits: Tensor, rows: list[Row]) -> list[int | None]:
    """A token for each row; None where its logits are not finite."""
    if not rows:
        return []
    indices = [row.place for row in rows]
    picked = logits if len(indices) == len(logits) else logits[indices]
    return sample(picked, [row.draw for row in rows])


def failure(seat: Seat, code: FailureCode, message: str) -> Failure:
    """The job of this seat ends without a result."""
    return Failure(seat.job.request.job_id, code, message)


def _hear_prompt(seat: Seat, rows: Tensor, start: int) -> None:
    prompt = seat.job.prompt
    if prompt is not None and len(rows):
        prompt.hear(rows, start)
        seat.choice.sequence.logits_from = prompt.logits_from
