"""A worker's settings: frozen, validated, unknown keys refused. Flags over CHAIRLIFT_* over a TOML file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from chairlift_client.errors import ConfigError
from chairlift_client.keys import DEFAULT_NAMESPACE, MAX_PARTITIONS, check_model, check_namespace
from chairlift_client.worker_operations import RetryPolicy


class WorkerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a worker can be told; units stand in the names. The descriptions are the command's help."""

    model: Annotated[str, Meta(description="A hub id, a folder with safetensors, or a GGUF file.")]
    cache: Annotated[
        str,
        Meta(description="A folder for converted models; in the user's own cache where empty."),
    ] = ""
    name: Annotated[
        str,
        Meta(description="What jobs call the model; taken from the model's source where empty."),
    ] = ""
    redis_url: Annotated[
        str,
        Meta(description="redis://, rediss://, unix:// or redis+cluster://."),
    ] = "redis://localhost:6379"
    namespace: Annotated[
        str,
        Meta(description="Keeps the queues of several installations apart on one server."),
    ] = DEFAULT_NAMESPACE
    partitions: Annotated[
        int,
        Meta(description="Into how many parts the queue is split; it only grows. Limits hold for each."),
    ] = 1
    worker_id: Annotated[
        str,
        Meta(description="A readable name; a random part is always added. Host and process id where empty."),
    ] = ""
    device: Annotated[str, Meta(description="auto, cpu, cuda, cuda:1, …")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        Meta(description="Of weights and KV: auto is float32 on a CPU, the checkpoint's own on a GPU."),
    ] = "auto"
    exact: Annotated[
        bool,
        Meta(description="Outputs that no company changes by a bit: CPU, float32, the decoder; slower."),
    ] = False
    threads: Annotated[
        int,
        Meta(description="Threads of the linear algebra; 0 leaves one core to the event loop."),
    ] = 0
    block_size: Annotated[int, Meta(description="Tokens in a KV block.")] = 16
    kv_tokens: Annotated[
        int,
        Meta(description="Slots of the KV pool; 0 is 1024 for each of max_num_seqs."),
    ] = 0
    context_tokens: Annotated[
        int,
        Meta(description="Most tokens of a sequence, prompt and output; 0 is what the model was made for."),
    ] = 0
    max_num_seqs: Annotated[int, Meta(description="Most sequences in a step.")] = 32
    max_step_tokens: Annotated[
        int,
        Meta(description="Token budget of a step: longer prompts are computed in chunks."),
    ] = 512
    max_prefill_tokens: Annotated[
        int,
        Meta(description="Most prompt tokens of a step beside running jobs; 0 is max_step_tokens."),
    ] = 256
    target_itl_ms: Annotated[
        float,
        Meta(description="Choose prompt tokens so that a step takes no longer; 0: max_prefill_tokens rules."),
    ] = 0.0
    prefix_cache: Annotated[
        bool,
        Meta(description="Keep KV for jobs of the same tenant that begin alike."),
    ] = True
    adapters: Annotated[
        str,
        Meta(
            description="A folder of LoRA adapters, each a sub-folder whose name jobs ask for; none if empty."
        ),
    ] = ""
    max_adapters: Annotated[int, Meta(description="Most adapters in memory at once.")] = 8
    max_adapter_rank: Annotated[int, Meta(description="Highest rank of an adapter.")] = 64
    lookahead: Annotated[
        int,
        Meta(description="Jobs claimed beyond max_num_seqs, so that a freed place is filled at once."),
    ] = 2
    lease_s: Annotated[float, Meta(description="How long a silent worker keeps its jobs.")] = 5.0
    grace_s: Annotated[float, Meta(description="How long a drain lets running jobs finish.")] = 30.0
    max_failures: Annotated[int, Meta(description="Failed attempts before a job becomes a dead letter.")] = 3
    max_losses: Annotated[
        int,
        Meta(description="Leases lost in a row without a new token before a job becomes a dead letter."),
    ] = 3
    max_waiting: Annotated[int, Meta(description="Most waiting jobs of a partition; 0 is no limit.")] = 10_000
    max_queue_bytes: Annotated[
        int,
        Meta(description="Most bytes of live jobs of a partition; 0 is no limit."),
    ] = 1 << 30
    max_tenant_jobs: Annotated[
        int,
        Meta(description="Most live jobs of one tenant in a partition; 0 is no limit."),
    ] = 0
    step_log: Annotated[
        str,
        Meta(description="A file that gets one JSON line per step: which jobs rode, tokens, blocks."),
    ] = ""
    ready_file: Annotated[
        str,
        Meta(description="A file that is there while the worker takes jobs: for a readiness probe."),
    ] = ""
    alive_file: Annotated[
        str,
        Meta(description="A file that is touched every second while all is well: for a liveness probe."),
    ] = ""
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Least level that is logged."),
    ] = "info"

    def __post_init__(self) -> None:
        check_namespace(self.namespace)
        check_model(self.model_name)
        for field, least, most in _RANGES:
            value = getattr(self, field)
            if not least <= value <= most:
                raise ConfigError(f"{field} is {value}; it must lie between {least} and {most}")

    @property
    def model_name(self) -> str:
        """What jobs call the model."""
        return self.name or default_model_name(self.model)

    @property
    def lease_ms(self) -> int:
        """The lease in the protocol's unit."""
        return round(self.lease_s * 1000)

    @property
    def retry_policy(self) -> RetryPolicy:
        """When a failed attempt is tried again."""
        return RetryPolicy(max_failures=self.max_failures, max_losses=self.max_losses)


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("partitions", 1, MAX_PARTITIONS),
    ("threads", 0, 1024),
    ("block_size", 1, 256),
    ("kv_tokens", 0, 1 << 40),
    ("context_tokens", 0, 1 << 30),
    ("max_num_seqs", 1, 4096),
    ("max_step_tokens", 1, 1 << 20),
    ("max_prefill_tokens", 0, 1 << 20),
    ("target_itl_ms", 0, 3_600_000),
    ("max_adapters", 1, 4096),
    ("max_adapter_rank", 1, 4096),
    ("lookahead", 0, 4096),
    ("lease_s", 0.2, 3600),
    ("grace_s", 0, 86_400),
    ("max_failures", 1, 100),
    ("max_losses", 2, 100),
    ("max_waiting", 0, 1 << 40),
    ("max_queue_bytes", 0, 1 << 50),
    ("max_tenant_jobs", 0, 1 << 40),
)


def default_model_name(source: str) -> str:
    """The last part of a hub id or path, in the letters that a model name may have."""
    stem = Path(source).name.removesuffix(".gguf")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem)[:96] or "model"
