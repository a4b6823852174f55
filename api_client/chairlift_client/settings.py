"""Settings in layers: flags over the environment (`CHAIRLIFT_*`) over a TOML file over defaults.

A command describes its settings as a frozen msgspec struct; every value is checked against the field's
type where it comes from, so that a message can name the flag, the variable or the file.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from chairlift_client.address import redact
from chairlift_client.errors import ConfigError

S = TypeVar("S", bound=Struct)

ENVIRONMENT_PREFIX = "CHAIRLIFT_"
DEFAULT_FILE = Path("chairlift.toml")

_SECRET = re.compile(r"password|secret|token$|_key$|credential")
# Kubernetes sets these for a service that is called "chairlift"; nobody means a setting by them.
_FROM_KUBERNETES = re.compile(r"(\w+_)?SERVICE_(HOST|PORT\w*)|(\w+_)?PORT(_\d+_\w+)?")
_NO_SETTINGS = frozenset({"CONFIG", "DATA"})


class _Value(NamedTuple):
    """One value as it was given. `is_text`: it comes from the environment and has yet to be read."""

    field: str
    value: Any
    source: str
    is_text: bool = False


def find_file(flag: str | Path | None, environ: Mapping[str, str]) -> Path | None:
    """The TOML file to read: `--config`, else `CHAIRLIFT_CONFIG`, else `chairlift.toml` if it is there."""
    named = flag or environ.get(f"{ENVIRONMENT_PREFIX}CONFIG")
    if named is None:
        return DEFAULT_FILE if DEFAULT_FILE.is_file() else None
    return Path(named)


def load_settings(
    struct_type: type[S],
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    toml_path: Path | None,
    *,
    section: str = "",
    shared: bool = False,
) -> S:
    """The settings of a command.

    `flags` by field name; None stands for a flag that was not given. In the file, the fields stand at the
    top or in the table `section`; other tables are other commands' affair. A `shared` command uses a file
    and an environment that were made for others too: there, an unknown name outside its own table is
    refused only when it looks like a misspelled one.
    Raises ConfigError, which names the field, where its value came from and, unless secret, the value.
    """
    known = [field.name for field in msgspec.structs.fields(struct_type)]
    layers = (
        _from_file(toml_path, section, known, shared),
        _from_environment(environ, known, shared),
        _from_flags(flags, known),
    )
    types = {field.name: field.type for field in msgspec.structs.fields(struct_type)}
    values = {given.field: _convert(given, types[given.field]) for layer in layers for given in layer}
    return _build(struct_type, values)


def _from_file(path: Path | None, section: str, known: Collection[str], shared: bool) -> Iterator[_Value]:
    if path is None:
        return
    table = _read_toml(path)
    own = table.pop(section, {}) if section else {}
    if not isinstance(own, dict):
        raise ConfigError(f"{path}: `{section}` has to be a table, [{section}]")
    for field, value in table.items():
        if field in known:
            yield _Value(field, value, f"{path}")
        elif not isinstance(value, dict) and (not shared or _nearest(field, known)):
            raise _unknown(field, f"{path}", known)
    for field, value in own.items():
        if field not in known:
            raise _unknown(field, f"{path} [{section}]", known)
        yield _Value(field, value, f"{path} [{section}]")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _from_environment(environ: Mapping[str, str], known: Collection[str], shared: bool) -> Iterator[_Value]:
    for variable, value in environ.items():
        name = variable.removeprefix(ENVIRONMENT_PREFIX)
        if name == variable or name in _NO_SETTINGS:
            continue
        if name.lower() in known and name.isupper():
            yield _Value(name.lower(), value, variable, is_text=True)
        elif not _FROM_KUBERNETES.fullmatch(name) and (not shared or _nearest(name.lower(), known)):
            raise _unknown(name.lower(), "the environment", known, spelled=variable)


def _from_flags(flags: Mapping[str, object], known: Collection[str]) -> Iterator[_Value]:
    for field, value in flags.items():
        if field not in known:
            raise _unknown(field, "the flags", known)
        if value is not None:
            yield _Value(field, value, f"--{field.replace('_', '-')}")


def _convert(given: _Value, field_type: Any) -> Any:
    value = given.value
    if given.is_text and _is_sequence(field_type):
        value = [part.strip() for part in value.split(",") if part.strip()]
    try:
        return msgspec.convert(value, field_type, strict=not given.is_text)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(
            f"{given.source}: {given.field} = {_shown(given.field, given.value)}: {error}"
        ) from None


def _is_sequence(field_type: Any) -> bool:
    described = msgspec.inspect.type_info(field_type)
    kinds = described.types if isinstance(described, msgspec.inspect.UnionType) else (described,)
    sequences = (msgspec.inspect.ListType, msgspec.inspect.VarTupleType, msgspec.inspect.SetType)
    return any(isinstance(kind, (*sequences, msgspec.inspect.FrozenSetType)) for kind in kinds)


def _shown(field: str, value: object) -> str:
    """A value fit for messages: a secret is left out, and a URL keeps only its host."""
    if _SECRET.search(field):
        return "(hidden)"
    if isinstance(value, str) and "://" in value:
        return repr(redact(value))
    return repr(value)[:200] if "url" not in field else "(hidden)"


def _build(struct_type: type[S], values: dict[str, Any]) -> S:
    missing = [
        field.name
        for field in msgspec.structs.fields(struct_type)
        if field.required and field.name not in values
    ]
    if missing:
        ways = ", ".join(
            f"{name} (--{name.replace('_', '-')} or {ENVIRONMENT_PREFIX}{name.upper()})" for name in missing
        )
        raise ConfigError(f"missing settings: {ways}")
    try:
        return struct_type(**values)
    except ValueError as error:  # a check across fields, in __post_init__
        raise ConfigError(str(error)) from error


def _nearest(name: str, known: Collection[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.75)), None)


def _unknown(name: str, source: str, known: Collection[str], *, spelled: str = "") -> ConfigError:
    nearest = _nearest(name.replace("-", "_"), known)
    if nearest is not None and spelled:
        nearest = f"{ENVIRONMENT_PREFIX}{nearest.upper()}"
    hint = f"did you mean `{nearest}`?" if nearest else f"known are: {', '.join(sorted(known))}"
    return ConfigError(f"unknown setting `{spelled or name}` in {source}; {hint}")
