from collections.abc import Iterable as _Iterable
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar

from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from google.protobuf.internal import containers as _containers

DESCRIPTOR: _descriptor.FileDescriptor

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Iterable[int] | None = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = (
        "allowed_token_ids",
        "bad_word_ids",
        "bad_words",
        "cache_salt",
        "deadline_ms",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "logprobs",
        "max_tokens",
        "min_p",
        "min_tokens",
        "n",
        "presence_penalty",
        "priority",
        "prompt_logprobs",
        "queue_timeout_ms",
        "repetition_penalty",
        "seed",
        "stop",
        "stop_token_ids",
        "temperature",
        "tenant",
        "top_k",
        "top_p",
    )
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: int | None = ..., value: float | None = ...) -> None: ...

    N_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORD_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    n: int
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    bad_word_ids: _containers.RepeatedCompositeFieldContainer[TokenIds]
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    include_stop_str_in_output: bool
    logprobs: int
    prompt_logprobs: int
    priority: int
    tenant: str
    cache_salt: str
    deadline_ms: int
    queue_timeout_ms: int
    def __init__(
        self,
        n: int | None = ...,
        max_tokens: int | None = ...,
        min_tokens: int | None = ...,
        temperature: float | None = ...,
        top_k: int | None = ...,
        top_p: float | None = ...,
        min_p: float | None = ...,
        repetition_penalty: float | None = ...,
        presence_penalty: float | None = ...,
        frequency_penalty: float | None = ...,
        logit_bias: _Mapping[int, float] | None = ...,
        allowed_token_ids: _Iterable[int] | None = ...,
        bad_words: _Iterable[str] | None = ...,
        bad_word_ids: _Iterable[TokenIds | _Mapping] | None = ...,
        seed: int | None = ...,
        stop: _Iterable[str] | None = ...,
        stop_token_ids: _Iterable[int] | None = ...,
        ignore_eos: bool | None = ...,
        include_stop_str_in_output: bool | None = ...,
        logprobs: int | None = ...,
        prompt_logprobs: int | None = ...,
        priority: int | None = ...,
        tenant: str | None = ...,
        cache_salt: str | None = ...,
        deadline_ms: int | None = ...,
        queue_timeout_ms: int | None = ...,
    ) -> None: ...

class Job(_message.Message):
    __slots__ = ("params", "pooling", "text", "token_ids")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    token_ids: TokenIds
    text: str
    params: SamplingParams
    pooling: str
    def __init__(
        self,
        token_ids: TokenIds | _Mapping | None = ...,
        text: str | None = ...,
        params: SamplingParams | _Mapping | None = ...,
        pooling: str | None = ...,
    ) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("jobs", "request_id", "with_text")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    WITH_TEXT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    with_text: bool
    def __init__(
        self, request_id: str | None = ..., jobs: _Iterable[Job | _Mapping] | None = ..., with_text: bool | None = ...
    ) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "token_id", "top", "top_ids")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top: _containers.RepeatedScalarFieldContainer[float]
    def __init__(
        self,
        token_id: int | None = ...,
        logprob: float | None = ...,
        top_ids: _Iterable[int] | None = ...,
        top: _Iterable[float] | None = ...,
    ) -> None: ...

class PromptLogprob(_message.Message):
    __slots__ = ("entry",)
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    entry: TokenLogprobs
    def __init__(self, entry: TokenLogprobs | _Mapping | None = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = (
        "embedding",
        "finish_reason",
        "index",
        "logprobs",
        "num_cached_tokens",
        "prompt_logprobs",
        "queue_s",
        "stop_string",
        "stop_token_id",
        "text",
        "token_ids",
    )
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprob]
    finish_reason: str
    stop_token_id: int
    num_cached_tokens: int
    queue_s: float
    embedding: _containers.RepeatedScalarFieldContainer[float]
    stop_string: str
    def __init__(
        self,
        index: int | None = ...,
        token_ids: _Iterable[int] | None = ...,
        text: str | None = ...,
        logprobs: _Iterable[TokenLogprobs | _Mapping] | None = ...,
        prompt_logprobs: _Iterable[PromptLogprob | _Mapping] | None = ...,
        finish_reason: str | None = ...,
        stop_token_id: int | None = ...,
        num_cached_tokens: int | None = ...,
        queue_s: float | None = ...,
        embedding: _Iterable[float] | None = ...,
        stop_string: str | None = ...,
    ) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    def __init__(self, jobs: _Iterable[Job | _Mapping] | None = ...) -> None: ...

class Embedding(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, values: _Iterable[float] | None = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("embeddings", "prompt_tokens")
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    embeddings: _containers.RepeatedCompositeFieldContainer[Embedding]
    prompt_tokens: int
    def __init__(
        self, embeddings: _Iterable[Embedding | _Mapping] | None = ..., prompt_tokens: int | None = ...
    ) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("add_special_tokens", "text")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    text: str
    add_special_tokens: bool
    def __init__(self, text: str | None = ..., add_special_tokens: bool | None = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Iterable[int] | None = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("index", "request_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    index: int
    def __init__(self, request_id: str | None = ..., index: int | None = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: int
    def __init__(self, aborted: int | None = ...) -> None: ...

class ModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelInfoResponse(_message.Message):
    __slots__ = ("config_json", "eos_token_ids", "max_model_len", "name", "num_token_ids", "version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    max_model_len: int
    num_token_ids: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    config_json: str
    version: str
    def __init__(
        self,
        name: str | None = ...,
        max_model_len: int | None = ...,
        num_token_ids: int | None = ...,
        eos_token_ids: _Iterable[int] | None = ...,
        config_json: str | None = ...,
        version: str | None = ...,
    ) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushResponse(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: int
    def __init__(self, pages: int | None = ...) -> None: ...

class HealthRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HealthResponse(_message.Message):
    __slots__ = ("done", "num_open", "phase", "state", "stats", "total")
    class StatsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: str | None = ..., value: float | None = ...) -> None: ...

    STATE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_OPEN_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    state: str
    phase: str
    done: int
    total: int
    num_open: int
    stats: _containers.ScalarMap[str, float]
    def __init__(
        self,
        state: str | None = ...,
        phase: str | None = ...,
        done: int | None = ...,
        total: int | None = ...,
        num_open: int | None = ...,
        stats: _Mapping[str, float] | None = ...,
    ) -> None: ...
