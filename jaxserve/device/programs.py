"""The functions that run on the device, and their compilation ahead of time; owns no state."""

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh
from jax.stages import Compiled

from jaxserve.device.batch import PackedLayout, PooledBlocks, ScoredBlocks, unpack_step
from jaxserve.device.buckets import StepShape
from jaxserve.device.page_copies import copy_structs, gather_pages, scatter_pages
from jaxserve.device.sampling import Logprobs, SampleRows, SamplerState, count_tokens, no_scores, sample, score
from jaxserve.device.sharding import kv_sharding, replicated, vocab_sharding
from jaxserve.scheduling.host_tier import COPY_PAGES
from models.config import ModelConfig
from models.llama import Llama
from models.step import KVPool
from pallas_kernels.kv_dtype import KVDtype
from pallas_kernels.paged_attention import Backend
from pallas_kernels.quantized_matmul import MatmulBackend

COMPILE_WORKERS = 2  # XLA compiles outside the GIL, but each program also uses threads of its own
_STACK_SIZE = threading.Lock()  # the size is the whole process's
COMPILE_STACK_BYTES = 64 * 2**20  # address space: what a compiler does not touch costs no memory

Params = Any  # an nnx.State; flax gives it no usable static type
Program = Callable[..., Any]
Obtain = Callable[[str, Callable[[], Compiled]], Compiled]  # a program's name and how to compile it


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeviceState:
    """All that stays on the device between steps; every program takes it, donated, and returns it.

    Attributes:
      last_tokens: int32[slots], the token that each slot's next decode is fed.
      pooled: float32[slots, hidden], the sum of the prompt's hidden states, as far as it was computed.
    """

    kv: KVPool
    last_tokens: Array
    sampler: SamplerState
    pooled: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step gives the host.

    Attributes:
      tokens: int32[samples].
      is_finite: bool[samples], whether the row's hidden state and the token's logit are numbers; see `_is_finite`.
      logprobs: of the tokens.
      prompt_logprobs: [blocks, block_q, …]; None without blocks.
      embeddings: float32[samples, hidden], of length 1; None without blocks. A mean is one only for samples that end a
        prompt, and only where every token of it was computed, none taken from a cache.
    """

    tokens: Array
    is_finite: Array
    logprobs: Logprobs
    prompt_logprobs: Logprobs | None
    embeddings: Array | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProgramSpec:
    """Everything that decides what is compiled: shapes, dtypes, devices. Two equal specs need the same programs.

    Attributes:
      model: in the form that is split over the mesh (`models.partition`): its heads and vocabulary may be padded.
      matmul_backend: which the graph's matrices have, too; here it can be read, and counts in the fingerprint.
      has_host_tier: whether pages move to host memory and back.
    """

    model: ModelConfig
    graph: nnx.GraphDef[Llama]
    params: Params
    mesh: Mesh
    backend: Backend
    matmul_backend: MatmulBackend
    shapes: tuple[StepShape, ...]
    max_num_seqs: int
    pages_per_seq: int
    page_size: int
    num_pages: int
    block_q: int
    kv_dtype: KVDtype
    num_token_ids: int
    has_host_tier: bool = False

    def layout(self, shape: StepShape) -> PackedLayout:
        return PackedLayout(
            shape, max_num_seqs=self.max_num_seqs, pages_per_seq=self.pages_per_seq, block_q=self.block_q
        )

    def state(self) -> DeviceState:
        """The device state as shapes with shardings."""
        slots = self.max_num_seqs + 1
        whole = replicated(self.mesh)
        pool = KVPool.shapes(self.model, self.num_pages, self.page_size, self.kv_dtype)
        sampler = jax.eval_shape(lambda: SamplerState.zeros(slots, self.model.vocab_size))
        last_tokens = jax.ShapeDtypeStruct((slots,), jnp.int32)
        return DeviceState(
            kv=with_sharding(pool, kv_sharding(self.mesh)),
            last_tokens=with_sharding(last_tokens, whole),
            sampler=with_sharding(sampler, vocab_sharding(self.mesh)),
            pooled=with_sharding(jax.ShapeDtypeStruct((slots, self.model.hidden_size), jnp.float32), whole),
        )


def with_sharding(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def step(
    spec: ProgramSpec, layout: PackedLayout, weights: list[Array], state: DeviceState, packed: Array
) -> tuple[StepResult, DeviceState]:
    """One iteration: embed → layers → gather the rows that sample → head → sample → remember the tokens.

    Args:
      weights: the leaves of the parameters; taking an nnx.State apart at every call would cost a millisecond.
    """
    batch, rows, scored, blocks = unpack_step(layout, packed, state.last_tokens, spec.page_size)
    model = nnx.merge(spec.graph, jax.tree.unflatten(jax.tree.structure(spec.params), weights))
    hidden, kv = model(batch, state.kv, spec.backend, spec.mesh)
    states = hidden[rows.tokens]
    logits = model.logits(states)
    tokens, logprobs = sample(logits, rows, state.sampler, spec.num_token_ids)
    pooled = _pool(state.pooled, hidden[layout.shape.decode_rows :], blocks)
    result = StepResult(
        tokens=tokens,
        is_finite=_is_finite(states, logits, tokens),
        logprobs=logprobs,
        prompt_logprobs=_score_prompts(spec, model, hidden[layout.shape.decode_rows :], scored),
        embeddings=_embed(pooled, states, rows, blocks) if layout.shape.prefill_blocks else None,
    )
    state = DeviceState(
        kv=kv,
        last_tokens=state.last_tokens.at[rows.slots].set(tokens),
        sampler=count_tokens(state.sampler, rows, tokens),
        pooled=pooled,
    )
    return result, state


def _pool(pooled: Array, hidden: Array, blocks: PooledBlocks) -> Array:
    """Adds the prompts' hidden states to their slots' sums, for embeddings.

    Every prompt is summed, whether or not anybody wants its mean: that is one addition a number where the layers do
    thousands, and so embeddings need no program of their own and add nothing to the start.
    """
    if not blocks.slots.shape[0]:
        return pooled
    states = hidden.reshape(*blocks.is_real.shape, -1).astype(jnp.float32)
    sums = jnp.where(blocks.is_real[..., None], states, 0.0).sum(axis=1)
    dummy = pooled.shape[0] - 1
    return pooled.at[jnp.where(blocks.is_first, blocks.slots, dummy)].set(0.0).at[blocks.slots].add(sums)


def _embed(pooled: Array, states: Array, rows: SampleRows, blocks: PooledBlocks) -> Array:
    """The mean of each sample's prompt, or its last hidden state, of length 1. rows.positions: the prompts' lengths."""
    means = pooled[rows.slots] / jnp.maximum(rows.positions, 1)[:, None]
    chosen = jnp.where(blocks.is_mean[:, None], means, states.astype(jnp.float32))
    return chosen / jnp.maximum(jnp.linalg.norm(chosen, axis=1, keepdims=True), 1e-12)  # as torch's normalize


def _is_finite(states: Array, logits: Array, tokens: Array) -> Array:
    """Whether each row may be believed. A look at every logit would cost as much as a sample.

    What goes wrong in the layers (an overflow, a broken weight, a bad page) leaves the hidden state no number; what
    goes wrong in the head alone wins the argmax, as infinity does and, in greedy rows, NaN.
    """
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    return jnp.isfinite(states).all(axis=-1) & jnp.isfinite(chosen)


def _score_prompts(spec: ProgramSpec, model: Llama, hidden: Array, scored: ScoredBlocks) -> Logprobs | None:
    """Logprobs of every prompt token, block by block: the logits of a whole prompt at once could fill the memory."""
    blocks = scored.targets.shape[0]
    if not blocks:
        return None

    def score_block(block: tuple[Array, Array]) -> Logprobs:
        states, targets = block
        logits = model.logits(states)
        return score(jnp.where(jnp.arange(logits.shape[1]) < spec.num_token_ids, logits, -jnp.inf), targets)

    return jax.lax.cond(
        scored.is_scored.any(),
        lambda: jax.lax.map(score_block, (hidden.reshape(blocks, -1, hidden.shape[-1]), scored.targets)),
        lambda: no_scores(scored.targets.shape),
    )


def set_bias(state: DeviceState, slot: Array, bias: Array) -> DeviceState:
    """Writes a slot's constraint row. slot: int32[]; bias: float32[vocab]."""
    sampler = dataclasses.replace(state.sampler, bias=state.sampler.bias.at[slot].set(bias))
    return dataclasses.replace(state, sampler=sampler)


def set_counts(state: DeviceState, slot: Array, output_counts: Array, in_prompt: Array) -> DeviceState:
    """Writes a slot's token counts. output_counts: int32[vocab]; in_prompt: bool[vocab]."""
    sampler = dataclasses.replace(
        state.sampler,
        output_counts=state.sampler.output_counts.at[slot].set(output_counts),
        in_prompt=state.sampler.in_prompt.at[slot].set(in_prompt),
    )
    return dataclasses.replace(state, sampler=sampler)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Programs:
    """The closed set of compiled programs. Calling one with any other shape is an error, never a compilation.

    Attributes:
      layouts: of every shape, smallest first.
      steps: of the shapes that are there already; more may come while the others run.
      gather_pages, scatter_pages: by pages of a call; none without a host tier.
    """

    layouts: dict[StepShape, PackedLayout]
    steps: dict[StepShape, Program]
    new_state: Program
    set_bias: Program
    set_counts: Program
    gather_pages: dict[int, Program]
    scatter_pages: dict[int, Program]

    def available_shapes(self) -> tuple[StepShape, ...]:
        """Smallest first."""
        return tuple(shape for shape in self.layouts if shape in self.steps)


def compile_now(name: str, compile_program: Callable[[], Compiled]) -> Compiled:
    """The simplest `Obtain`: nothing is stored."""
    return compile_program()


def compile_programs(
    spec: ProgramSpec,
    progress: Callable[[int, int], None],
    obtain: Obtain = compile_now,
    *,
    shapes: Sequence[StepShape] | None = None,
) -> Programs:
    """Compiles everything from shapes alone, so that it can run while the weights are read.

    Args:
      progress: called with (done, total) after each program.
      obtain: where programs come from, by name.
      shapes: the steps to compile now, by default all of the spec's.
    """
    steps = spec.shapes if shapes is None else tuple(shapes)
    compilers: dict[str, Callable[[], Compiled]] = _helper_compilers(spec)
    compilers |= {program_name(shape): partial(compile_step, spec, shape) for shape in steps}
    with ThreadPoolExecutor(COMPILE_WORKERS, thread_name_prefix="compile") as pool:
        with deep_stacks():  # a pool starts its threads as work is submitted
            # Largest first: the last program to finish is then a small one.
            futures = {pool.submit(obtain, name, compilers[name]): name for name in reversed(compilers)}
        programs = {}
        for done, future in enumerate(as_completed(futures), start=1):
            programs[futures[future]] = future.result()
            progress(done, len(compilers))
    return Programs(
        layouts={shape: spec.layout(shape) for shape in spec.shapes},
        steps={shape: programs[program_name(shape)] for shape in steps},
        new_state=programs["new_state"],
        set_bias=programs["set_bias"],
        set_counts=programs["set_counts"],
        gather_pages={size: programs[f"gather-{size}"] for size in _copy_sizes(spec)},
        scatter_pages={size: programs[f"scatter-{size}"] for size in _copy_sizes(spec)},
    )


@contextmanager
def deep_stacks() -> Iterator[None]:
    """Threads that are started in this block, by whomever, can compile: a compiler's passes recurse as deep as a model
    has layers, and libtpu overflowed the 8 MB that a thread has by default on a step of Llama-3.1-8B."""
    with _STACK_SIZE:
        before = threading.stack_size(COMPILE_STACK_BYTES)
        try:
            yield
        finally:
            threading.stack_size(before)


def program_name(shape: StepShape) -> str:
    """A name that also serves as a file's."""
    return f"step-{shape.decode_rows}-{shape.prefill_blocks}"


def program_names(spec: ProgramSpec) -> tuple[str, ...]:
    """All that `compile_programs` obtains."""
    return (*_helper_compilers(spec), *map(program_name, spec.shapes))


def compile_step(spec: ProgramSpec, shape: StepShape) -> Compiled:
    layout, state = spec.layout(shape), spec.state()
    run = partial(step, spec, layout)
    run.__name__ = f"step[{shape}]"  # type: ignore[attr-defined]
    out_shardings = (replicated(spec.mesh), _shardings(state))
    packed = _array(spec, (layout.size,), jnp.int32)
    return _compile(run, 1, out_shardings, jax.tree.leaves(spec.params), state, packed)


def _helper_compilers(spec: ProgramSpec) -> dict[str, Callable[[], Compiled]]:
    """The programs that make and mend the state, and move its pages."""
    state = spec.state()
    shardings = _shardings(state)
    vocab = (spec.model.vocab_size,)
    slot, bias = _array(spec, (), jnp.int32), _array(spec, vocab, jnp.float32)
    counts, in_prompt = _array(spec, vocab, jnp.int32), _array(spec, vocab, jnp.bool_)

    def new_state() -> DeviceState:
        return jax.tree.map(lambda struct: jnp.zeros(struct.shape, struct.dtype), state)

    compilers: dict[str, Callable[[], Compiled]] = {
        "new_state": lambda: _compile(new_state, (), shardings),
        "set_bias": lambda: _compile(set_bias, 0, shardings, state, slot, bias),
        "set_counts": lambda: _compile(set_counts, 0, shardings, state, slot, counts, in_prompt),
    }
    for size in _copy_sizes(spec):
        ids, copies = _array(spec, (size,), jnp.int32), copy_structs(state.kv, size)
        compilers[f"gather-{size}"] = partial(_compile, gather_pages, (), _shardings(copies), state.kv, ids)
        compilers[f"scatter-{size}"] = partial(_compile, scatter_pages, 0, shardings.kv, state.kv, ids, copies)
    return compilers


def _copy_sizes(spec: ProgramSpec) -> tuple[int, ...]:
    return COPY_PAGES if spec.has_host_tier else ()


def _array(spec: ProgramSpec, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(spec.mesh))


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda struct: struct.sharding, tree)


def _compile(function: Callable[..., Any], donated: int | tuple[()], out_shardings: Any, *args: Any) -> Compiled:
    return jax.jit(function, donate_argnums=donated, out_shardings=out_shardings).lower(*args).compile()
