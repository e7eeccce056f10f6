"""Decode steps of every weight setting at 1, 8 and 32 rows, in turns, as tokens a second; about 6 minutes on two cores.

python benchmarks/quantization.py [--seconds 60] [--settings none,int8,int8+embeddings,int4,fp8_e4m3]
"""

import argparse
import statistics
import time

from jaxserve.config import CacheSection, EngineConfig, ExecutionSection, ModelSection, SchedulerSection
from jaxserve.device.buckets import StepShape
from jaxserve.device.programs import compile_programs
from jaxserve.device.runner import DeviceRunner
from jaxserve.scheduling.plan import Plan
from jaxserve.simulation.profiler import full_plan, measure_step
from jaxserve.startup.loading import load_model
from jaxserve.text.tokenizer import load_tokenizer
from models.checkpoint import resolve_model

ROWS = (1, 8, 32)
CONTEXT = 128  # tokens of each row: short, so that weights are most of a step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--settings", default="none,int8,int8+embeddings,int4,fp8_e4m3")
    parser.add_argument("--seconds", type=float, default=60.0, help="of measuring, after the programs are compiled")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(resolve_model(arguments.model))
    points: dict[tuple[str, int], tuple[DeviceRunner, Plan]] = {}
    for setting in arguments.settings.split(","):
        config, spec, params = load_model(_config(arguments.model, setting), tokenizer)
        shapes = [StepShape(decode_rows=rows, prefill_blocks=0) for rows in ROWS]
        runner = DeviceRunner(spec, compile_programs(spec, lambda done, total: None, shapes=shapes), params)
        for shape in shapes:
            points[setting, shape.decode_rows] = runner, full_plan(config, shape, CONTEXT)
    seconds: dict[tuple[str, int], list[float]] = {point: [] for point in points}
    end = time.perf_counter() + arguments.seconds
    while time.perf_counter() < end:
        for point, (runner, plan) in points.items():  # in turns: a slow moment of the machine meets all of them
            seconds[point].append(measure_step(runner, plan))
    print("| weights | " + " | ".join(f"{rows} rows" for rows in ROWS) + " |\n| --- |" + " ---: |" * len(ROWS))
    for setting in arguments.settings.split(","):
        rates = [rows / statistics.median(seconds[setting, rows]) for rows in ROWS]
        print(f"| {setting} | " + " | ".join(f"{rate:.0f}" for rate in rates) + " |")


def _config(model: str, setting: str) -> EngineConfig:
    quantization, _, embeddings = setting.partition("+")
    values = {
        "path": model,
        "max_model_len": 256,
        "quantization": quantization,
        "quantize_embeddings": bool(embeddings),
    }
    return EngineConfig(
        model=ModelSection.model_validate(values),
        cache=CacheSection(page_size=16, num_pages=1 + max(ROWS) * CONTEXT // 16),
        scheduler=SchedulerSection(max_num_seqs=max(ROWS)),
        execution=ExecutionSection(decode_buckets=ROWS),
    )


if __name__ == "__main__":
    main()
