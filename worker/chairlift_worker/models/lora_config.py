"""What adapter_config.json says of a LoRA adapter (arXiv 2106.09685), as PEFT writes it."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from chairlift_client.errors import ModelError
from chairlift_worker.models.checkpoint import read_json

CONFIG_FILE = "adapter_config.json"
_ALL = "all-linear"
_Rank = Annotated[int, Meta(ge=1)]
T = TypeVar("T")


class LoraConfig(Struct, frozen=True, kw_only=True):
    """The fields that decide what an adapter computes. Names of modules as in the base model's checkpoint."""

    r: _Rank
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, _Rank] = {}
    alpha_pattern: dict[str, float] = {}
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None

    def rank_of(self, module: str) -> int:
        """The rank of a module's matrices."""
        return _matching(self.rank_pattern, module, self.r)

    def scale_of(self, module: str) -> float:
        """What B · A is multiplied by."""
        rank = self.rank_of(module)
        alpha = _matching(self.alpha_pattern, module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)  # arXiv 2312.03732

    def asks_for(self, module: str, layer: int) -> bool:
        """Whether there have to be tensors for a module; where targets are patterns, only tensors tell."""
        if self.exclude_modules or self.layers_pattern or not self.target_modules:
            return False
        layers = self.layers_to_transform
        if layers not in (None, []) and layer not in ([layers] if isinstance(layers, int) else layers or ()):
            return False
        if isinstance(self.target_modules, str):
            return self.target_modules == _ALL
        return any(_is_named(module, target) for target in self.target_modules)


_READ = frozenset(LoraConfig.__struct_fields__) | {"peft_type", "bias", "init_lora_weights"}
_OF_TRAINING = frozenset(
    {"task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"}
    | {"lora_dropout", "fan_in_fan_out", "megatron_core", "loftq_config", "eva_config", "corda_config"}
    | {"lora_ga_config", "qalora_group_size", "runtime_config", "ensure_weight_tying"}
)
"""Without effect on what a trained adapter of a decoder computes."""
_LEAVE_THE_BASE_ALONE = (None, True, False, "gaussian", "eva", "orthogonal")
"""Beginnings of a training that do not change the base model's own weights."""
_PLAIN = re.compile(r"\^?[A-Za-z0-9_.]+")


def read_lora_config(folder: Path) -> LoraConfig:
    """ModelError, which names the field and its value, for what is malformed or not supported."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ModelError(f"it has no {CONFIG_FILE}")
    given = read_json(path)
    for field, value in given.items():
        _check_supported(field, value)
    known = {field: value for field, value in given.items() if field in LoraConfig.__struct_fields__}
    for field in ("rank_pattern", "alpha_pattern"):
        known[field] = _plain(field, known.get(field) or {})
    try:
        config = msgspec.convert(known, LoraConfig)
    except msgspec.ValidationError as error:
        raise ModelError(f"{CONFIG_FILE}: {error}") from error
    for alpha in (config.lora_alpha, *config.alpha_pattern.values()):
        if not math.isfinite(alpha):
            raise ModelError(f"{CONFIG_FILE}: lora_alpha is {alpha}")
    return config


def _check_supported(field: str, value: object) -> None:
    match field:
        case "peft_type":
            is_supported = value == "LORA"
        case "bias":
            is_supported = value in ("none", None)
        case "init_lora_weights":
            is_supported = value in _LEAVE_THE_BASE_ALONE
        case _:
            is_supported = field in _READ | _OF_TRAINING or not value
    if not is_supported:
        raise ModelError(f"{CONFIG_FILE}: {field} = {str(value)[:100]} is not supported")


def _plain(field: str, patterns: Any) -> Any:
    """Keys without the escapes of a regular expression; one that is more than a name is refused."""
    if not isinstance(patterns, dict):
        return patterns
    plain = {key.replace("\\.", "."): value for key, value in patterns.items()}
    for key in plain:
        if not _PLAIN.fullmatch(key):
            raise ModelError(f"{CONFIG_FILE}: {field} has {key[:100]!r}; only names of modules are supported")
    return plain


def _matching(patterns: dict[str, T], module: str, otherwise: T) -> T:
    """The value of the first pattern that the module has, as PEFT takes it."""
    return next((value for key, value in patterns.items() if _is_named(module, key)), otherwise)


def _is_named(module: str, name: str) -> bool:
    """Whether `name` is the module's, or the end of it."""
    return module == name.removeprefix("^") or (name[:1] != "^" and module.endswith(f".{name}"))
