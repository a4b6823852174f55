"""Which attempt uses which adapter, and who waits for room; everything here runs in the event loop's thread.

admitted ─→ lent ─→ given back when the attempt leaves the board
no room  ─→ waits ─→ admitted again whenever room may have come
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from chairlift_worker.models.adapter_shelf import AdapterShelf, Loan, NoRoom
from chairlift_worker.queue.admission import Admitted
from chairlift_worker.queue.attempts import Attempt


class Loans:
    """One for a worker; without a shelf there is never anything to do."""

    def __init__(self, shelf: AdapterShelf | None, retry: Callable[[Attempt, int], None]) -> None:
        """`retry` admits an attempt again, with its place in the boarding order."""
        self._shelf = shelf
        self._retry = retry
        self._lent: dict[str, Loan] = {}
        self._waiting: dict[str, tuple[Attempt, int]] = {}

    def lend(self, attempt: Attempt, loan: Loan) -> None:
        """The attempt rides with it."""
        self._lent[attempt.key] = loan
        self._retry_waiting()  # who was only behind this one

    def wait(self, attempt: Attempt, order: int, answer: NoRoom) -> None:
        """It was told NoRoom, some time ago: what was given back since has woken nobody up for it."""
        assert self._shelf is not None
        if self._shelf.num_changes == answer.num_changes:
            self._waiting[attempt.key] = (attempt, order)
        else:
            self._retry(attempt, order)

    def let_go(self, attempt: Attempt) -> None:
        """It leaves the board, whatever it has or waits for."""
        loan = self._lent.pop(attempt.key, None)
        if loan is not None:
            loan.give_back()
            self._retry_waiting()
        waiting = self._waiting.pop(attempt.key, None)
        if waiting is not None:
            self.give_up(waiting[1])

    def give_up(self, order: int) -> None:
        """Who had this place in the boarding order does not ask again."""
        if self._shelf is not None:
            self._shelf.give_up(order)
            self._retry_waiting()

    def came_too_late(self, order: int, done: asyncio.Future[Admitted]) -> None:
        """The attempt had left the board when its admission ended, in whatever way."""
        loan = None if done.exception() is not None else done.result().loan
        if loan is not None:
            loan.give_back()
        self.give_up(order)

    def _retry_waiting(self) -> None:
        """The longest waiting first; where there is no room yet, they come back."""
        waiting, self._waiting = self._waiting, {}
        for attempt, order in sorted(waiting.values(), key=lambda entry: entry[1]):
            self._retry(attempt, order)
