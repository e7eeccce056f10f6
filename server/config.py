"""The deployment's whole configuration: the engine's sections and the server's own."""

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from jaxserve.config import EngineConfig, Section


class ServerSection(Section):
    host: str = Field(default="127.0.0.1", description="address to listen on; 0.0.0.0 for every interface")
    port: int = Field(default=8000, ge=0, le=65535, description="0 lets the system choose one")
    max_body_bytes: PositiveInt = Field(default=16 * 2**20, description="a longer request body is refused with 413")
    shutdown_timeout_s: NonNegativeFloat = Field(
        default=30.0, description="on shutdown, how long running requests may take to end before they are aborted"
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


class ServeConfig(EngineConfig):
    """What `jaxserve serve` reads."""

    server: ServerSection = ServerSection()
