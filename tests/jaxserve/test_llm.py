"""The offline API on the embedded model, and the same answer from each of the three checkpoint formats."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.llm import LLM
from jaxserve.request import SamplingParams
from jaxserve.text.tokenizer import load_tokenizer, save_tokenizer
from models.checkpoint import open_checkpoint, resolve_model
from models.registry import parameter_structs
from server.cli.convert import convert

pytestmark = pytest.mark.slow

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def is_idle(llm: LLM) -> bool:
    stats = llm.engine.stats()
    return not llm.engine.has_work() and stats.pages_active == 0


def test_the_capital_of_france(embedded_llm: LLM) -> None:
    compilations = embedded_llm.engine.stats().compilations_total
    answer = embedded_llm.chat(FRANCE, GREEDY)
    assert "Paris" in answer.text
    assert answer.completions[0].finish_reason == "stop"
    assert embedded_llm.engine.stats().compilations_total == compilations


@pytest.mark.parametrize("kind", ["orbax", "safetensors"])
def test_the_other_formats_of_the_same_weights_answer_the_same(kind: str, embedded_llm: LLM, tmp_path: Path) -> None:
    folder = tmp_path / kind
    if kind == "orbax":
        convert("smollm2-135m", folder, dtype="float32")
    else:
        write_hugging_face_folder(folder)
    config: dict[str, Any] = embedded_llm.engine.config.model_dump()
    other = LLM(**config | {"model": config["model"] | {"path": str(folder)}})
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1)
    mine, theirs = (llm.chat(FRANCE, params).completions[0] for llm in (embedded_llm, other))
    assert "Paris" in theirs.text
    assert theirs.token_ids == mine.token_ids
    assert mine.logprobs is not None
    assert theirs.logprobs is not None
    differences = [abs(a.logprob - b.logprob) for a, b in zip(mine.logprobs, theirs.logprobs, strict=True)]
    assert max(differences) < 1e-4


def write_hugging_face_folder(folder: Path) -> None:
    """The embedded model as transformers would save it."""
    path = resolve_model("smollm2-135m")
    checkpoint = open_checkpoint(path)
    from_gguf = checkpoint.config
    save_tokenizer(load_tokenizer(path), folder)
    weights = checkpoint.load(parameter_structs(from_gguf, jnp.dtype(jnp.float32)))
    save_file({f"model.{name}": np.asarray(array) for name, array in weights.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": from_gguf.vocab_size,
        "hidden_size": from_gguf.hidden_size,
        "intermediate_size": from_gguf.intermediate_size,
        "num_hidden_layers": from_gguf.num_layers,
        "num_attention_heads": from_gguf.num_heads,
        "num_key_value_heads": from_gguf.num_kv_heads,
        "max_position_embeddings": from_gguf.max_position,
        "rms_norm_eps": from_gguf.rms_norm_eps,
        "rope_theta": from_gguf.rope.theta,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": list(from_gguf.eos_token_ids),
    }
    (folder / "config.json").write_text(json.dumps(config))


def test_results_are_in_the_order_of_the_prompts_and_as_each_alone(embedded_llm: LLM) -> None:
    prompts = [
        "The capital of Italy is",
        "One, two, three,",
        "Water boils at",
        "My name is",
        "Roses are",
        "Once upon a time",
    ]
    together = embedded_llm.generate(prompts, GREEDY)
    alone = [embedded_llm.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert [generation.text for generation in together] == [generation.text for generation in alone]
    assert len({generation.text for generation in together}) == len(prompts)
    assert is_idle(embedded_llm)


def test_token_ids_are_a_prompt_too(embedded_llm: LLM) -> None:
    token_ids = embedded_llm.tokenizer.encode("The capital of Italy is")
    by_ids, by_text = embedded_llm.generate([token_ids, "The capital of Italy is"], GREEDY)
    assert by_ids == by_text
    assert embedded_llm.generate(token_ids, GREEDY) == [by_ids]


def test_completion_i_of_n_is_what_seed_plus_i_gives(embedded_llm: LLM) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=8)
    [several] = embedded_llm.generate("Once upon a time", params)
    assert len({completion.token_ids for completion in several.completions}) > 1
    for i, completion in enumerate(several.completions):
        [single] = embedded_llm.generate("Once upon a time", SamplingParams(seed=7 + i, max_tokens=8))
        assert completion == single.completions[0]


def test_a_stop_string_ends_the_text_before_it(embedded_llm: LLM) -> None:
    completion = embedded_llm.chat(FRANCE, SamplingParams(temperature=0.0, max_tokens=12, stop=("Par",))).completions[0]
    assert completion.text == "The capital of France is "
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "Par")
    assert is_idle(embedded_llm)


def test_bad_words_do_not_come(embedded_llm: LLM) -> None:
    answer = embedded_llm.chat(FRANCE, SamplingParams(temperature=0.0, max_tokens=12, bad_words=("Paris",)))
    assert "Paris" not in answer.text


def test_one_bad_prompt_refuses_the_call_before_anything_runs(embedded_llm: LLM) -> None:
    steps = embedded_llm.engine.stats().steps_total
    with pytest.raises(InvalidRequestError, match="the prompt has 300 tokens; the limit is 255"):
        embedded_llm.generate([[5], [5] * 300], GREEDY)
    with pytest.raises(InvalidRequestError, match="2 sampling parameters for 1 prompts"):
        embedded_llm.generate(["x"], [GREEDY, GREEDY])
    assert embedded_llm.engine.stats().steps_total == steps
    assert is_idle(embedded_llm)


def test_leaving_a_run_early_aborts_the_rest(embedded_llm: LLM) -> None:
    jobs = [
        embedded_llm.job("Once upon a time", SamplingParams(max_tokens=4 + 30 * i, ignore_eos=True)) for i in range(9)
    ]
    for number, _ in embedded_llm.run(enumerate(jobs)):
        assert number == 0
        break
    assert is_idle(embedded_llm)


def test_an_unknown_section_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown key schedular"):
        LLM(schedular={"max_num_seqs": 2})
