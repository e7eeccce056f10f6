"""The Llama family: Llama 2 and 3, Mistral, SmolLM2. Modules hold parameters; the step calls them as pure functions."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from models.attend import attend
from models.config import ModelConfig
from models.key_frame import KeyFrame
from models.layers import Embedding, Linear, RMSNorm, apply_together, rope_tables, rotate
from models.step import KVPool, StepBatch
from pallas_kernels.kv_format import KVPages
from pallas_kernels.paged_attention import XLA, Backend
from pallas_kernels.quantized_matmul import MatmulBackend


class Attention(nnx.Module):
    def __init__(self, config: ModelConfig, dtype: jnp.dtype, matmul: MatmulBackend) -> None:
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        linear = partial(Linear, dtype=dtype, quantization=config.quantization, backend=matmul)
        bias = config.attention_bias
        self.q_proj = linear(config.hidden_size, heads, ("heads", "embed"), bias=bias)
        self.k_proj = linear(config.hidden_size, kv_heads, ("kv_heads", "embed"), bias=bias)
        self.v_proj = linear(config.hidden_size, kv_heads, ("kv_heads", "embed"), bias=bias)
        self.o_proj = linear(heads, config.hidden_size, ("embed", "heads"), bias=config.attention_output_bias)
        self.key_frame = KeyFrame(config) if config.has_key_frames else None
        self.head_dim = config.head_dim
        self.sliding_window = config.sliding_window

    def __call__(
        self,
        x: Array,
        rotation: tuple[Array, Array],
        batch: StepBatch,
        kv_pages: KVPages,
        backend: Backend,
        mesh: Mesh | None,
    ) -> tuple[Array, KVPages]:
        q, k, v = self.queries_keys_values(x, rotation)
        if self.key_frame is not None:
            q, k = self.key_frame(q, k)
        attended, kv_pages = attend(
            q,
            k,
            v,
            kv_pages,
            batch,
            scale=self.head_dim**-0.5,
            sliding_window=self.sliding_window,
            backend=backend,
            mesh=mesh,
        )
        return self.o_proj(attended), kv_pages

    def queries_keys_values(self, x: Array, rotation: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """[tokens, hidden] -> [tokens, heads, head_dim] and twice [tokens, kv_heads, head_dim]; q and k are rotated."""
        q, k, v = (
            y.reshape(x.shape[0], -1, self.head_dim) for y in apply_together((self.q_proj, self.k_proj, self.v_proj), x)
        )
        return rotate(q, *rotation), rotate(k, *rotation), v


class MLP(nnx.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, matmul: MatmulBackend) -> None:
        linear = partial(Linear, dtype=dtype, bias=config.mlp_bias, quantization=config.quantization, backend=matmul)
        wide, narrow = config.intermediate_size, config.hidden_size
        self.gate_proj = linear(narrow, wide, ("mlp", "embed"))
        self.up_proj = linear(narrow, wide, ("mlp", "embed"))
        self.down_proj = linear(wide, narrow, ("embed", "mlp"))

    def __call__(self, x: Array) -> Array:
        gate, up = apply_together((self.gate_proj, self.up_proj), x)
        return self.down_proj(jax.nn.silu(gate) * up)


class Layer(nnx.Module):
    def __init__(self, config: ModelConfig, dtype: jnp.dtype, matmul: MatmulBackend) -> None:
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = Attention(config, dtype, matmul)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, dtype, matmul)

    def __call__(
        self,
        x: Array,
        rotation: tuple[Array, Array],
        batch: StepBatch,
        kv_pages: KVPages,
        backend: Backend,
        mesh: Mesh | None,
    ) -> tuple[Array, KVPages]:
        attended, kv_pages = self.self_attn(self.input_layernorm(x), rotation, batch, kv_pages, backend, mesh)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), kv_pages


class Llama(nnx.Module):
    """Parameter paths are Hugging Face's names without the leading `model.`."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: jnp.dtype,
        activation_dtype: jnp.dtype | None = None,
        matmul: MatmulBackend = "xla",
    ) -> None:
        """Args:
        dtype: of the parameters.
        activation_dtype: of what lies between the matrices; None: as the parameters.
        matmul: who multiplies with quantized matrices.
        """
        self.config = config
        self.activation_dtype = activation_dtype or dtype
        outer = config.quantization if config.quantization is not None and config.quantization.embeddings else None
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype, outer, matmul)
        self.layers = nnx.List([Layer(config, dtype, matmul) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.lm_head = (
            None
            if config.tie_embeddings
            else Linear(
                config.hidden_size,
                config.vocab_size,
                ("vocab", "embed"),
                dtype,
                bias=False,
                quantization=outer,
                backend=matmul,
            )
        )

    def __call__(
        self, batch: StepBatch, kv: KVPool, backend: Backend = XLA, mesh: Mesh | None = None
    ) -> tuple[Array, KVPool]:
        """Runs every layer over the step's tokens and writes their keys and values into `kv`.

        Args:
          backend: computes attention.
          mesh: what `kv` and the parameters are split over; None: one device.

        Returns:
          [tokens, hidden], normed, ready for `logits`; and the updated pool.
        """
        config = self.config
        x = self.embed_tokens(batch.token_ids).astype(self.activation_dtype)
        rotation = rope_tables(config.rope, config.head_dim, batch.positions, batch.rope_lengths)
        updated = []
        for layer, kv_pages in zip(self.layers, kv.layers, strict=True):
            x, kv_pages = _run_layer(*nnx.split(layer), backend, mesh, x, rotation, batch, kv_pages)
            updated.append(kv_pages)
        return self.norm(x), KVPool(layers=tuple(updated))

    def logits(self, hidden: Array) -> Array:
        """[rows, hidden] -> float32[rows, vocab]. Only rows that sample need it."""
        out = self.embed_tokens.times(hidden) if self.lm_head is None else self.lm_head(hidden)
        return out.astype(jnp.float32)


@partial(jax.jit, static_argnames=("graph", "backend", "mesh"))
def _run_layer(
    graph: nnx.GraphDef[Layer],
    params: nnx.State,  # type: ignore[type-arg]
    backend: Backend,
    mesh: Mesh | None,
    x: Array,
    rotation: tuple[Array, Array],
    batch: StepBatch,
    kv_pages: KVPages,
) -> tuple[Array, KVPages]:
    """One layer. Layers are alike, so jit traces this once for all of them; XLA inlines and sees them unrolled."""
    out: tuple[Array, KVPages] = nnx.merge(graph, params)(x, rotation, batch, kv_pages, backend, mesh)
    return out
