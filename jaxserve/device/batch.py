"""Turns a plan into the one packed array that a step uploads, and that array back into a StepBatch on the device.

The layout is written down once, in `PackedLayout`; host and device both read it from there. Everything is 32 bits wide:
floats and seeds travel as their bits.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.device.buckets import StepShape
from jaxserve.device.sampling import SampleRows
from jaxserve.scheduling.plan import Plan, Request
from models.step import StepBatch
from pallas_kernels.paged_attention import AttentionRows

HostArray = np.ndarray[Any, Any]

CONSTRAINED, PENALIZED, LOGPROBS, MEAN = 1, 2, 4, 8  # bits of `sample_flags`
# Sampling parameters that travel as they are, one number a row.
PARAMETER_FIELDS = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "repetition_penalty": np.float32,
    "presence_penalty": np.float32,
    "frequency_penalty": np.float32,
}


class PackedLayout:
    """Where each field of a step of one shape lies in the packed array.

    Args:
      max_num_seqs: slots; slot number max_num_seqs is the dummy that padding rows use.
      pages_per_seq: width of the block table.
      block_q: tokens of a prefill block.
    """

    def __init__(self, shape: StepShape, *, max_num_seqs: int, pages_per_seq: int, block_q: int) -> None:
        rows, blocks, slots = shape.decode_rows, shape.prefill_blocks, max_num_seqs + 1
        samples = min(max_num_seqs, rows + blocks)  # every sampling request has a slot
        self.shape = shape
        self.dummy_slot = max_num_seqs
        self.fields: dict[str, tuple[tuple[int, ...], Any]] = {
            "block_tables": ((slots, pages_per_seq), np.int32),
            "rope_lengths": ((slots,), np.int32),
            "decode_slots": ((rows,), np.int32),
            "decode_positions": ((rows,), np.int32),
            "block_slots": ((blocks,), np.int32),
            "block_starts": ((blocks,), np.int32),
            "block_counts": ((blocks,), np.int32),
            "block_tokens": ((blocks, block_q), np.int32),
            "block_targets": ((blocks, block_q), np.int32),
            "block_scored": ((blocks,), np.int32),
            "sample_tokens": ((samples,), np.int32),
            "sample_slots": ((samples,), np.int32),
            "sample_positions": ((samples,), np.int32),
            "sample_seeds": ((samples, 2), np.uint32),
            "sample_flags": ((samples,), np.int32),
            **{name: ((samples,), dtype) for name, dtype in PARAMETER_FIELDS.items()},
        }
        self._parts: list[tuple[str, slice, tuple[int, ...], Any]] = []
        self.size = 0
        for name, (field_shape, dtype) in self.fields.items():
            end = self.size + math.prod(field_shape)
            self._parts.append((name, slice(self.size, end), field_shape, dtype))
            self.size = end

    def views(self, packed: HostArray) -> dict[str, HostArray]:
        """The fields of a host array int32[size], to be written through."""
        return {name: packed[part].view(dtype).reshape(shape) for name, part, shape, dtype in self._parts}

    def unpack(self, packed: Array) -> dict[str, Array]:
        """The fields of a device array int32[size]."""
        return {
            name: jax.lax.bitcast_convert_type(packed[part], dtype).reshape(shape)
            for name, part, shape, dtype in self._parts
        }


class BatchWriter:
    """Writes plans into packed arrays. Owns what the host keeps for each slot: its row of the block table, always as
    the scheduler has it, and what the sampler is told of its request, which never changes while that request stays."""

    def __init__(self, *, max_num_seqs: int, pages_per_seq: int, block_q: int) -> None:
        self._block_q = block_q
        slots = max_num_seqs + 1
        self._block_tables = np.zeros((slots, pages_per_seq), np.int32)
        self._rope_lengths = np.zeros(slots, np.int32)
        self._sampling: dict[str, HostArray] = {
            "sample_seeds": np.zeros((slots, 2), np.uint32),
            "sample_flags": np.zeros(slots, np.int32),
            **{name: np.zeros(slots, dtype) for name, dtype in PARAMETER_FIELDS.items()},
        }
        self._residences = [-1] * max_num_seqs  # whose rows these are

    def write(self, plan: Plan, layout: PackedLayout) -> HostArray:
        """int32[layout.size], a new array each time: the last one may still be on its way to the device."""
        packed = np.zeros(layout.size, np.int32)
        fields = layout.views(packed)
        self._update_slots(plan)
        fields["block_tables"][:] = self._block_tables
        fields["rope_lengths"][:] = self._rope_lengths
        fields["decode_slots"][:] = fields["block_slots"][:] = layout.dummy_slot
        fields["sample_slots"][:] = layout.dummy_slot

        self._write_rows(plan, self._write_blocks(plan, layout, fields), fields)
        return packed

    def _update_slots(self, plan: Plan) -> None:
        for request in itertools.chain(plan.decodes, (chunk.request for chunk in plan.chunks)):
            if self._residences[request.slot] != request.residence:
                self._residences[request.slot] = request.residence
                self._rope_lengths[request.slot] = request.max_length - 1  # the last token is never fed back
                self._set_sampling(request)
            stale_from, num_pages = request.stale_from, len(request.pages)
            if stale_from < num_pages:
                self._block_tables[request.slot, stale_from:num_pages] = request.pages[stale_from:]
                request.stale_from = num_pages

    def _set_sampling(self, request: Request) -> None:
        slot, params = request.slot, request.params
        self._sampling["sample_seeds"][slot] = (request.seed >> 32, request.seed & 0xFFFFFFFF)
        self._sampling["sample_flags"][slot] = (
            (CONSTRAINED if request.constraints else 0)
            | (PENALIZED if params.uses_penalties else 0)
            | (LOGPROBS if params.logprobs is not None else 0)
            | (MEAN if request.pooling == "mean" else 0)
        )
        for name in PARAMETER_FIELDS:
            self._sampling[name][slot] = getattr(params, name)

    def _write_blocks(self, plan: Plan, layout: PackedLayout, fields: dict[str, HostArray]) -> list[int]:
        """Returns, for each chunk that ends its prompt, the index of its last token among the step's tokens."""
        last_tokens = []
        block = 0
        for chunk in plan.chunks:
            token_ids = chunk.request.token_ids
            scored = chunk.request.params.prompt_logprobs is not None
            for start in range(chunk.start, chunk.start + chunk.count, self._block_q):
                count = min(self._block_q, chunk.start + chunk.count - start)
                fields["block_slots"][block] = chunk.request.slot
                fields["block_starts"][block] = start
                fields["block_counts"][block] = count
                fields["block_tokens"][block, :count] = token_ids[start : start + count]
                if scored:
                    targets = token_ids[start + 1 : min(start + count + 1, chunk.request.prompt_len)]
                    fields["block_targets"][block, : len(targets)] = targets
                    fields["block_scored"][block] = bool(targets)
                block += 1
            if chunk.is_last:
                last_tokens.append(layout.shape.decode_rows + (block - 1) * self._block_q + count - 1)
        return last_tokens

    def _write_rows(self, plan: Plan, last_tokens: list[int], fields: dict[str, HostArray]) -> None:
        """The decode rows and the samples, of which those of the decode rows come first."""
        num_decodes = len(plan.decodes)
        slots = np.array([request.slot for request in plan.samples], np.int32)
        positions = np.array(plan.positions, np.int32)
        fields["decode_slots"][:num_decodes] = slots[:num_decodes]
        fields["decode_positions"][:num_decodes] = positions[:num_decodes] - 1
        rows = slice(0, len(slots))
        fields["sample_tokens"][:num_decodes] = np.arange(num_decodes)
        fields["sample_tokens"][num_decodes : rows.stop] = last_tokens
        fields["sample_slots"][rows] = slots
        fields["sample_positions"][rows] = positions
        for name, values in self._sampling.items():
            fields[name][rows] = values[slots]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredBlocks:
    """For prompt logprobs: the token that follows each prefill token. targets: int32[blocks, block_q]."""

    targets: Array
    is_scored: Array


@dataclass(frozen=True, kw_only=True, slots=True)
class PooledBlocks:
    """For embeddings: whose tokens the prefill blocks hold, and which samples want the mean over their prompt.

    Attributes:
      slots: int32[blocks], the dummy slot for padding.
      is_first: bool[blocks], the block begins a prompt.
      is_real: bool[blocks, block_q], padding is not.
      is_mean: bool[samples].
    """

    slots: Array
    is_first: Array
    is_real: Array
    is_mean: Array


def unpack_step(
    layout: PackedLayout, packed: Array, last_tokens: Array, page_size: int
) -> tuple[StepBatch, SampleRows, ScoredBlocks, PooledBlocks]:
    """On the device: the packed array and the last token of each slot become what the model and the sampler read."""
    fields = layout.unpack(packed)
    tables = fields["block_tables"]
    block_q = fields["block_tokens"].shape[1]
    decode_slots, decode_positions = fields["decode_slots"], fields["decode_positions"]
    block_slots, block_starts, block_counts = fields["block_slots"], fields["block_starts"], fields["block_counts"]

    in_block = jnp.arange(block_q)
    block_positions = block_starts[:, None] + in_block
    is_real = in_block < block_counts[:, None]
    positions = jnp.concatenate([decode_positions, jnp.where(is_real, block_positions, 0).ravel()])
    slots = jnp.concatenate(
        [decode_slots, jnp.where(is_real, block_slots[:, None], layout.dummy_slot).ravel()]
    )  # the dummy slot's table is all page 0
    batch = StepBatch(
        token_ids=jnp.concatenate([last_tokens[decode_slots], fields["block_tokens"].ravel()]),
        positions=positions,
        page_ids=tables[slots, positions // page_size],
        offsets=positions % page_size,
        rope_lengths=fields["rope_lengths"][slots],
        block_tables=tables,
        decode=AttentionRows(
            tables=decode_slots,
            starts=decode_positions,
            lengths=jnp.where(decode_slots == layout.dummy_slot, 0, decode_positions + 1),
        ),
        prefill=AttentionRows(tables=block_slots, starts=block_starts, lengths=block_starts + block_counts),
    )
    flags = fields["sample_flags"]
    rows = SampleRows(
        tokens=fields["sample_tokens"],
        slots=fields["sample_slots"],
        positions=fields["sample_positions"],
        seeds=fields["sample_seeds"],
        is_constrained=flags & CONSTRAINED > 0,
        is_penalized=flags & PENALIZED > 0,
        wants_logprobs=flags & LOGPROBS > 0,
        **{name: fields[name] for name in PARAMETER_FIELDS},
    )
    scored = ScoredBlocks(targets=fields["block_targets"], is_scored=fields["block_scored"] > 0)
    pooled = PooledBlocks(slots=block_slots, is_first=block_starts == 0, is_real=is_real, is_mean=flags & MEAN > 0)
    return batch, rows, scored, pooled
