"""What is to be sent to Redis: kept in order until the server has answered it.

Everything in here may be sent twice (the operations answer `dup`), so after a lost connection the same
parcels simply go again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from chairlift_client.calls import Call
from chairlift_client.worker_operations import Emission, emit

Kind: TypeAlias = Literal["emit", "finish", "fail", "hand_back"]


class Parcel(NamedTuple):
    """One call and the attempts it is about, in the order of its answers."""

    kind: Kind
    keys: tuple[str, ...]
    call: Call[Any]


class _Queue:
    def __init__(self) -> None:
        self.emissions: list[tuple[str, Emission]] = []
        self.endings: list[Parcel] = []


class Outbox:
    """Events and endings by partition, until they are taken into a pipeline."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._queues: dict[str, _Queue] = defaultdict(_Queue)

    def emit(self, prefix: str, key: str, emission: Emission) -> None:
        """Log and publish one event."""
        self._queues[prefix].emissions.append((key, emission))

    def end(self, prefix: str, parcel: Parcel) -> None:
        """End attempts; goes behind the events that stand in the box."""
        self._queues[prefix].endings.append(parcel)

    def take(self, prefixes: Sequence[str]) -> list[Parcel]:
        """Everything for these partitions: one emit call each, then the endings."""
        parcels: list[Parcel] = []
        for prefix in prefixes:
            queue = self._queues.pop(prefix, None)
            if queue is None:
                continue
            if queue.emissions:
                keys = tuple(key for key, _ in queue.emissions)
                call = emit(prefix, self._worker, [emission for _, emission in queue.emissions])
                parcels.append(Parcel("emit", keys, call))
            parcels.extend(queue.endings)
        return parcels

    def holds(self, prefixes: Sequence[str]) -> bool:
        """Whether anything waits for one of these partitions."""
        return any(prefix in self._queues for prefix in prefixes)
