"""The rotations of a model's queries and keys, read from its transformers config."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from chairlift_client.errors import ModelError
from chairlift_worker.models.architectures import architecture_name

ONLY = "all layers"
"""The name of a model's rotation if it has just one."""

_FIXED_TYPES = frozenset({"default", "dynamic", "linear", "llama3", "yarn"})
"""Those whose frequencies do not depend on how long a sequence has become, within the model's context."""


class Rope(NamedTuple):
    """One way to rotate (arXiv 2104.09864)."""

    frequencies: Tensor
    """Angle per position of each pair of dimensions, float32 [R / 2]."""
    factor: float
    """On cosine and sine (yarn, arXiv 2309.00071)."""


def rope_parameters(config: PreTrainedConfig) -> dict[str, dict[str, Any]]:
    """The settings of each rotation by its name: a layer type, or `ONLY`.

    ModelError for one that the lean decoder does not know.
    """
    given: dict[str, Any] = config.rope_parameters
    by_name = given if all(isinstance(entry, dict) for entry in given.values()) else {ONLY: given}
    for parameters in by_name.values():
        if parameters["rope_type"] not in _FIXED_TYPES:
            name, known = architecture_name(config), ", ".join(sorted(_FIXED_TYPES))
            kind = parameters["rope_type"]
            raise ModelError(f"{name} with rope type {kind!r}: the lean decoder knows only {known}")
    return by_name


def read_ropes(config: PreTrainedConfig, rotated_dim: int) -> dict[str, Rope]:
    """Every rotation by its name; `rotated_dim` dimensions R of a head are rotated."""
    return {
        name: _read_rope(config, None if name == ONLY else name, parameters, rotated_dim)
        for name, parameters in rope_parameters(config).items()
    }


def _read_rope(
    config: PreTrainedConfig, layer_type: str | None, parameters: dict[str, Any], rotated_dim: int
) -> Rope:
    if parameters["rope_type"] == "default":
        exponents = torch.arange(0, rotated_dim, 2, dtype=torch.float32) / rotated_dim
        return Rope(1.0 / parameters["rope_theta"] ** exponents, 1.0)
    read = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    frequencies, factor = read(config, torch.device("cpu"), layer_type=layer_type)
    return Rope(frequencies, float(factor))
