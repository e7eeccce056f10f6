"""Text in and out of the engine: tokenizers, chat templates, streaming, stop strings; the engine knows none of it."""
