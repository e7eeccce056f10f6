"""W1 through transformers' generate: static batches, each until its longest request is done.

Needs an environment of its own: pip install torch transformers accelerate gguf numpy

usage: python benchmarks/peers/transformers_static.py MODEL.gguf [ROWS]      (three minutes for 32 rows on two cores)
"""

import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from workloads import Work, w1

THREADS = 2
PAD = 0


def generate(model: torch.nn.Module, batch: list[Work]) -> None:
    """Prompts are padded on the left, as generate wants them."""
    width = max(len(work.prompt_token_ids) for work in batch)
    padding = [width - len(work.prompt_token_ids) for work in batch]
    ids = torch.tensor([[PAD] * pad + work.prompt_token_ids for work, pad in zip(batch, padding, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding])
    longest = max(work.output_tokens for work in batch)
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=longest,
            max_new_tokens=longest,
            pad_token_id=PAD,
        )
    assert out.shape == (len(batch), width + longest), out.shape


def main() -> None:
    path, rows = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 32
    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    generate(model, [Work(work.prompt_token_ids[:16], 2) for work in w1()[:rows]])  # warm-up
    works = w1()
    useful = sum(work.output_tokens for work in works)
    start = time.perf_counter()
    for first in range(0, len(works), rows):
        generate(model, works[first : first + rows])
    seconds = time.perf_counter() - start
    print(f"transformers static {rows} rows: {useful} output tokens in {seconds:.1f} s = {useful / seconds:.1f} tok/s")


if __name__ == "__main__":
    main()
