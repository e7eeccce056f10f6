"""Checkpoints in three formats behind one door: `open_checkpoint(resolve_model(name)).load(expected)`; no models."""

from models.checkpoint.base import Checkpoint
from models.checkpoint.open import open_checkpoint, read_model_config, resolve_model
from models.checkpoint.orbax import save_orbax

__all__ = ["Checkpoint", "open_checkpoint", "read_model_config", "resolve_model", "save_orbax"]
