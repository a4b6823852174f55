"""The Lua side of the protocol: the files of this folder, joined in name order into one function library.

The library's name carries a hash of its source. Another version never replaces it: workers and clients of
two versions work on one server side by side, each calling its own functions.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources


@cache
def version() -> str:
    """Eight hex digits that name this library."""
    return hashlib.blake2b(_body().encode(), digest_size=4).hexdigest()


@cache
def source() -> str:
    """What FUNCTION LOAD takes."""
    return f"#!lua name=chairlift_{version()}\nlocal VERSION = '{version()}'\n{_body()}"


@cache
def _body() -> str:
    files = sorted(
        (file for file in resources.files(__name__).iterdir() if file.name.endswith(".lua")),
        key=lambda file: file.name,
    )
    return "\n".join(file.read_text(encoding="utf-8") for file in files)
