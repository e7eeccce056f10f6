"""What decides a compiled program decides its fingerprint, and nothing else does."""

from dataclasses import replace
from typing import Any

import jax
import pytest
from tiny_engine import NUM_TOKEN_IDS, TINY_MODEL, TinyOptions, tiny_config

from jaxserve.device.buckets import StepShape
from jaxserve.device.programs import ProgramSpec
from jaxserve.device.sharding import tensor_mesh
from jaxserve.startup.fingerprint import differences, digest, fingerprint, program_sources
from jaxserve.startup.loading import program_spec
from models.config import ModelConfig


def spec_of(model: ModelConfig = TINY_MODEL, dtype: str = "float32") -> ProgramSpec:
    config = tiny_config(TinyOptions())
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    return program_spec(config, model, NUM_TOKEN_IDS, tensor_mesh(1, jax.devices()))


def test_two_starts_alike_have_the_same_fingerprint() -> None:
    assert fingerprint(spec_of()) == fingerprint(spec_of())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 9),
        ("pages_per_seq", 25),
        ("page_size", 4),
        ("num_pages", 77),
        ("block_q", 8),
        ("kv_dtype", "int4"),
        ("num_token_ids", 149),
        ("matmul_backend", "cpu"),
    ],
)
def test_every_number_of_the_spec_counts(field: str, value: Any) -> None:
    spec = spec_of()
    changed = fingerprint(replace(spec, **{field: value}))
    (difference,) = differences(fingerprint(spec), changed)
    assert difference == (field, str(getattr(spec, field)), str(value))
    assert digest(changed) != digest(fingerprint(spec))


def test_the_model_and_its_dtype_count() -> None:
    ours = fingerprint(spec_of())
    other_eps = fingerprint(spec_of(replace(TINY_MODEL, rms_norm_eps=1e-6)))
    assert differences(ours, other_eps) == [("model.rms_norm_eps", "1e-05", "1e-06")]
    other_dtype = fingerprint(spec_of(dtype="bfloat16"))
    ((name, theirs, now),) = differences(ours, other_dtype)
    assert name == "params"
    assert "float32" in theirs
    assert "bfloat16" in now


def test_compiler_flags_count(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = fingerprint(spec_of())
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert [name for name, _, _ in differences(ours, fingerprint(spec_of()))] == ["XLA_FLAGS"]
    monkeypatch.undo()
    with jax.default_matmul_precision("highest"):
        assert [name for name, _, _ in differences(ours, fingerprint(spec_of()))] == ["jax_default_matmul_precision"]


def test_which_steps_there_are_does_not_count() -> None:
    """A program's file is named after its shape, so another choice of buckets finds those that it shares."""
    spec = spec_of()
    assert fingerprint(replace(spec, shapes=(StepShape(decode_rows=8, prefill_blocks=0),))) == fingerprint(spec)


def test_the_code_that_runs_on_the_device_counts_and_other_code_does_not() -> None:
    sources = program_sources("xla")
    for name in ("programs", "sampling", "batch", "sharding", "buckets"):
        assert f"jaxserve.device.{name}" in sources
    assert {"models.registry", "models.llama", "models.layers", "pallas_kernels.paged_attention.xla"} <= sources.keys()
    assert "pallas_kernels.paged_attention.tpu" not in sources
    assert "pallas_kernels.paged_attention.tpu" in program_sources("tpu")
    name = "pallas_kernels.paged_attention.cpu: cpu.c"
    assert "XLA_FFI_Error *paged_attention(" in program_sources("cpu")[name]
    assert name not in sources
    assert "pl.pallas_call" in sources["pallas_kernels.quantized_matmul.api: gpu_triton.py"]
    assert "jaxserve.engine" not in sources
    assert "server.app" not in sources


def test_of_long_values_only_the_words_that_differ_are_shown() -> None:
    common = " ".join(f"feature{i}" for i in range(20))
    assert differences({"cpu": f"{common} amx"}, {"cpu": f"{common} avx512f"}) == [("cpu", "amx", "avx512f")]
    assert differences({"cpu": f"{common} amx"}, {"cpu": common}) == [("cpu", "amx", "nothing more")]


def test_a_field_that_one_side_lacks_is_absent_there() -> None:
    assert differences({"old": "1"}, {"new": "2"}) == [("new", "absent", "2"), ("old", "1", "absent")]
