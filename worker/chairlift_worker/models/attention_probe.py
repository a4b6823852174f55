"""One forward of a few tokens at load, that finds out what a model's attention layers ask for.

Configs name head counts, windows and scales differently in every family, or not at all; what the
layers hand to the attention interface is the truth. The probe answers with each token's own value,
as if no token saw another, so that anything that still passes between tokens shows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from chairlift_worker.models.architectures import architecture_name, context_tokens, unsupported

_IMPLEMENTATION = "chairlift_probe"
_FOUND = "chairlift_attention_calls"
_TOKENS = (3, 4, 5)
"""Any would do that are not padding, which some models count positions by."""
_NUM_TOKENS, _POISONED = len(_TOKENS), 1

_NO_WINDOW, _UNKNOWN_MASK = 0, -1

_UNDERSTOOD = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})
_HARMLESS = frozenset(
    {"dropout", "position_ids", "position_embeddings", "hidden_states", "is_causal", "use_cache"}
    | {"deterministic", "output_attentions", "output_hidden_states", "return_dict", "logits_to_keep"}
)


class AttentionCall(NamedTuple):
    """What one layer handed to the attention interface; tensors are [1, heads, tokens, head dim]."""

    query_shape: tuple[int, ...]
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    window: int | None
    arguments: frozenset[str]
    """Names of the arguments that change the result."""


class AttentionLayer(NamedTuple):
    """An attention module and the pages it needs: per token K and V of [num_kv_heads, head_dim]."""

    module: nn.Module
    num_kv_heads: int
    head_dim: int
    window: int | None
    """A token sees this many positions, its own included; None: all before it."""


class ProbeResult(NamedTuple):
    """What the engine cannot know without running the model."""

    layers: tuple[AttentionLayer, ...]
    num_logits: int
    """Columns of the model's logits."""


@torch.inference_mode()
def probe_attention(model: PreTrainedModel) -> ProbeResult:
    """Run `model` on three tokens and describe its attention layers; ModelError if it cannot be paged.

    Leaves the model's attention implementation set to the probe's.
    """
    AttentionInterface.register(_IMPLEMENTATION, _record_call)
    AttentionMaskInterface.register(_IMPLEMENTATION, _describe_mask)
    model.set_attn_implementation(_IMPLEMENTATION)
    name = architecture_name(model.config)
    for module in model.modules():
        setattr(module, _FOUND, [])
    positions = torch.arange(_NUM_TOKENS, device=model.device)[None]
    logits = _run_poisoned(model, positions)
    layers = tuple(_layer(name, module) for module in model.modules() if getattr(module, _FOUND))
    by_default = _run_poisoned(model, None)
    for module in model.modules():
        delattr(module, _FOUND)
    if not layers:
        raise unsupported(name, "no layer called transformers' attention interface")
    if not logits.isfinite().all():
        raise unsupported(name, "tokens reach each other by more than attention, as convolutions do")
    if not torch.allclose(logits, by_default, rtol=1e-2, atol=1e-2):
        raise unsupported(name, "it does not count positions from 0")
    return ProbeResult(layers, logits.shape[-1])


def _run_poisoned(model: PreTrainedModel, positions: Tensor | None) -> Tensor:
    """Logits [2, vocabulary] of the outer two of three tokens, the middle one's embedding being NaN.

    Whatever mixes tokens outside the attention carries the NaN to a neighbour, however little it mixes.
    """

    def poison(_module: nn.Module, _inputs: object, embeddings: Tensor) -> Tensor:
        embeddings = embeddings.clone()
        embeddings[:, _POISONED] = float("nan")
        return embeddings

    hook = model.get_input_embeddings().register_forward_hook(poison)
    try:
        tokens = torch.tensor([_TOKENS], device=model.device)
        logits: Tensor = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    finally:
        hook.remove()
    return logits[0, torch.arange(_NUM_TOKENS) != _POISONED].float()


def _record_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sliding_window: int | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Note the call on its module and let each token see itself only."""
    calls: list[AttentionCall] = getattr(module, _FOUND)
    if attention_mask is None:
        is_causal = arguments.get("is_causal")
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        window = sliding_window if causal else _UNKNOWN_MASK
    else:
        # Without flash attention it is the mask that decides; the argument may say less or nothing.
        window = _window_in(attention_mask)
    calls.append(
        AttentionCall(
            query_shape=tuple(query.shape),
            key_shape=tuple(key.shape),
            value_shape=tuple(value.shape),
            window=window or None,
            arguments=frozenset(name for name, given in arguments.items() if _matters(given)),
        )
    )
    own_values = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return own_values.transpose(1, 2).contiguous(), None


def _matters(value: object) -> bool:
    return value is not None and value is not False


def _describe_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Any,
    config: PreTrainedConfig,
    device: torch.device,
    **_unused: Any,
) -> Tensor:
    """A "mask" of the right shape that is filled with the window its rule amounts to."""
    window = _window_of(mask_function, context_tokens(config), device)
    return torch.full((batch_size, 1, q_length, kv_length), float(window), device=device)


def _window_in(mask: Tensor) -> int:
    """The window that `_describe_mask` wrote, if this is still its mask and nothing was added to it."""
    window = mask.flatten()[0]
    untouched = mask.dtype == torch.float32 and bool((mask == window).all()) and bool(window.isfinite())
    return int(window.item()) if untouched else _UNKNOWN_MASK


def _window_of(mask_function: Any, context: int, device: torch.device) -> int:
    """Read a masking rule at some positions of a full context: how many positions does a row see?"""
    columns = torch.arange(context, device=device)
    rows = torch.tensor(sorted({0, context // 3, context // 2, context - 1}), device=device)[:, None]
    zero = torch.zeros((), dtype=torch.int64, device=device)
    try:
        visible = mask_function(zero, zero, rows, columns).expand(len(rows), context)
    except (IndexError, RuntimeError):
        return _UNKNOWN_MASK  # the rule looks up this very input: it is not one of positions alone
    window = int(visible[-1].sum())
    expected = (columns <= rows) & (columns > rows - window)
    if not torch.equal(visible, expected):
        return _UNKNOWN_MASK
    return _NO_WINDOW if window == context else window


def _layer(name: str, module: nn.Module) -> AttentionLayer:
    """The layer a module's one recorded call describes; ModelError for what pages cannot hold."""
    calls: list[AttentionCall] = getattr(module, _FOUND)
    if len(calls) > 1:
        raise unsupported(name, f"one attention layer is used {len(calls)} times for each token")
    call = calls[0]
    _, num_query_heads, _, query_dim = call.query_shape
    _, num_kv_heads, num_keys, head_dim = call.key_shape
    if call.value_shape != call.key_shape:
        values = f"values of {call.value_shape[1]} heads and {call.value_shape[3]} dimensions"
        raise unsupported(name, f"it has keys of {num_kv_heads} heads and {head_dim} dimensions but {values}")
    if query_dim != head_dim or num_query_heads % num_kv_heads:
        query = f"{num_query_heads} query heads of {query_dim} dimensions"
        raise unsupported(name, f"{query} do not go with {num_kv_heads} key heads of {head_dim}")
    if num_keys != _NUM_TOKENS:
        raise unsupported(name, f"{_NUM_TOKENS} tokens gave keys at {num_keys} positions")
    if call.window is not None and call.window < 0:
        raise unsupported(name, "its mask is neither causal nor causal with a fixed window")
    foreign = call.arguments - _UNDERSTOOD - _HARMLESS
    if foreign:
        raise unsupported(name, f"its attention needs {', '.join(sorted(foreign))}")
    return AttentionLayer(module, num_kv_heads, head_dim, call.window)
