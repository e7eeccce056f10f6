"""Who runs next, on which pages, and who waits: plain Python that never loads jax."""
