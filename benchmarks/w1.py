"""W1 through the engine, offline: seconds, useful output tokens per second, steps, compilations.

usage: python benchmarks/w1.py [SLOTS] [--set model.dtype=bfloat16 --set execution.attention_backend=xla ...]
"""

import argparse
import time

from workloads import w1

from jaxserve.config import EngineConfig
from jaxserve.config_file import read_config
from jaxserve.llm import LLM, Job
from jaxserve.request import SamplingParams


def main(slots: int, settings: list[str]) -> None:
    base = ["model.max_model_len=1024", f"scheduler.max_num_seqs={slots}"]
    llm = LLM.from_config(read_config(EngineConfig, assignments=[*base, *settings]))
    jobs = [
        Job(
            prompt_token_ids=work.prompt_token_ids,
            params=SamplingParams(temperature=0.0, max_tokens=work.output_tokens, ignore_eos=True),
        )
        for work in w1()
    ]
    steps_before = llm.engine.stats().steps_total
    start = time.perf_counter()
    output_tokens = sum(len(generation.completions[0].token_ids) for _, generation in llm.run(enumerate(jobs)))
    seconds = time.perf_counter() - start
    stats = llm.engine.stats()
    assert output_tokens == sum(job.params.max_tokens or 0 for job in jobs)
    print(
        f"jaxserve {slots} slots{''.join(f', {text}' for text in settings)}: "
        f"{seconds:.1f} s, {output_tokens / seconds:.1f} output tok/s, "
        f"{stats.steps_total - steps_before} steps, {stats.compilations_after_ready} compilations after ready"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("slots", type=int, nargs="?", default=32)
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="A.B=C")
    options = parser.parse_args()
    main(options.slots, options.settings)
