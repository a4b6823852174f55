"""The figures of a chaos run."""

from __future__ import annotations

from collections import Counter

from chaos.cases import Case
from chaos.checker import Verdict
from chaos.faults import KILLS, Kind

WORDS = ("lost", "doubled", "wrong", "leaked", "died")


class Report:
    """Collects verdicts; `problems` has to stay empty."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.num_jobs = 0
        self.num_ties = 0
        self.outcomes: Counter[str] = Counter()
        self.faults: Counter[Kind] = Counter()
        self.errors: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.resume_ms: list[int] = []
        self.num_resumed = 0
        self.bytes_lost = 0

    def take(self, case: Case, verdict: Verdict, *, is_lossy: bool) -> None:
        """One job is judged. What a lossy server lost is counted, as long as the subscriber was told."""
        self.errors.update({f"stream: {name}": count for name, count in case.errors.items()})
        self.resume_ms += case.resume_ms
        self.num_resumed += any(type(event).__name__ == "Resumed" for event in case.heard)
        self.num_ties += verdict.is_tie
        if is_lossy and (case.is_rewound or case.is_gone):
            self.outcomes["lost by the server, and said so"] += 1
            return
        if is_lossy and case.is_over and verdict.is_absent:
            self.outcomes["lost by the server after its end"] += 1
            return
        self.outcomes[verdict.outcome] += 1
        self.problems += [f"{fault} [{case.job_id}, {case.ask}]" for fault in verdict.faults]

    def table(self) -> str:
        """All of it, for people."""
        num_faults = self.faults.total()
        kills = sum(count for kind, count in self.faults.items() if kind in KILLS)
        rows = [f"seed {self.seed}: {num_faults} faults, {100 * kills / max(num_faults, 1):.0f} % kills"]
        rows += [f"  {kind:16} {count:6}" for kind, count in sorted(self.faults.items())]
        rows += [f"{self.num_jobs} jobs, {self.num_resumed} resumed, {self.num_ties} parted at a tie"]
        rows += [f"  {outcome:32} {count:6}" for outcome, count in sorted(self.outcomes.items())]
        rows += [f"  {error:32} {count:6}" for error, count in sorted((self.errors + self.counts).items())]
        rows.append("  ".join(f"{word} {self._count(word)}" for word in WORDS))
        if self.bytes_lost:
            rows.append(f"the server lost {self.bytes_lost} bytes of its log")
        rows.append(f"kill to next token: {percentiles(self.resume_ms)}")
        return "\n".join([*rows, *(problem[:3000] for problem in self.problems[:20])])

    def _count(self, word: str) -> int:
        return sum(problem.startswith(f"{word}:") for problem in self.problems)


def percentiles(values_ms: list[int]) -> str:
    """p50, p99 and the largest."""
    if not values_ms:
        return "none"
    ordered = sorted(values_ms)
    p50, p99 = (ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.99))
    return f"p50 {p50} ms, p99 {p99} ms, longest {ordered[-1]} ms, of {len(ordered)}"
