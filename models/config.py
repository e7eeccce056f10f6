"""What a model is: the numbers that shape its layers, whatever file they came from."""

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding and how it is stretched past the trained context.

    Attributes:
      theta: the base.
      kind: the stretching rule, in Hugging Face's names (`rope_type`).
      factor: context length over original context length, as each rule uses it.
      original_max_position: the trained context (tokens); `dynamic`, `llama3` and `yarn` need it.
      low_freq_factor, high_freq_factor: `llama3`.
      beta_fast, beta_slow, truncate, attention_factor: `yarn`; cos and sin are multiplied by `attention_factor`.
      frequency_divisors: one divisor per rotated pair, from a GGUF `rope_freqs.weight`; applied last.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    frequency_divisors: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The Llama family's shape.

    Attributes:
      vocab_size: rows of the embedding; ids at or beyond the tokenizer's own size are never sampled.
      head_dim: per head; not always hidden_size / num_heads.
      max_position: the longest context (tokens) the checkpoint declares.
      attention_bias: q, k and v projections have a bias; `attention_output_bias`: so has the output projection.
      tie_embeddings: no stored head, the embedding serves as one. Decided from the tensors that are stored.
      sliding_window: a query sees this many keys, itself included; None sees all.
      eos_token_ids: every id that ends an output: the union of config, generation config and tokenizer.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = False
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
