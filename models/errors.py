"""The errors of the model floor: what is wrong with a checkpoint, and what this code cannot run."""


class ModelError(Exception):
    """Base of every error that models/ raises on purpose."""


class CheckpointError(ModelError):
    """A checkpoint that is damaged or incomplete; the message names the file and the tensor or key."""


class UnsupportedModelError(ModelError):
    """A sound checkpoint of something this code does not implement; the message names it."""
