"""Runs any causal language model of transformers on our pages, through its attention interface.

A step's ragged batch goes through the model as one row of tokens with explicit positions; only the
attention, which is ours, knows where one sequence ends and the next begins.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence as Seq
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from chairlift_client.errors import ModelError
from chairlift_worker.engine.batch import Batch, Chunk, build_batch
from chairlift_worker.engine.runner import RunnerSpec
from chairlift_worker.models.architectures import check_architecture, context_tokens, read_config
from chairlift_worker.models.attention_probe import ProbeResult, probe_attention
from chairlift_worker.models.checkpoint import eos_token_ids
from chairlift_worker.models.paged_layers import CurrentStep, PagedLayer, attach_layers


class FallbackRunner:
    """A transformers model and its paged KV cache. Implements `engine.runner.Runner`."""

    def __init__(
        self, model: PreTrainedModel, pages: tuple[PagedLayer, ...], step: CurrentStep, spec: RunnerSpec
    ) -> None:
        self._model = model
        self._pages = pages
        self._step = step
        self._spec = spec
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @classmethod
    def load(
        cls, folder: Path, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> FallbackRunner:
        """Load the safetensors and config in `folder` and allocate the pages.

        Raises ModelError, naming the architecture and the reason, for what cannot run on paged KV.
        """
        config = read_config(folder)
        check_architecture(config)
        model = _load_model(folder, config, dtype).to(device)
        probe = probe_attention(model)
        step = CurrentStep()
        pages = tuple(
            PagedLayer(layer, step, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=device)
            for layer in probe.layers
        )
        attach_layers(model, pages)
        return cls(model, pages, step, _spec(folder, model, probe, num_blocks, block_size))

    @property
    def spec(self) -> RunnerSpec:
        """Sizes, fixed for the runner's life."""
        return self._spec

    @property
    def pages(self) -> tuple[PagedLayer, ...]:
        """The paged KV cache, one entry a layer."""
        return self._pages

    @torch.inference_mode()
    def forward(self, chunks: Seq[Chunk]) -> Tensor:
        """As `Runner.forward`: logits [sum of num_logits, vocab_size] in float32."""
        batch = build_batch(chunks, self._spec.block_size, self._model.device)
        if len(batch.copy_sources):
            for page in self._pages:
                page.copy(batch.copy_sources, batch.copy_targets)
        with self._step.over(batch):
            logits = self._logits(batch)
        return logits[:, : self._spec.vocab_size].float()

    def _logits(self, batch: Batch) -> Tensor:
        """Logits [R, columns] of the wanted rows, computing no others where the model can."""
        tokens, positions = batch.token_ids[None], batch.positions[None]
        if self._keeps_logits:
            kept: Tensor = self._model(
                input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=batch.logit_rows
            ).logits
            return kept[0]
        every: Tensor = self._model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        return every[0, batch.logit_rows]


def _load_model(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"{folder}: transformers cannot load this model: {error}") from error
    return model.eval()


def _spec(
    folder: Path, model: PreTrainedModel, probe: ProbeResult, num_blocks: int, block_size: int
) -> RunnerSpec:
    return RunnerSpec(
        # Logits are sometimes padded past the embedding, and a sampled token must be one that can be fed.
        vocab_size=min(probe.num_logits, model.get_input_embeddings().num_embeddings),
        context_tokens=context_tokens(model.config),
        num_blocks=num_blocks,
        block_size=block_size,
        eos_token_ids=eos_token_ids(folder),
    )
