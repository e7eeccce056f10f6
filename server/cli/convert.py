"""`jaxserve convert`: any checkpoint that can be read becomes an Orbax one with its tokenizer beside it."""

from pathlib import Path

import jax.numpy as jnp

from jaxserve.text.tokenizer import load_tokenizer, save_tokenizer
from models.checkpoint import open_checkpoint, resolve_model, save_orbax
from models.registry import parameter_structs


def convert(source: str, target: Path, *, dtype: str) -> int:
    """Writes the checkpoint; returns how many parameters it has.

    Args:
      source: the embedded model's name, a folder or a `.gguf` file.
      target: a folder that holds no checkpoint yet; made if it is not there.
      dtype: of the stored weights. float32 loses nothing of any source.

    Raises:
      ModelError: the source cannot be read, or the target holds a checkpoint.
    """
    path = resolve_model(source)
    tokenizer = load_tokenizer(path)
    checkpoint = open_checkpoint(path)
    params = checkpoint.load(parameter_structs(checkpoint.config, jnp.dtype(dtype)))
    save_orbax(target, checkpoint.config, params)
    save_tokenizer(tokenizer, target)
    return sum(array.size for array in params.values())
