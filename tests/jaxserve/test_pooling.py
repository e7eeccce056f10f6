"""What a checkpoint says about pooling."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import ConfigError
from jaxserve.pooling import stated_pooling


def checkpoint(folder: Path, modes: Any) -> Path:
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps(modes))
    return folder


def test_the_checkpoints_own_pooling_is_taken(tmp_path: Path) -> None:
    modes = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    assert stated_pooling(checkpoint(tmp_path, modes)) == "mean"


def test_a_checkpoint_that_says_nothing_pools_its_last_token(tmp_path: Path) -> None:
    assert stated_pooling(tmp_path) == "last"
    assert stated_pooling(tmp_path / "model.gguf") == "last"


@pytest.mark.parametrize(
    "modes",
    [
        {"pooling_mode_cls_token": True},
        {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True},
        {"pooling_mode_mean_tokens": False},
        ["mean"],
    ],
    ids=str,
)
def test_another_pooling_is_refused(tmp_path: Path, modes: Any) -> None:
    with pytest.raises(ConfigError, match="1_Pooling"):
        stated_pooling(checkpoint(tmp_path, modes))
