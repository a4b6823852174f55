"""What the engine asks of a structure that a text must have; structured/ fulfils it.

A state is a pure function of the grammar and the tokens accepted so far, so that a resumed job gets it back
by accepting its logged tokens again.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class GrammarError(Exception):
    """The grammar cannot go on: a token it does not permit, or more work than its limits allow."""


class GrammarState(Protocol):
    """How far one text has come in its structure."""

    @property
    def is_complete(self) -> bool:
        """Nothing may follow any more."""
        ...

    def allowed(self) -> Tensor:
        """Which tokens may come next, [vocab_size] bool on the CPU; ends of sequence where the text may end.

        Raises GrammarError.
        """
        ...

    def accept(self, token_id: int) -> None:
        """The text goes on with this token. Raises GrammarError for one that is not allowed."""
        ...


class Grammar(Protocol):
    """A compiled structure, of use to any number of texts."""

    def begin(self) -> GrammarState:
        """The state of an empty text."""
        ...
