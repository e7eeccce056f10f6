"""`jaxserve convert`: any checkpoint that can be read becomes an Orbax one with its tokenizer beside it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp

from jaxserve.calibration import quantize_calibrated
from jaxserve.errors import ConfigError
from jaxserve.text.tokenizer import load_tokenizer, save_tokenizer
from models.checkpoint import open_checkpoint, resolve_model, save_orbax
from models.checkpoint.orbax import check_free
from models.config import Quantization
from models.errors import UnsupportedModelError
from models.quantization import check_groups
from models.registry import parameter_structs


def convert(
    source: str,
    target: Path,
    *,
    dtype: str,
    quantization: Quantization | None = None,
    calibration: Sequence[Path] = (),
    report: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> int:
    """Writes the checkpoint; returns how many parameters it has.

    Args:
      source: the embedded model's name, a folder or a `.gguf` file.
      target: a folder that holds no checkpoint yet; made if it is not there.
      dtype: of the stored weights, and of scales. float32 loses nothing of any source.
      quantization: of the matrices; None: as the source stores them.
      calibration: texts that the quantized model is fitted to (`jaxserve.calibration`); none: each matrix by itself.
      report: called with ("calibrating", layers done, layers).

    Raises:
      ConfigError: a text cannot be read or is too short, or there is nothing to calibrate.
      ModelError: the source cannot be read or is quantized otherwise, or the target holds a checkpoint.
    """
    check_free(target)
    path = resolve_model(source)
    tokenizer = load_tokenizer(path)
    checkpoint = open_checkpoint(path)
    wide = config = checkpoint.config
    if quantization is not None:
        if config.quantization is not None:
            raise UnsupportedModelError(
                f"{path}: quantized already, as {config.quantization.format}; leave --quantize out, or convert the "
                f"model that it was made of"
            )
        config = replace(config, quantization=quantization)
        check_groups(config, 1)
    if calibration:
        if quantization is None:
            raise ConfigError("--calibration is for --quantize, which is not given")
        token_ids = tokenizer.encode("\n".join(map(_read, calibration)))
        params = checkpoint.load(parameter_structs(wide, jnp.dtype(jnp.float32)))
        params = quantize_calibrated(
            wide, params, token_ids, quantization, dtype, report=lambda done, total: report("calibrating", done, total)
        )
    else:
        params = checkpoint.load(parameter_structs(config, jnp.dtype(dtype)))
    save_orbax(target, config, params)
    save_tokenizer(tokenizer, target)
    return sum(array.size for name, array in params.items() if not name.endswith((".scales", ".zeros")))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--calibration {path}: {error}") from None
