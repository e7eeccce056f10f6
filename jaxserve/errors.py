"""The errors the engine raises on purpose; each surface (HTTP, gRPC, CLI) maps this one hierarchy to its own codes."""


class JaxserveError(Exception):
    """Base of every error that jaxserve raises on purpose."""


class InvalidRequestError(JaxserveError):
    """A request that can never be served as it stands: the client's to mend.

    Attributes:
      message: names the value, the limit and the knob.
      param: the request field at fault, e.g. `"logit_bias"` or `"messages[2].role"`; None if no single one is.
      code: a machine-readable cause, e.g. `"context_length_exceeded"`.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class QueueFullError(JaxserveError):
    """The queue has no room for a request now; the same request may be served later."""


class TenantLimitError(QueueFullError):
    """One tenant has as many requests in the queue as it may; others may still come."""


class DeadlineError(JaxserveError):
    """A request's deadline passed before its first token, or cannot be met as the queue stands."""


class ConfigError(JaxserveError):
    """A configuration that names an unknown key, a wrong value, or more than the machine has."""


class RequestFailedError(JaxserveError):
    """One request that was accepted and could not be carried through, e.g. its numbers were not finite."""


class EngineDeadError(JaxserveError):
    """The engine thread ended on an error of its own; no request can be served any more."""
