"""Writes golden_embeddings.npz with transformers: run it where `transformers` and `torch` are, from this folder.

The hidden states after the final norm of the tiny model, of each prompt's last token and their mean over the prompt,
both scaled to length 1.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from tiny_weights import write_tiny_weights
from transformers import LlamaModel

VOCAB_SIZE = 49152
PROMPT_LENGTHS = (1, 2, 31, 32, 33, 64, 65, 100)  # around the ends of blocks and chunks of the server under test


def main() -> None:
    arrays = {}
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_weights(Path(folder), VOCAB_SIZE)
        model = LlamaModel.from_pretrained(folder, dtype=torch.float32)
        rng = np.random.default_rng(1)
        for length in PROMPT_LENGTHS:
            prompt = rng.integers(0, VOCAB_SIZE, length)
            with torch.no_grad():
                hidden = model(torch.tensor(prompt)[None]).last_hidden_state[0]
            arrays[f"prompt_{length}"] = prompt.astype(np.int32)
            for name, state in (("last", hidden[-1]), ("mean", hidden.mean(0))):
                arrays[f"{name}_{length}"] = torch.nn.functional.normalize(state, dim=0).numpy()
    np.savez_compressed(Path(__file__).with_name("golden_embeddings.npz"), **arrays)


if __name__ == "__main__":
    main()
