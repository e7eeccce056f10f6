"""What a model is: the numbers that shape its layers, whatever file they came from."""

import math
from dataclasses import dataclass
from typing import Literal

WeightFormat = Literal["int8", "int4", "fp8_e4m3"]
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value}; it must be positive and finite")


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

    def __post_init__(self) -> None:
        """Raises ValueError. The readers check first, by their own format's names for these."""
        names = ("theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
        for name in names:
            _positive(name, getattr(self, name))
        for divisor in self.frequency_divisors or ():
            _positive("frequency_divisors", divisor)
        if self.kind in ("dynamic", "llama3", "yarn"):
            _positive("original_max_position", self.original_max_position)
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"high_freq_factor is {self.high_freq_factor}; it must exceed low_freq_factor, {self.low_freq_factor}"
            )
        if self.kind == "yarn" and self.theta <= 1:
            raise ValueError(f"theta is {self.theta}; yarn divides by its logarithm, so it must exceed 1")
        if self.kind == "yarn" and self.beta_fast < self.beta_slow:
            raise ValueError(f"beta_fast is {self.beta_fast}; it must be at least beta_slow, {self.beta_slow}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """How the layers' matrices are stored (`models.quantization`).

    Attributes:
      group_size: inputs that share a scale; None: a whole row does.
      has_zeros: every group has a zero point too.
      embeddings: the embedding and the head as well.
    """

    format: WeightFormat
    group_size: int | None = None
    has_zeros: bool = False
    embeddings: bool = False

    @staticmethod
    def made_at_load(format: WeightFormat, *, group_size: int, embeddings: bool) -> "Quantization":
        """What wide weights are rounded to: a scale a row, and of int4 a scale and a zero point for each group."""
        is_int4 = format == "int4"
        return Quantization(
            format=format, group_size=group_size if is_int4 else None, has_zeros=is_int4, embeddings=embeddings
        )

    def __post_init__(self) -> None:
        if self.group_size is not None:
            _positive("group_size", self.group_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The Llama family's shape.

    Attributes:
      vocab_size: rows of the embedding; ids at or beyond the tokenizer's own size are never sampled.
      head_dim: per head; not always hidden_size / num_heads.
      max_position: the longest context (tokens): what the checkpoint declares, stretched as its rope rule says.
      attention_bias: q, k and v projections have a bias; `attention_output_bias`: so has the output projection.
      tie_embeddings: no stored head, the embedding serves as one. Decided from the tensors that are stored.
      sliding_window: a query sees this many keys, itself included; None sees all.
      eos_token_ids: every id that ends an output: the union of config, generation config and tokenizer.
      quantization: of the matrices; None: they are as wide as everything else.
      has_key_frames: keys are written without their offset and with a gain for each channel (`models.key_frame`).
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
    quantization: Quantization | None = None
    has_key_frames: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError. The readers check first, by their own format's names for these."""
        for name in ("vocab_size", "hidden_size", "intermediate_size", "max_position", "rms_norm_eps"):
            _positive(name, getattr(self, name))
        for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim"):
            _positive(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads is {self.num_kv_heads}; it must divide num_heads, {self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary pairs need an even number")
        if self.sliding_window is not None:
            _positive("sliding_window", self.sliding_window)
        divisors = self.rope.frequency_divisors
        if divisors is not None and len(divisors) != self.head_dim // 2:
            raise ValueError(f"rope.frequency_divisors has {len(divisors)} values; head_dim needs {self.head_dim // 2}")
        for token_id in (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f"token id {token_id} lies outside the vocabulary of {self.vocab_size}")
