"""Which module runs which architecture. Adding a family means adding a line here and a file beside it."""

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
