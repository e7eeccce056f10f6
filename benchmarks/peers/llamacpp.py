"""W1 through llama.cpp with continuous batching: as many sequences a batch as there are slots, 512 tokens at a time.

Needs an environment of its own: CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-python numpy

usage: python benchmarks/peers/llamacpp.py MODEL.gguf [SLOTS]
       python benchmarks/peers/llamacpp.py --one-stream MODEL.gguf
       python benchmarks/peers/llamacpp.py --requantize MODEL.gguf TARGET.gguf q4_0|q8_0|f16|f32
"""

import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from llama_cpp import llama_cpp

sys.path.insert(0, str(Path(__file__).parents[1]))
from workloads import Work, one_stream, w1

THREADS = 2
BATCH_TOKENS = 512
CONTEXT_PER_SLOT = 512  # the longest request of W1 is 64..256 tokens in and 8..256 out
FILE_TYPES = {
    "f32": llama_cpp.LLAMA_FTYPE_ALL_F32,
    "f16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
}


@dataclass
class Sequence:
    work: Work
    position: int = 0
    generated: int = 0


def requantize(source: str, target: str, kind: str) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.allow_requantize, params.nthread, params.ftype = True, THREADS, FILE_TYPES[kind]
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), params):
        raise SystemExit(f"could not write {target}")


def run(path: str, slots: int, works: list[Work]) -> tuple[float, int]:
    """Returns seconds and generated tokens. What is fed back is arbitrary: choosing costs nothing here."""
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_seq_max = slots * CONTEXT_PER_SLOT, slots
    params.n_batch = params.n_ubatch = BATCH_TOKENS
    params.n_threads = params.n_threads_batch = THREADS
    params.kv_unified = False
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
    context = llama_cpp.llama_init_from_model(model, params)
    memory = llama_cpp.llama_get_memory(context)
    batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
    waiting = deque(works)
    running: dict[int, Sequence] = {}
    generated = 0
    start = time.perf_counter()
    while waiting or running:
        batch.n_tokens = 0
        sampling: list[int] = []
        for slot, sequence in running.items():
            put(batch, 100 + sequence.generated, sequence.position, slot, wants_logits=True)
            sequence.position += 1
            sampling.append(slot)
        for slot in set(range(slots)) - running.keys():
            if not waiting or batch.n_tokens + len(waiting[0].prompt_token_ids) > BATCH_TOKENS:
                break
            running[slot] = sequence = Sequence(waiting.popleft())
            for token_id in sequence.work.prompt_token_ids:
                sequence.position += 1
                is_last = sequence.position == len(sequence.work.prompt_token_ids)
                put(batch, token_id, sequence.position - 1, slot, wants_logits=is_last)
            sampling.append(slot)
        if llama_cpp.llama_decode(context, batch):
            raise SystemExit("llama_decode failed")
        for slot in sampling:
            sequence = running[slot]
            sequence.generated += 1
            generated += 1
            if sequence.generated == sequence.work.output_tokens:
                llama_cpp.llama_memory_seq_rm(memory, slot, 0, -1)
                del running[slot]
    return time.perf_counter() - start, generated


def put(batch: "llama_cpp.llama_batch", token_id: int, position: int, slot: int, *, wants_logits: bool) -> None:
    i = batch.n_tokens
    batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token_id, position, 1, wants_logits
    batch.seq_id[i][0] = slot
    batch.n_tokens = i + 1


if __name__ == "__main__":
    if sys.argv[1] == "--requantize":
        requantize(*sys.argv[2:5])
    elif sys.argv[1] == "--one-stream":
        runs = [[run(sys.argv[2], 1, one_stream(tokens))[0] for tokens in (1, 129)] for _ in range(5)]
        per_token = sorted((whole - first) / 128 for first, whole in runs)[2]
        print(f"llama.cpp {Path(sys.argv[2]).name} one stream: {per_token * 1e3:.1f} ms a token (median of 5)")
    else:
        num_slots = int(sys.argv[2]) if len(sys.argv) > 2 else 16
        seconds, tokens = run(sys.argv[1], num_slots, w1())
        name = Path(sys.argv[1]).name
        print(f"llama.cpp {name} {num_slots} slots: {seconds:.1f} s, {tokens / seconds:.1f} output tok/s")
