"""The configuration models: strict about names and numbers, and fixed once made."""

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from jaxserve.config import EngineConfig, ExecutionSection
from pallas_kernels.paged_attention import BackendName


def test_the_default_configuration_asks_for_the_embedded_model() -> None:
    config = EngineConfig()
    assert config.model.path == "smollm2-135m"
    assert config.cache.num_pages == config.scheduler.max_num_batched_tokens == config.execution.block_q == "auto"


def test_every_knob_explains_itself() -> None:
    for name, section in EngineConfig.model_fields.items():
        assert section.annotation is not None
        for knob, field in section.annotation.model_fields.items():
            assert field.description, f"{name}.{knob}"


@pytest.mark.parametrize(
    ("section", "knob", "value"),
    [
        ("model", "dtype", "int8"),
        ("model", "max_model_len", 0),
        ("model", "max_model_len", "many"),
        ("cache", "page_size", 0),
        ("cache", "page_size", -16),
        ("cache", "num_pages", 0),
        ("cache", "memory_fraction", 0.0),
        ("cache", "memory_fraction", 1.01),
        ("cache", "memory_fraction", float("nan")),
        ("cache", "memory_fraction", float("inf")),
        ("scheduler", "max_num_seqs", 0),
        ("scheduler", "max_num_seqs", 1.5),
        ("scheduler", "max_num_batched_tokens", -1),
        ("execution", "attention_backend", "cuda"),
        ("execution", "decode_buckets", (1, 0)),
        ("execution", "prefill_buckets", (-4,)),
        ("execution", "strict_shapes", "perhaps"),
        ("execution", "unknown", 1),
    ],
)
def test_a_wrong_value_or_name_is_refused_with_its_path(section: str, knob: str, value: Any) -> None:
    with pytest.raises(ValidationError) as error:
        EngineConfig.model_validate({section: {knob: value}})
    assert {detail["loc"][:2] for detail in error.value.errors()} == {(section, knob)}


def test_a_configuration_cannot_be_changed() -> None:
    config = EngineConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.cache.page_size = 8


def test_every_attention_backend_can_be_asked_for() -> None:
    asked = ExecutionSection.model_fields["attention_backend"].annotation
    assert get_args(asked) == ("auto", *get_args(BackendName))
