"""Does a server keep OpenAI's API, and survive what clients do to it? Cases by kind, against any URL."""
