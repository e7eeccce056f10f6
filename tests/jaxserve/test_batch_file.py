"""`jaxserve generate`'s files: each line has exactly one result, whatever is wrong with it and whatever interrupts."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from jaxserve.batch_file import BatchProgress, run_batch_file
from jaxserve.errors import ConfigError
from jaxserve.llm import LLM
from jaxserve.request import SamplingParams

pytestmark = pytest.mark.slow

DEFAULTS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def write_prompts(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read_results(path: Path) -> dict[int, dict[str, Any]]:
    results = [json.loads(line) for line in path.read_text().splitlines()]
    assert max(Counter(result["line"] for result in results).values()) == 1, "a line has two results"
    return {result["line"]: result for result in results}


def test_each_line_gets_its_result_and_a_bad_one_an_error(embedded_llm: LLM, tmp_path: Path) -> None:
    lines = [
        {"id": "a", "prompt": "The capital of Italy is"},
        {
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 12,
            "ignore_eos": False,
        },
        "",
        {"prompt": [504, 3575], "logprobs": 1, "prompt_logprobs": 1, "n": 2},
        {"prompt": "x", "max_tokens": "5"},
        "{broken",
        {"prompt": "x", "temperature": 1e999},
        {"prompt": "x", "zork": 1},
        {"prompt": "x", "messages": []},
        {"id": "long", "prompt": "x " * 300},
        {"prompt": "x", "logit_bias": {"999999": 1}},
    ]
    source, target = write_prompts(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    progress = run_batch_file(embedded_llm, source, target, DEFAULTS)
    results = read_results(target)
    assert sorted(results) == [1, 2, 4, 5, 6, 7, 8, 9, 10, 11]
    assert (progress.total, progress.done, progress.failed) == (10, 10, 7)
    assert results[1]["id"] == "a"
    assert results[1]["usage"]["completion_tokens"] == 4
    assert "Paris" in results[2]["choices"][0]["text"]
    assert results[2]["choices"][0]["finish_reason"] == "stop"
    assert len(results[4]["choices"]) == 2
    assert len(results[4]["choices"][0]["logprobs"]) == 4
    assert results[4]["prompt_logprobs"][0] is None
    params = {line: results[line]["error"]["param"] for line in (5, 7, 8, 9, 10, 11)}
    assert params == {5: "max_tokens", 7: None, 8: "zork", 9: "prompt", 10: "prompt", 11: "logit_bias"}
    assert "not valid JSON" in results[6]["error"]["message"]
    assert results[10]["id"] == "long"


def test_an_interrupted_run_goes_on_without_repeating_or_losing_a_line(embedded_llm: LLM, tmp_path: Path) -> None:
    prompts = [{"prompt": f"{i} and", "max_tokens": 2 + i % 5} for i in range(20)]
    source, target = write_prompts(tmp_path / "in.jsonl", prompts), tmp_path / "out.jsonl"

    def interrupt(progress: BatchProgress) -> None:
        if progress.done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_batch_file(embedded_llm, source, target, DEFAULTS, interrupt)
    assert not embedded_llm.engine.has_work()
    text = target.read_text()
    assert text.count("\n") == 7
    target.write_text(text[:-9])  # the machine went down while the last line was written
    progress = run_batch_file(embedded_llm, source, target, DEFAULTS)
    assert (progress.resumed, progress.done) == (6, 14)
    whole = tmp_path / "whole.jsonl"
    run_batch_file(embedded_llm, source, whole, DEFAULTS)
    assert read_results(target) == read_results(whole)


def test_a_finished_run_does_nothing(embedded_llm: LLM, tmp_path: Path) -> None:
    source, target = write_prompts(tmp_path / "in.jsonl", [{"prompt": "x"}]), tmp_path / "out.jsonl"
    run_batch_file(embedded_llm, source, target, DEFAULTS)
    before = target.read_text()
    assert run_batch_file(embedded_llm, source, target, DEFAULTS).done == 0
    assert target.read_text() == before


def test_an_output_of_something_else_is_not_touched(embedded_llm: LLM, tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.jsonl", [{"prompt": "x"}])
    notes = tmp_path / "notes.txt"
    notes.write_text("my notes\n")
    with pytest.raises(ConfigError, match=r"notes\.txt holds a line that is no result"):
        run_batch_file(embedded_llm, source, notes, DEFAULTS)
    assert notes.read_text() == "my notes\n"
    longer = tmp_path / "longer.jsonl"
    longer.write_text("".join(json.dumps({"line": line}) + "\n" for line in (1, 2)))
    with pytest.raises(ConfigError, match="results for 2 lines, the input only 1"):
        run_batch_file(embedded_llm, source, longer, DEFAULTS)
    with pytest.raises(ConfigError, match=r"cannot read .*absent"):
        run_batch_file(embedded_llm, tmp_path / "absent", longer, DEFAULTS)
