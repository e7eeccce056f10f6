"""How a model's hidden states become one embedding, and what its checkpoint says about that; knows no jax."""

import json
from pathlib import Path
from typing import Any, Literal

from jaxserve.errors import ConfigError

Pooling = Literal["mean", "last"]
SENTENCE_TRANSFORMERS = "1_Pooling/config.json"  # comes with models that were trained to embed
_MODES: dict[str, Pooling] = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}


def stated_pooling(path: Path) -> Pooling:
    """The checkpoint's own pooling; `last` where it says none, since only a decoder's last token has seen all others.

    Raises:
      ConfigError: the checkpoint asks for another kind.
    """
    file = path / SENTENCE_TRANSFORMERS
    if not file.is_file():
        return "last"
    try:
        modes: dict[str, Any] = json.loads(file.read_text())
        chosen = [name for name, on in modes.items() if name.startswith("pooling_mode_") and on]
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if len(chosen) != 1 or chosen[0] not in _MODES:
        raise ConfigError(f"{file} asks for {chosen}; mean and last are supported (model.pooling chooses one)")
    return _MODES[chosen[0]]
