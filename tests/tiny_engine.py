"""A whole engine around a tiny random Llama, without any file: for tests of what the engine does with requests."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from quick_compilation import quick_compilation

from jaxserve.config import CacheSection, EngineConfig, ExecutionSection, ModelSection, SchedulerSection
from jaxserve.device.programs import Params, Programs, ProgramSpec, compile_programs
from jaxserve.device.runner import DeviceRunner
from jaxserve.device.sharding import tensor_mesh
from jaxserve.engine import Engine
from jaxserve.request import RequestOutput
from jaxserve.startup.key_frames import measure_key_frames
from jaxserve.startup.loading import program_spec
from jaxserve.startup.resolve import resolve
from models.config import ModelConfig
from models.registry import module_for
from pallas_kernels.kv_dtype import KVDtype
from pallas_kernels.paged_attention import BackendName

EOS = 2
NUM_TOKEN_IDS = 150  # of 160 columns: the last ten are padding, which must never be sampled

# head_dim is not hidden_size / num_heads, and two query heads share a KV head.
TINY_MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=160,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=192,
    eos_token_ids=(EOS,),
)


ALL_PAGES = 1 + 8 * 24  # eight full contexts, and the dummy page


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyOptions:
    """The knobs a test may want to turn. Engines that differ only in `num_pages` (the pool's; the device always has
    all pages), `max_num_batched_tokens`, `strict_shapes`, `prefix_caching` and `host_pages` share their programs."""

    max_num_seqs: int = 8
    max_num_batched_tokens: int = 72
    block_q: int = 16
    page_size: int = 8
    num_pages: int = ALL_PAGES
    max_model_len: int = 192
    decode_buckets: tuple[int, ...] = (2, 8)
    prefill_buckets: tuple[int, ...] = (1, 4)
    strict_shapes: bool = False
    prefix_caching: bool = True
    host_pages: int = 0
    attention_backend: Literal["auto", BackendName] = "auto"
    cache_dtype: KVDtype | Literal["auto"] = "auto"


def build_tiny_engine(*, params: Params | None = None, **options: Any) -> Engine:
    """A new engine on the device, with nothing in it; compiled programs are shared among all that fit.

    `params` stand in for `tiny_params()`.
    """
    chosen = TinyOptions(**options)
    config = tiny_config(chosen)
    spec, programs = _compiled(
        replace(
            chosen,
            num_pages=ALL_PAGES,
            max_num_batched_tokens=chosen.max_num_seqs + chosen.block_q,
            strict_shapes=False,
            prefix_caching=True,
            host_pages=1,
        )
    )
    params = tiny_params() if params is None else params
    params = measure_key_frames(spec, params) if spec.model.has_key_frames else params
    runner = DeviceRunner(spec, programs, params, host_pages=chosen.host_pages)
    return Engine(config, TINY_MODEL, runner, num_token_ids=NUM_TOKEN_IDS, eos_token_ids=frozenset({EOS}))


def tiny_config(options: TinyOptions) -> EngineConfig:
    config = EngineConfig(
        model=ModelSection(path="tiny", dtype="float32", max_model_len=options.max_model_len, pooling="last"),
        cache=CacheSection(
            page_size=options.page_size,
            num_pages=options.num_pages,
            dtype=options.cache_dtype,
            prefix_caching=options.prefix_caching,
            host_pages=options.host_pages,
        ),
        scheduler=SchedulerSection(
            max_num_seqs=options.max_num_seqs, max_num_batched_tokens=options.max_num_batched_tokens
        ),
        execution=ExecutionSection(
            attention_backend=options.attention_backend,
            block_q=options.block_q,
            decode_buckets=options.decode_buckets,
            prefill_buckets=options.prefill_buckets,
            compilation_cache=None,
            strict_shapes=options.strict_shapes,
        ),
    )
    return resolve(config, TINY_MODEL, jax.devices()[0], weight_bytes=0, free_bytes=2**30)


@functools.cache
def tiny_weights() -> dict[str, np.ndarray[Any, Any]]:
    """float32 parameters by dotted path; logits spread over several units, so that near-ties are rare."""
    rng = np.random.default_rng(7)
    weights = {}
    for path, param in _parameters():
        name, shape = ".".join(map(str, path)), param.get_value().shape
        values = rng.standard_normal(shape)
        if len(shape) == 1:  # a norm
            values = 1.0 + 0.2 * values
        elif not name.startswith("embed_tokens"):
            values *= (3.0 if name.startswith("lm_head") else 1.5) / shape[1] ** 0.5
        weights[name] = values.astype(np.float32)
    return weights


@functools.cache
def tiny_params() -> Params:
    weights = tiny_weights()
    return nnx.from_flat_state(
        [(path, param.replace(jnp.asarray(weights[".".join(map(str, path))]))) for path, param in _parameters()]
    )


def drain(engine: Engine) -> dict[str, list[RequestOutput]]:
    """Steps until nothing is left to do; every output by request, in order."""
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_work():
        collect(outputs, engine.step())
    return outputs


def collect(outputs: dict[str, list[RequestOutput]], new: Iterable[RequestOutput]) -> None:
    for output in new:
        outputs.setdefault(output.request_id, []).append(output)


def tokens_of(outputs: Iterable[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


@functools.cache
def _compiled(options: TinyOptions) -> tuple[ProgramSpec, Programs]:
    mesh = tensor_mesh(1, jax.devices())
    spec = program_spec(tiny_config(options), TINY_MODEL, NUM_TOKEN_IDS, mesh)
    with quick_compilation():
        return spec, compile_programs(spec, lambda done, total: None)


def _parameters() -> list[tuple[tuple[Any, ...], Any]]:
    """Path and shape of every parameter."""
    return list(nnx.to_flat_state(nnx.state(module_for(TINY_MODEL)(TINY_MODEL, jnp.dtype("float32")))))
