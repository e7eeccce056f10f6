"""`jaxserve convert`: any checkpoint that can be read becomes an Orbax one with its tokenizer beside it."""
