"""Which extra brings a command of another part: found by entry point, said without what any extra brings."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points

GROUP = "chairlift.commands"

_EXTRAS = (
    ("chairlift_worker.demo", "demo"),
    ("chairlift_worker", "worker"),
    ("chairlift_gateway", "gateway"),
)


def commands() -> list[EntryPoint]:
    """The commands that other parts bring, in the order of their names; none of them is loaded."""
    return sorted(entry_points(group=GROUP), key=lambda entry: entry.name)


def extra_of(entry: EntryPoint) -> str:
    """The extra that brings a command, by the package it lives in."""
    for package, extra in _EXTRAS:
        if entry.module == package or entry.module.startswith(f"{package}."):
            return extra
    return entry.name


def needs_extra(entry: EntryPoint, missing: str) -> str:
    """What to say when a command lacks the module `missing`."""
    extra = extra_of(entry)
    return (
        f"`{entry.name}` needs the extra [{extra}] ({missing} is not installed): "
        f"pip install 'chairlift[{extra}]'"
    )


def needs_cli(arguments: Sequence[str], missing: str) -> str:
    """What to say when there is no command line at all: a command of another part names its own extra."""
    for entry in commands():
        if entry.name in arguments[:1]:
            return needs_extra(entry, missing)
    return "the command line needs the extra [cli]: pip install 'chairlift[cli]'"
