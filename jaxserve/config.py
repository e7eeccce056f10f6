"""Every knob of the engine, once: YAML, flags and `LLM(...)` fill these models; "auto" is resolved in one place."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from jaxserve.pooling import Pooling
from pallas_kernels.kv_dtype import KVDtype

Auto = Literal["auto"]
Dtype = Literal["float32", "bfloat16", "float16"]
PolicyName = Literal["fcfs", "priority", "longest-prefix", "fair", "static", "dynamic"]


class Section(BaseModel):
    """A part of the configuration; unknown keys are errors and values never change once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSection(Section):
    path: str = Field(
        "smollm2-135m", description="the embedded model's name, a Hugging Face or Orbax folder, a .gguf file"
    )
    name: str | Auto = Field("auto", description="the name clients ask for; auto: the last part of the path")
    dtype: Dtype | Auto = Field(
        "auto",
        description="weights, and activations except on the CPU, where those are float32; auto: bfloat16 on "
        "accelerators, float32 on the CPU",
    )
    quantization: Literal["auto", "none", "int8", "int4", "fp8_e4m3"] = Field(
        "auto",
        description="of the layers' matrices, made while they are read; auto: as the checkpoint stores them; "
        "see docs/quantization.md",
    )
    quantization_group_size: PositiveInt = Field(32, description="int4: inputs that share a scale and a zero point")
    quantize_embeddings: bool = Field(False, description="the embedding and the head as well")
    max_model_len: PositiveInt | Auto = Field(
        "auto", description="tokens per request, prompt and output; auto: the model's own, at most 8192"
    )
    pooling: Pooling | Auto = Field(
        "auto", description="of hidden states to an embedding, mean or last; auto: the checkpoint's own, else last"
    )


class CacheSection(Section):
    page_size: PositiveInt | Auto = Field(
        "auto",
        description="tokens per page; auto: the smallest from 16 to 128 that the device's fastest attention serves",
    )
    num_pages: PositiveInt | Auto = Field(
        "auto", description="auto: from memory_fraction, at most what max_num_seqs full contexts need"
    )
    memory_fraction: Annotated[float, Field(gt=0, le=1)] | Auto = Field(
        "auto",
        description="share of the device's free memory, after the weights, that pages may take; "
        "auto: 0.85, and 0.1 on the CPU, where the memory is everyone's and a start must write to all of it",
    )
    dtype: KVDtype | Auto = Field(
        "auto",
        description="keys and values; auto: as the activations; int8, fp8 and int4 have a scale a token and head",
    )
    prefix_caching: bool = Field(True, description="keep full pages, and share them among equal beginnings")
    host_pages: NonNegativeInt = Field(
        0, description="evicted pages to keep in host memory, to come back by copy; 0: none"
    )
    isolate_tenants: bool = Field(False, description="never share pages between tenants, as if each had a salt")


class SchedulerSection(Section):
    max_num_seqs: PositiveInt = Field(16, description="requests running at once")
    max_num_batched_tokens: PositiveInt | Auto = Field(
        "auto", description="token budget of a step; auto: max_num_seqs + 512"
    )
    policy: PolicyName = Field("fcfs", description="who comes in next; see docs/scheduling.md")
    admission: Literal["optimistic", "guaranteed"] = Field(
        "optimistic",
        description="optimistic: admit on a share of the pages that requests may come to want, preempt when they run "
        "out; guaranteed: keep back all of them, never preempt",
    )
    ageing_s: PositiveFloat = Field(10.0, description="seconds of waiting that are worth one step of priority")
    tenant_weights: dict[str, PositiveFloat] = Field({}, description="shares under `fair`; others have 1")
    max_queue_delay_ms: NonNegativeFloat = Field(100.0, description="how long `dynamic` waits for a full batch")
    long_prefill_token_threshold: PositiveInt | None = Field(
        None, description="prompt tokens that one request may take in a step, so that others run beside it; null: all"
    )
    max_consecutive_prefills: PositiveInt | None = Field(
        None, description="steps with prompts in a row while others decode, before one without; null: any number"
    )
    max_queued_requests: PositiveInt | None = Field(None, description="more are refused with 503; null: no limit")
    max_queued_tokens: PositiveInt | None = Field(
        None, description="prompt tokens in the queue; more are refused with 503; null: no limit"
    )
    max_running_per_tenant: PositiveInt | None = Field(None, description="requests of one tenant running at once")
    max_queued_per_tenant: PositiveInt | None = Field(
        None, description="requests of one tenant in the queue; more are refused with 429; null: no limit"
    )
    step_times: str | None = Field(
        None, description="step-time table (`jaxserve profile`): refuse deadlines that cannot be met; null: refuse none"
    )


class ExecutionSection(Section):
    attention_backend: Literal["auto", "tpu", "gpu_mosaic", "gpu_triton", "cpu", "xla"] = Field(
        "auto",
        description="auto: the fastest for this device and model; kernels for TPU and GPU are simulated elsewhere",
    )
    matmul_backend: Literal["auto", "cpu", "gpu_triton", "xla"] = Field(
        "auto",
        description="of quantized weights; cpu: a kernel in C for int8 and int4, gpu_triton: one for int4 on a GPU; "
        "auto: the device's own where it can, xla elsewhere",
    )
    block_q: PositiveInt | Auto = Field(
        "auto", description="tokens per prefill block; auto: 32 on the CPU, 64 elsewhere"
    )
    decode_buckets: tuple[PositiveInt, ...] | Auto = Field("auto", description="decode rows of the compiled steps")
    prefill_buckets: tuple[PositiveInt, ...] | Auto = Field("auto", description="prefill blocks of the compiled steps")
    compilation_cache: str | Auto | None = Field(
        "auto", description="folder of compiled programs and kernels; auto: in the user's cache folder; null: none"
    )
    bundle: str | None = Field(None, description="folder of programs that `jaxserve compile` wrote; it runs as code")
    bundle_fallback: bool = Field(False, description="a bundle that does not match is left aside with a warning")
    serve_while_compiling: bool = Field(
        False, description="ready with the fewest programs that serve everything; the others follow meanwhile"
    )
    strict_shapes: bool = Field(False, description="a compilation after ready is an error")


class MeshSection(Section):
    tensor: PositiveInt = Field(1, description="devices that share every layer: heads, MLP and vocabulary are split")
    topology: str | None = Field(
        None, description="the machine this is for, such as v5e:2x4 or h200; read by `jaxserve aot`, nothing else"
    )


class EngineConfig(Section):
    """The engine's whole configuration."""

    model: ModelSection = ModelSection()
    cache: CacheSection = CacheSection()
    scheduler: SchedulerSection = SchedulerSection()
    execution: ExecutionSection = ExecutionSection()
    mesh: MeshSection = MeshSection()
