"""`jaxserve run-batch`: each line answered once, whatever it is, also when a run was interrupted and resumed."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_server import tiny_config

from jaxserve.batch_file import BatchProgress
from jaxserve.errors import ConfigError
from server.cli.run_batch import run_batch

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Grüße"}], "temperature": 0, "max_tokens": 4}
COMPLETION = {"model": "tiny", "prompt": [5, 6, 7], "temperature": 0, "max_tokens": 4}


def line(custom_id: Any, url: str, body: Any, **more: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body, **more}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((text if isinstance(text, str) else json.dumps(text)) + "\n" for text in lines))
    return path


def run(tiny_model: Path, source: Path, target: Path) -> tuple[BatchProgress, dict[str, dict[str, Any]]]:
    config = tiny_config(tiny_model)
    scheduler = config.scheduler.model_copy(update={"max_queued_requests": 70})
    config = config.model_copy(update={"scheduler": scheduler})
    progress = run_batch(config, source, target, on_loading=lambda *_: None, on_progress=lambda _: None)
    results = [json.loads(text) for text in target.read_text().splitlines()]
    assert len({result["id"] for result in results}) == len(results), "a line was answered twice"
    return progress, {result["id"]: result for result in results}


def test_every_line_gets_its_one_answer_and_a_second_run_does_what_is_left(tiny_model: Path, tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        [
            line("chat", "/v1/chat/completions", CHAT),
            line("completion", "/v1/completions", {**COMPLETION, "n": 2}),
            line("embeddings", "/v1/embeddings", {"model": "tiny", "input": ["a", "b"]}),
            line("response", "/v1/responses", {"model": "tiny", "input": "a", "max_output_tokens": 3}),
            line("refused", "/v1/completions", {**COMPLETION, "temperature": -1}),
            line("other model", "/v1/completions", {**COMPLETION, "model": "other"}),
            line("streamed", "/v1/completions", {**COMPLETION, "stream": True}),
            line("elsewhere", "/v1/audio/speech", {}),
            line(7, "/v1/completions", COMPLETION),
            line("more", "/v1/completions", COMPLETION, priority=1),
            "{broken",
            "[]",
            "",
            line("never room", "/v1/completions", {**COMPLETION, "n": 100}),
            line("no time", "/v1/completions", {**COMPLETION, "n": 60, "deadline_ms": 1, "max_tokens": 100}),
            *(line(f"many {i}", "/v1/completions", {**COMPLETION, "prompt": [i + 3]}) for i in range(40)),
        ],
    )
    target = tmp_path / "out.jsonl"
    progress, results = run(tiny_model, source, target)
    assert (progress.total, progress.done, progress.failed) == (54, 54, 10)
    by_id = {result["custom_id"]: result for result in results.values()}
    for name in ("chat", "completion", "embeddings", "response", "many 0", "many 39"):
        assert by_id[name]["error"] is None
        assert by_id[name]["response"]["status_code"] == 200
    assert [choice["finish_reason"] for choice in by_id["completion"]["response"]["body"]["choices"]] == ["length"] * 2
    assert len(by_id["embeddings"]["response"]["body"]["data"]) == 2
    assert by_id["refused"]["response"]["body"]["error"]["param"] == "temperature"
    assert by_id["other model"]["response"]["status_code"] == 404
    for name, code in (("never room", "queue_full"), ("no time", "deadline")):
        assert by_id[name]["response"]["status_code"] == 503
        assert by_id[name]["response"]["body"]["error"]["code"] == code
    for name, word in (("streamed", "stream"), ("elsewhere", "url"), (7, "custom_id"), ("more", "priority")):
        assert by_id[name]["response"] is None
        assert word in by_id[name]["error"]["message"]
    assert "JSON" in results["batch_req_11"]["error"]["message"]
    assert "object" in results["batch_req_12"]["error"]["message"]

    # As an interruption leaves it: some lines are missing, the last one is cut in its middle.
    kept = target.read_text().splitlines(keepends=True)
    target.write_text("".join(kept[:30]) + kept[30][: len(kept[30]) // 2])
    progress, again = run(tiny_model, source, target)
    assert (progress.resumed, progress.done) == (30, 24)
    assert again.keys() == results.keys()
    text = results["batch_req_16"]["response"]["body"]["choices"][0]["text"]
    assert again["batch_req_16"]["response"]["body"]["choices"][0]["text"] == text


def test_another_runs_output_is_not_touched(tiny_model: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [line("a", "/v1/completions", COMPLETION)])
    for content in ('{"line": 1}', '{"id": "x"}', '{"id": "batch_req_0"}', "text"):
        target = write(tmp_path / "out.jsonl", [content])
        with pytest.raises(ConfigError, match="choose another output"):
            run(tiny_model, source, target)
        assert target.read_text() == content + "\n"


def test_a_model_that_cannot_be_loaded_is_told_before_any_line(tiny_model: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [line("a", "/v1/completions", COMPLETION)])
    config = tiny_config(tiny_model)
    config = config.model_copy(update={"model": config.model.model_copy(update={"max_model_len": 10**6})})
    with pytest.raises(ConfigError, match="max_model_len"):
        run_batch(config, source, tmp_path / "out.jsonl", on_loading=lambda *_: None, on_progress=lambda _: None)
    assert not (tmp_path / "out.jsonl").exists()
