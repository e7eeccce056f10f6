"""Which module runs which architecture. Adding a family means adding a line here and a file beside it."""

import jax
import jax.numpy as jnp
from flax import nnx

from models.config import ModelConfig
from models.errors import UnsupportedModelError
from models.llama import Llama

ARCHITECTURES: dict[str, type[Llama]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Llama,
}


def module_for(config: ModelConfig) -> type[Llama]:
    """Raises UnsupportedModelError naming the architecture and those that would work."""
    if config.architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModelError(f"architecture {config.architecture} is not implemented; implemented are {known}")
    return ARCHITECTURES[config.architecture]


def parameter_structs(config: ModelConfig, dtype: jnp.dtype) -> dict[str, jax.ShapeDtypeStruct]:
    """Every parameter that a model of this shape has, by its canonical name; no memory is taken."""
    state = nnx.to_flat_state(nnx.state(module_for(config)(config, dtype)))
    return {".".join(map(str, path)): param.get_value() for path, param in state}
