"""`jaxserve profile` and `jaxserve simulate`, on a tiny model."""

import json
from pathlib import Path

import pytest

from jaxserve.simulation.step_times import StepTimes
from jaxserve.simulation.traces import TracedRequest, write_trace
from server.cli.main import run

FLAGS = [
    *("--served-model-name", "tiny", "--max-model-len", "128"),
    *("--set", "cache.num_pages=65"),
    *("--set", "scheduler.max_num_seqs=2"),
    *("--set", "scheduler.max_num_batched_tokens=34"),
    *("--set", "execution.decode_buckets=[2]"),
    *("--set", "execution.prefill_buckets=[1]"),
]


def test_simulate_replays_a_trace_against_what_profile_measured(
    tiny_model: Path,
    tmp_path: Path,
    program_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = ["--model", str(tiny_model), *FLAGS, "--set", f"execution.compilation_cache={program_cache}"]
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, [TracedRequest(arrival_s=0.1 * i, prompt_tokens=40, output_tokens=5) for i in range(20)])
    assert run(["simulate", "--trace", str(trace), *flags]) == 2
    assert "run `jaxserve profile`" in capsys.readouterr().err

    assert run(["profile", "--seconds", "0.5", "--trace", str(tmp_path / "profiler"), *flags]) == 0
    told = capsys.readouterr()
    assert "tiny on cpu" in told.out
    assert "device idle for" in told.out
    assert "measuring: 100/100" in told.err
    assert list((tmp_path / "profiler").rglob("*.xplane.pb"))
    [written] = (tmp_path / "jaxserve" / "step_times").iterdir()
    assert str(written) in told.out
    times = StepTimes.read(written)
    assert [(shape.decode_rows, shape.prefill_blocks) for shape in times.shapes] == [(2, 0), (2, 1)]

    assert run(["simulate", "--trace", str(trace), "--json", *flags]) == 0
    told = capsys.readouterr()
    report = json.loads(told.out)
    assert not told.err
    assert (report["requests"], report["output_tokens"], report["refused"]) == (20, 100, {})
    assert report["ttft"]["p50"] >= times.estimate(0, 1, 40)

    arrivals = ["--arrivals", "gamma", "--rate", "5", "--cv", "2", "--requests", "30", "--prompt-tokens", "100-200"]
    other = [*flags, "--set", "execution.decode_buckets=[1,2]", "--times", str(written)]
    assert run(["simulate", *arrivals, "--output-tokens", "4", *other]) == 0
    told = capsys.readouterr()
    assert "30 requests" in told.out
    assert "refused (InvalidRequestError)" in told.out  # prompts of up to 200 tokens, where 128 is the limit
    assert "was measured for another configuration" in told.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "give either --trace or --arrivals"),
        (["--trace", "a", "--arrivals", "poisson"], "give either --trace or --arrivals"),
        (["--arrivals", "poisson"], "--arrivals needs --rate"),
        (["--trace", "nowhere.jsonl"], "cannot read the trace nowhere.jsonl"),
        (["--arrivals", "poisson", "--rate", "1", "--peak-tflops", "1"], "both --hbm-gb-per-s and --peak-tflops"),
    ],
)
def test_a_trace_that_cannot_be_had_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert run(["simulate", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxserve: ")
    assert told in error


def test_an_estimate_needs_no_measurement(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = ["--hbm-gb-per-s", "819", "--peak-tflops", "197"]
    arrivals = ["--arrivals", "constant", "--rate", "100", "--requests", "30", "--prompt-tokens", "40"]
    flags = ["--model", str(tiny_model), *FLAGS, "--output-tokens", "5"]
    assert run(["simulate", *machine, *arrivals, *flags]) == 0
    assert "tiny on 819 GB/s and 197.0 TFLOP/s (estimate)" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [["--rate", "0"], ["--requests", "0"], ["--prompt-tokens", "9-3"], ["--cv", "nan"]])
def test_numbers_that_make_no_traffic_show_the_usage(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        run(["simulate", "--arrivals", "gamma", *flags])
    assert f"argument {flags[0]}" in capsys.readouterr().err
