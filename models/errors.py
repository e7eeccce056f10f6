"""The errors of the model floor: what is wrong with a checkpoint, and what this code cannot run."""

MAX_MESSAGE_CHARS = 1000  # a damaged file may have names of any length and kind


class ModelError(Exception):
    """Base of every error that models/ raises on purpose. A long message loses its middle; any can be printed."""

    def __init__(self, message: str) -> None:
        half = MAX_MESSAGE_CHARS // 2
        shown = message if len(message) <= MAX_MESSAGE_CHARS else f"{message[:half]}…{message[-half:]}"
        super().__init__(shown.encode("utf-8", "backslashreplace").decode())


class CheckpointError(ModelError):
    """A checkpoint that is damaged or incomplete; the message names the file and the tensor or key."""


class UnsupportedModelError(ModelError):
    """A sound checkpoint of something this code does not implement; the message names it."""
