"""How the running demo looks: a live screen in a terminal, plain lines everywhere else."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol, Self

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from chairlift_worker.demo.rides import Lift, Ride, RideState, StepNews

_MARKS: dict[RideState, tuple[str, str]] = {
    "waiting": ("○", "yellow"),
    "riding": ("●", "bold green"),
    "left": ("✓", "dim"),
}
_COLUMN_CELLS = (1, 1, 2, 26, 4)
"""Mark, letter, language, prompt, number of tokens; the text has the rest of the line."""
_FEWEST_TEXT_CELLS = 10
_FEWEST_STEPS = 4
_FRAMES_PER_S = 10


class Display(Protocol):
    """What the demo tells as it goes."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def submitted(self, ride: Ride) -> None:
        """A job stands in line."""

    def heard(self, ride: Ride) -> None:
        """The subscriber got an event of this job."""

    def stepped(self, news: StepNews) -> None:
        """The worker ran a step."""


class LiveDisplay:
    """Every job with the end of its text, and the last steps with who rode in them."""

    def __init__(self, console: Console, lift: Lift, num_jobs: int) -> None:
        self._console = console
        self._lift = lift
        self._num_jobs = num_jobs
        self._live = Live(
            get_renderable=self.__rich__,
            console=console,
            refresh_per_second=_FRAMES_PER_S,
            vertical_overflow="crop",
        )

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._live.stop()

    def submitted(self, ride: Ride) -> None:
        """Drawn with the next frame."""

    def heard(self, ride: Ride) -> None:
        """Drawn with the next frame."""

    def stepped(self, news: StepNews) -> None:
        """Drawn with the next frame."""

    def __rich__(self) -> RenderableType:
        """One frame."""
        width, height = self._console.size
        num_steps = max(_FEWEST_STEPS, height - self._num_jobs - 5)
        letters = [ride.prompt.name for ride in self._lift.rides.values()]
        steps = [step_line(news, letters) for news in self._lift.steps[-num_steps:]]
        return Group(self._headline(), self._jobs(width), Text("steps, newest last", style="bold"), *steps)

    def _headline(self) -> Text:
        counts = [f"{self._lift.count(state)} {state}" for state in ("waiting", "riding", "left")]
        return Text("jobs: " + ", ".join(counts), style="bold")

    def _jobs(self, width: int) -> Table:
        table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
        for cells in _COLUMN_CELLS:
            table.add_column(width=cells, no_wrap=True, overflow="ellipsis")
        text_cells = max(_FEWEST_TEXT_CELLS, width - sum(cells + 1 for cells in _COLUMN_CELLS) - 1)
        table.add_column(width=text_cells, no_wrap=True, overflow="crop")
        for ride in self._lift.rides.values():
            mark, style = _MARKS[ride.state]
            table.add_row(
                Text(mark, style=style),
                Text(ride.prompt.name, style="bold"),
                Text(ride.prompt.lang, style="cyan"),
                Text(one_line(ride.prompt.prompt), style="dim"),
                Text(str(ride.num_tokens), justify="right"),
                Text(last_cells(one_line(ride.text), text_cells)),
            )
        return table


class PlainDisplay:
    """A line whenever the batch changes, and each answer when it is whole."""

    def __init__(self, console: Console, lift: Lift) -> None:
        self._console = console
        self._lift = lift
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        return

    def submitted(self, ride: Ride) -> None:
        """One line."""
        self._say(f"{ride.prompt.name} submitted [{ride.prompt.lang}] {one_line(ride.prompt.prompt)[:70]}")

    def heard(self, ride: Ride) -> None:
        """One line when the job has ended."""
        if ride.state == "left":
            self._say(
                f"{ride.prompt.name} ended ({ride.ending}, {ride.num_tokens} tokens): {one_line(ride.text)}"
            )

    def stepped(self, news: StepNews) -> None:
        """One line where the batch is not the one before."""
        if news.joined or news.left:
            letters = [ride.prompt.name for ride in self._lift.rides.values()]
            self._say(step_line(news, letters).plain)

    def _say(self, line: str) -> None:
        self._console.print(f"{time.monotonic() - self._began:6.2f}s {escape(line)}", soft_wrap=True)


def step_line(news: StepNews, letters: list[str]) -> Text:
    """Each job has its column: who rides shows its letter, so that joining and leaving can be seen."""
    line = Text(f"step {news.record.step:>4}  ", style="dim")
    for letter in letters:
        style = "bold green" if letter in news.joined else "green"
        line.append(letter if letter in news.riding else "·", style=style if letter in news.riding else "dim")
    record = news.record
    line.append(
        f"  {len(news.riding):>2} jobs, {record.prefill_tokens + record.decode_tokens:>3} tokens", "default"
    )
    line.append(f", {record.used_blocks:>3}/{record.num_blocks} blocks", "default")
    if news.joined:
        line.append(f"  +{' '.join(news.joined)}", style="bold green")
    if news.left:
        line.append(f"  -{' '.join(news.left)}", style="bold red")
    return line


def one_line(text: str) -> str:
    """Without line breaks, for a row of a table."""
    return " ".join(text.split())


def last_cells(text: str, cells: int) -> str:
    """The end of `text` that fits into so many columns of the terminal."""
    start = max(0, len(text) - cells)
    while cell_len(text[start:]) > cells:
        start += 1
    return text[start:]
