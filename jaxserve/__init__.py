"""jaxserve: an LLM serving engine in JAX. Token ids in, token ids out; text lives in `jaxserve.text`."""
