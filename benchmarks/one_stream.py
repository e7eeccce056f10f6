"""One user alone: 128 prompt tokens in, then the time of each further token; the difference of 129 and 1 output tokens.

usage: python benchmarks/one_stream.py [--set model.dtype=bfloat16 ...]
"""

import argparse
import time

from workloads import one_stream

from jaxserve.config import EngineConfig
from jaxserve.config_file import read_config
from jaxserve.llm import LLM, Job
from jaxserve.request import SamplingParams

RUNS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="A.B=C")
    settings = parser.parse_args().settings
    base = ["model.max_model_len=1024", "cache.prefix_caching=false"]
    llm = LLM.from_config(read_config(EngineConfig, assignments=[*base, *settings]))

    def seconds(output_tokens: int) -> float:
        (work,) = one_stream(output_tokens)
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        start = time.perf_counter()
        list(llm.run([(0, Job(prompt_token_ids=work.prompt_token_ids, params=params))]))
        return time.perf_counter() - start

    seconds(2)  # the first run touches everything once
    firsts, per_token = [], []
    for _ in range(RUNS):
        firsts.append(seconds(1))
        per_token.append((seconds(129) - firsts[-1]) / 128)
    first, each = sorted(firsts)[RUNS // 2], sorted(per_token)[RUNS // 2]
    print(
        f"jaxserve one stream{''.join(f', {text}' for text in settings)}: first token after {first * 1e3:.0f} ms, "
        f"{each * 1e3:.1f} ms a token (medians of {RUNS})"
    )


if __name__ == "__main__":
    main()
