"""The deployment's whole configuration: the engine's sections and the server's own."""

from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from jaxserve.config import EngineConfig, Section


class LimitsSection(Section):
    """What one client can take from the others; how much one request may ask for stands in `SamplingParams`."""

    max_connections: PositiveInt = Field(
        default=1024, description="open at once; further ones are closed. Of gRPC: calls that work for their answer"
    )
    max_header_bytes: PositiveInt = Field(default=32 * 2**10, description="of a request's headers; more is a 431")
    header_timeout_s: PositiveFloat = Field(default=10.0, description="for a request's head to come")
    body_timeout_s: PositiveFloat = Field(default=60.0, description="for a request's body to come; then 408")
    read_timeout_s: PositiveFloat = Field(
        default=60.0, description="for a client to read what waits for it; then the connection and its work end"
    )
    keep_alive_s: PositiveInt = Field(default=30, description="that an idle connection stays open")
    request_timeout_s: PositiveFloat | None = Field(
        default=None, description="for a request to end; then it does, with reason abort; null: no limit"
    )
    max_text_jobs: PositiveInt = Field(
        default=256, description="prompts that wait to be tokenized or rendered; more are refused with 503"
    )


class SecuritySection(Section):
    api_keys_file: str | None = Field(default=None, description="API keys, one a line, each perhaps as name:key")
    api_keys_variable: str = Field(
        default="JAXSERVE_API_KEYS", description="environment variable with API keys; without any key all may ask"
    )
    admin_keys_file: str | None = Field(default=None, description="keys of the routes under /admin/, as above")
    admin_keys_variable: str = Field(
        default="JAXSERVE_ADMIN_KEYS", description="environment variable with such keys; without any, no admin routes"
    )
    open_routes: tuple[str, ...] = Field(default=("/live", "/ready", "/health"), description="that need no key")
    requests_per_minute: PositiveFloat | None = Field(default=None, description="of each key; more get 429")
    tokens_per_minute: PositiveFloat | None = Field(
        default=None, description="of each key, prompt and output; while they are used up its requests get 429"
    )
    tls_certificate: str | None = Field(default=None, description="PEM file; with it the server speaks TLS only")
    tls_key: str | None = Field(default=None, description="PEM file of the certificate's key")
    tls_client_ca: str | None = Field(default=None, description="PEM file; clients must show a certificate by it")
    cors_origins: tuple[str, ...] = Field(default=(), description="web pages that may ask, e.g. https://example.org")
    profile_folder: str | None = Field(default=None, description="where /admin/profile may write; null: nowhere")

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("whole: tls_certificate and tls_key go together")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("whole: tls_client_ca needs tls_certificate and tls_key")
        return self


class ObservabilitySection(Section):
    metrics_prefix: Literal["jaxserve", "vllm"] = Field(
        default="jaxserve", description="of the metrics that vLLM has as well; vllm: its dashboards work as they are"
    )
    log_format: Literal["text", "json"] = Field(default="text", description="json: one object a line")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="warning", description="of our own logs")
    access_log: bool = Field(default=False, description="a line for each request, whatever log_level is")
    otlp_endpoint: str | None = Field(
        default=None, description="traces go there by OTLP over HTTP, e.g. http://localhost:4318; needs jaxserve[otel]"
    )


class ServerSection(Section):
    host: str = Field(default="127.0.0.1", description="address to listen on; 0.0.0.0 for every interface")
    port: int = Field(default=8000, ge=0, le=65535, description="0 lets the system choose one")
    max_body_bytes: PositiveInt = Field(default=16 * 2**20, description="a longer request body is refused with 413")
    shutdown_timeout_s: NonNegativeFloat = Field(
        default=30.0, description="on shutdown, how long running requests may take to end before they are aborted"
    )
    special_tokens_in_messages: bool = Field(
        default=False,
        description="special tokens that a chat's messages spell out, like <|im_end|>, become themselves; else text",
    )
    allow_chat_template: bool = Field(
        default=False, description="a request may bring its own chat_template, which is a program run on this server"
    )
    step_timeout_s: PositiveFloat = Field(
        default=120.0, description="a step of the device that takes longer is taken for hung, and the process ends"
    )
    max_stored_responses: PositiveInt = Field(
        default=1000, description="responses kept in memory for previous_response_id; the one unread for longest goes"
    )
    max_stored_response_chars: PositiveInt = Field(default=2**26, description="characters of all of them together")
    text_threads: PositiveInt = Field(default=2, description="prompts tokenized and chats rendered at once")
    grpc_listen: str = Field(default="127.0.0.1:8001", description="of `jaxserve engine`: host:port for gRPC")
    dashboard: bool = Field(default=True, description="the live page at /dashboard")
    engine: str | None = Field(
        default=None, description="host:port of an engine's process: `jaxserve serve` then runs apart from it"
    )
    engine_ca: str | None = Field(default=None, description="PEM file: the engine speaks TLS with a certificate by it")
    engine_key_variable: str = Field(
        default="JAXSERVE_ENGINE_KEY", description="environment variable with the key that the engine asks for"
    )
    limits: LimitsSection = LimitsSection()
    security: SecuritySection = SecuritySection()
    observability: ObservabilitySection = ObservabilitySection()


class ServeConfig(EngineConfig):
    """What `jaxserve serve` reads."""

    server: ServerSection = ServerSection()
