"""Every "auto" of the configuration, and every contradiction in one."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import pytest
from tiny_engine import TINY_MODEL

from jaxserve.config import CacheSection, EngineConfig, ExecutionSection, MeshSection, ModelSection, SchedulerSection
from jaxserve.errors import ConfigError
from jaxserve.startup.resolve import free_memory, resolve
from models.config import ModelConfig, Quantization, WeightFormat
from pallas_kernels.paged_attention import cpu
from pallas_kernels.quantized_matmul import cpu as cpu_matmul

SECTIONS = {
    "model": ModelSection,
    "cache": CacheSection,
    "scheduler": SchedulerSection,
    "execution": ExecutionSection,
    "mesh": MeshSection,
}
PAGE_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # layers, keys and values, KV heads, page, head_dim, float32


class FakeDevice:
    """What `resolve` asks a device."""

    def __init__(self, platform: str, limit: int, in_use: int = 0) -> None:
        self.platform = platform
        self._stats = {"bytes_limit": limit, "bytes_in_use": in_use}

    def memory_stats(self) -> dict[str, int]:
        return self._stats


def resolved(
    *,
    platform: str = "cpu",
    memory: int = 2**30,
    weight_bytes: int = 0,
    model: ModelConfig = TINY_MODEL,
    **values: Any,
) -> EngineConfig:
    """`resolved(cache__num_pages=4)` sets one knob."""
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for key, value in values.items():
        section, _, knob = key.partition("__")
        sections[section][knob] = value
    config = EngineConfig(**{name: SECTIONS[name](**fields) for name, fields in sections.items()})
    device = cast(jax.Device, FakeDevice(platform, memory))
    return resolve(config, model, device, weight_bytes=weight_bytes, free_bytes=memory)


def test_nothing_is_left_auto() -> None:
    # The pooling is the checkpoint's to say: `loading.resolve_for` asks its folder.
    assert '"auto"' not in resolved(model__pooling="last").model_dump_json()


def test_the_cpu_gets_float32_and_accelerators_bfloat16() -> None:
    assert resolved().model.dtype == "float32"
    assert resolved(platform="tpu").model.dtype == "bfloat16"
    assert resolved(platform="gpu").model.dtype == "bfloat16"
    assert resolved(model__dtype="bfloat16").model.dtype == "bfloat16"


def test_the_cache_has_the_activations_dtype_unless_told() -> None:
    assert resolved(model__dtype="float16", platform="gpu").cache.dtype == "float16"
    assert resolved(model__dtype="bfloat16").cache.dtype == "float32", "the CPU keeps narrow weights, not activations"
    assert resolved(cache__dtype="bfloat16").cache.dtype == "bfloat16"


def test_the_model_is_called_like_its_path() -> None:
    assert resolved(model__path="/models/tiny-llama").model.name == "tiny-llama"
    assert resolved(model__path="/models/tiny-llama", model__name="mine").model.name == "mine"


def test_the_context_is_the_models_own_but_at_most_8192() -> None:
    assert resolved().model.max_model_len == 192
    long = replace(TINY_MODEL, max_position=131072)
    assert resolved(model=long).model.max_model_len == 8192
    assert resolved(model=long, model__max_model_len=20000, cache__num_pages=2000).model.max_model_len == 20000


@pytest.mark.parametrize(("platform", "budget", "block_q"), [("cpu", 512, 32), ("tpu", 2048, 64), ("gpu", 2048, 64)])
def test_the_token_budget_leaves_room_for_prompts_beside_all_decodes(platform: str, budget: int, block_q: int) -> None:
    config = resolved(platform=platform, scheduler__max_num_seqs=10)
    assert config.scheduler.max_num_batched_tokens == 10 + budget
    assert config.execution.block_q == block_q


def test_buckets_grow_by_fours_up_to_the_limits() -> None:
    config = resolved(scheduler__max_num_seqs=20, scheduler__max_num_batched_tokens=20 + 32 * 6 + 31)
    assert config.execution.decode_buckets == (1, 10, 20)
    assert config.execution.prefill_buckets == (3, 6)


def test_buckets_are_sorted_and_unique() -> None:
    config = resolved(execution__decode_buckets=(16, 2, 16), execution__prefill_buckets=(8, 1, 8))
    assert config.execution.decode_buckets == (2, 16)
    assert config.execution.prefill_buckets == (1, 8)


def test_the_backend_and_the_cache_folder_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = resolved()
    assert config.execution.attention_backend == "cpu"
    assert config.execution.compilation_cache == str(tmp_path / "jaxserve" / "programs")
    assert resolved(execution__compilation_cache=None).execution.compilation_cache is None
    assert resolved(execution__compilation_cache="here").execution.compilation_cache == "here"


def test_the_cache_folder_is_in_the_home_folder_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolved().execution.compilation_cache == str(tmp_path / ".cache" / "jaxserve" / "programs")


def test_without_a_c_compiler_the_cpu_takes_xla_and_says_so_unless_its_kernel_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu._CALL, "is_registered", False)
    monkeypatch.setenv("CC", str(tmp_path / "absent"))
    folder = str(tmp_path / "programs")
    assert resolved(execution__compilation_cache=folder).execution.attention_backend == "xla"
    reason = f"no C compiler is on the PATH (looked for {tmp_path / 'absent'})"
    assert caplog.messages == [f"attention backend cpu is passed over: {reason}"]
    with pytest.raises(ConfigError, match=re.escape(f"cpu cannot serve this model: {reason}")):
        resolved(execution__compilation_cache=folder, execution__attention_backend="cpu")
    assert resolved(execution__compilation_cache=folder, execution__attention_backend="xla")
    assert len(caplog.messages) == 1


def test_the_cpus_kernel_is_kept_beside_the_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu._CALL, "is_registered", False)
    monkeypatch.setattr(cpu._CALL, "target", "another")  # XLA takes a name once
    resolved(execution__compilation_cache=str(tmp_path))
    assert [path.suffix for path in (tmp_path / "native").iterdir()] == [".so"]
    with pytest.raises(ConfigError, match="cpu cannot serve this model: it is for CPUs, and the device is a tpu"):
        resolved(platform="tpu", execution__attention_backend="cpu")


def test_narrow_weights_are_multiplied_by_the_cpus_kernel_where_it_can_and_a_refusal_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def backend(group_size: int = 32, **values: Any) -> str:
        quantization = Quantization(format="int4", group_size=group_size, has_zeros=True)
        model = replace(TINY_MODEL, intermediate_size=64, quantization=quantization)
        return resolved(model=model, **values).execution.matmul_backend

    assert resolved().execution.matmul_backend == "xla"
    assert backend() == "cpu"
    assert backend(execution__matmul_backend="xla") == "xla"
    assert backend(platform="tpu") == "xla"
    assert not caplog.messages
    assert backend(group_size=16) == "xla"
    reason = "groups of 16 (the checkpoint's, or else model.quantization_group_size) are no multiple of 32"
    slower = "which is slower, and rounds activations otherwise, so that answers differ a little"
    assert caplog.messages == [f"matmul backend cpu is passed over for xla, {slower}: {reason}"]
    with pytest.raises(ConfigError, match=re.escape(f"matmul_backend is cpu, model.quantization int4: {reason}; xla")):
        backend(group_size=16, execution__matmul_backend="cpu")
    with pytest.raises(ConfigError, match=r"it is for whole matrices, and 2 devices \(mesh\.tensor\) share them"):
        backend(mesh__tensor=2, execution__matmul_backend="cpu")
    monkeypatch.setattr(cpu_matmul._CALL, "is_registered", False)
    monkeypatch.setenv("CC", str(tmp_path / "absent"))
    assert backend(execution__compilation_cache=None) == "xla"
    assert caplog.messages[-1].endswith(f"{slower}: no C compiler is on the PATH (looked for {tmp_path / 'absent'})")


def test_a_gpus_kernel_is_resolved_like_any_other_and_named_where_it_cannot_serve_is_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def backend(platform: str = "gpu", format: WeightFormat = "int4", **values: Any) -> str:
        quantization = Quantization.made_at_load(format, group_size=32, embeddings=False)
        model = replace(TINY_MODEL, intermediate_size=128, quantization=quantization)
        values = {"cache__dtype": "bfloat16"} | values
        return resolved(model=model, platform=platform, **values).execution.matmul_backend

    assert backend() == "gpu_triton"
    assert backend(mesh__tensor=2) == "gpu_triton"
    assert backend(execution__matmul_backend="gpu_triton") == "gpu_triton"
    assert backend(execution__matmul_backend="xla") == "xla"
    assert backend(format="int8") == "xla"
    caplog.clear()
    assert backend(model__dtype="float32", execution__attention_backend="xla") == "xla"
    (message,) = caplog.messages
    assert (
        "gpu_triton is passed over for xla, which widens the weights in memory first: activations are float32"
        in message
    )
    for values, reason in (
        ({"format": "int8"}, "the codes are int8, not int4; xla"),
        ({"platform": "cpu"}, "it is for GPUs, and the device is a cpu; xla"),
    ):
        with pytest.raises(ConfigError, match=reason):
            backend(execution__matmul_backend="gpu_triton", **values)
    with pytest.raises(ConfigError, match="matmul_backend is cpu, but no matrix is quantized; auto and xla serve"):
        resolved(execution__matmul_backend="cpu")


def test_pages_hold_every_sequence_at_full_length_if_the_memory_does() -> None:
    config = resolved(scheduler__max_num_seqs=3)
    assert config.cache.num_pages == 1 + 3 * 12


def test_pages_take_their_share_of_what_the_weights_leave() -> None:
    memory = 100 * PAGE_BYTES
    assert resolved(memory=memory, cache__memory_fraction=0.5).cache.num_pages == 1 + 50
    config = resolved(memory=memory, weight_bytes=40 * PAGE_BYTES, cache__memory_fraction=0.5)
    assert config.cache.num_pages == 1 + 30
    assert resolved(memory=200 * PAGE_BYTES).cache.num_pages == 1 + 20
    accelerator = resolved(memory=memory, platform="gpu", cache__dtype="float32")
    assert accelerator.cache.num_pages == 1 + 85
    assert accelerator.cache.memory_fraction == 0.85


@pytest.mark.parametrize(("dtype", "bytes_a_head"), [("bfloat16", 64), ("int8", 36), ("fp8_e5m2", 36), ("int4", 20)])
def test_a_smaller_format_has_more_pages_in_the_same_memory(dtype: str, bytes_a_head: int) -> None:
    config = resolved(memory=10 * PAGE_BYTES, cache__memory_fraction=1.0, cache__dtype=dtype)
    assert config.cache.num_pages == 1 + 10 * 128 // bytes_a_head  # float32 takes 128: 16 numbers, twice


def test_a_kernel_that_cannot_serve_the_format_is_an_error_and_auto_keeps_the_format(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = {"platform": "tpu", "cache__dtype": "int8", "cache__page_size": 16}
    message = (
        "execution.attention_backend is tpu, cache.dtype int8: tpu cannot serve this model: page_size is 16; .*"
        "cache.page_size: 128"
    )
    with pytest.raises(ConfigError, match=message):
        resolved(execution__attention_backend="tpu", **asked)
    config = resolved(**asked)
    assert (config.execution.attention_backend, config.cache.dtype) == ("xla", "int8")
    assert "attention backend tpu is passed over: page_size is 16" in caplog.text


@pytest.mark.parametrize(
    ("asked", "page_size", "backend"),
    [
        ({"platform": "tpu"}, 16, "tpu"),
        ({"platform": "tpu", "cache__dtype": "int8"}, 128, "tpu"),
        ({"platform": "tpu", "cache__dtype": "int4"}, 16, "xla"),  # heads of 16: no page size makes them served
        ({"platform": "tpu", "cache__dtype": "float16"}, 16, "xla"),
        ({"platform": "tpu", "cache__dtype": "int8", "execution__attention_backend": "xla"}, 16, "xla"),
        ({"platform": "cpu", "cache__dtype": "int8", "execution__attention_backend": "tpu"}, 128, "tpu"),
        ({"platform": "tpu", "cache__dtype": "int8", "cache__page_size": 32}, 32, "xla"),
    ],
)
def test_pages_are_as_small_as_the_fastest_kernel_can_serve(
    asked: dict[str, Any], page_size: int, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        config = resolved(**asked)
    assert (config.cache.page_size, config.execution.attention_backend) == (page_size, backend)
    said = "cache.page_size auto is 128, for attention backend tpu: page_size is 64; int8 pages must be"
    assert (said in caplog.text) == (page_size == 128)


@pytest.mark.parametrize(
    ("kv_heads", "tensor", "pages"),
    [
        (2, 2, 20),  # each device keeps one KV head of two: twice as many pages
        (2, 8, 20),  # KV heads are kept whole, on four devices each
        (3, 2, 10),  # one device keeps two of the three, the other one and a dummy
        (3, 4, 20),
    ],
)
def test_pages_are_counted_by_what_they_take_on_one_device(kv_heads: int, tensor: int, pages: int) -> None:
    model = replace(TINY_MODEL, num_heads=6, num_kv_heads=kv_heads)
    memory = 10 * PAGE_BYTES
    config = resolved(memory=memory, model=model, mesh__tensor=tensor, cache__memory_fraction=1.0)
    assert config.cache.num_pages == 1 + pages


def test_an_auto_context_shrinks_to_what_the_pages_hold() -> None:
    config = resolved(memory=10 * PAGE_BYTES, cache__memory_fraction=0.5)
    assert config.model.max_model_len == 5 * 16


def test_pages_that_are_given_stay() -> None:
    assert resolved(cache__num_pages=7, cache__page_size=8).cache.num_pages == 7


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model__max_model_len": 193}, "model.max_model_len is 193; the model was made for at most 192 tokens"),
        ({"model__max_model_len": 1}, "model.max_model_len is 1; .* need at least 2"),
        (
            {"cache__host_pages": 5, "cache__prefix_caching": False},
            "cache.host_pages is 5, but without cache.prefix_caching no page is kept",
        ),
        ({"cache__num_pages": 1}, "cache.num_pages is 1; at least 2 are needed"),
        (
            {"scheduler__max_num_batched_tokens": 47},
            "scheduler.max_num_batched_tokens is 47; .*max_num_seqs 16 .*execution.block_q 32 it must be at least 48",
        ),
        (
            {"execution__decode_buckets": (1, 8)},
            r"execution.decode_buckets is \[1, 8\]; the largest must be max_num_seqs, 16",
        ),
        ({"execution__decode_buckets": (32,)}, r"execution.decode_buckets is \[32\]"),
        ({"execution__decode_buckets": ()}, r"execution.decode_buckets is \[\]"),
        ({"execution__prefill_buckets": ()}, "execution.prefill_buckets is empty"),
        (
            {"model__max_model_len": 192, "memory": 10 * PAGE_BYTES, "cache__memory_fraction": 0.5},
            "the cache holds 80 tokens, .* but model.max_model_len is 192; .*cache.memory_fraction",
        ),
        (
            {"memory": 10 * PAGE_BYTES, "weight_bytes": 11 * PAGE_BYTES},
            "the cache holds 0 tokens.*cache.memory_fraction",
        ),
    ],
)
def test_a_contradiction_is_refused_and_names_value_limit_and_knob(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(**values)


def test_the_smallest_sound_budget_is_accepted() -> None:
    config = resolved(scheduler__max_num_batched_tokens=48)
    assert config.execution.prefill_buckets == (1,)


def test_free_memory_is_what_the_device_says_or_else_the_operating_system() -> None:
    assert free_memory(cast(jax.Device, FakeDevice("gpu", 100, in_use=30))) == 70
    assert free_memory(jax.devices("cpu")[0]) > 2**20
