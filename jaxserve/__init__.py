"""jaxserve: an LLM serving engine in JAX. Token ids in, token ids out; text lives in `jaxserve.text`."""

import os

# Whenever XLA's CPU backend reads a cached program it logs, as errors of 2 kB each, that the machine lacks
# "prefer-no-gather" and "prefer-no-scatter". Those are its own tuning hints, not features. What really fails still
# arrives as an exception; whoever wants the log sets the variable, which must happen before jax is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
