"""The offline API: prompts in, texts out, through the same engine that serves; owns the driving loop, no policy."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from jaxserve.config import EngineConfig
from jaxserve.config_file import Layer, build_config
from jaxserve.engine import Engine
from jaxserve.errors import InvalidRequestError
from jaxserve.request import FinishReason, RequestOutput, SamplingParams, TokenLogprobs
from jaxserve.startup.loading import Progress, load_engine
from jaxserve.text.chat import pick_template
from jaxserve.text.output import TextOutput, resolve_bad_words
from jaxserve.text.tokenizer import Tokenizer, load_tokenizer
from models.checkpoint import resolve_model

Prompt = str | Sequence[int]
Message = Mapping[str, Any]

QUEUED_PER_SLOT = 2  # sequences handed to the engine ahead of need, so that a freed slot is taken in the next step


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One generated text. `stop_reason` is the stop string or stop token id that ended it, if the caller named one."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason
    stop_reason: int | str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """All that came of one prompt: `params.n` completions."""

    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def text(self) -> str:
        return self.completions[0].text


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A prompt ready for the engine. `continues_prompt`: its text goes on where the prompt's ends; a chat's not."""

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    continues_prompt: bool = True


class LLM:
    """A model in this process.

    >>> llm = LLM("smollm2-135m", scheduler={"max_num_seqs": 8})
    >>> llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=50)).text

    Args:
      model: the embedded model's name (the default), a folder, or a .gguf file.
      progress: called with ("programs", done, total).
      config: the sections of the configuration file, as mappings.

    Raises:
      ConfigError, ModelError.
    """

    def __init__(
        self, model: str | None = None, /, *, progress: Progress | None = None, **config: str | Mapping[str, Any]
    ) -> None:
        layers = [Layer(values={"model": {"path": model}}, source="LLM(model)")] if model is not None else []
        if isinstance(config.get("model"), str):  # LLM(model="…")
            config["model"] = {"path": config["model"]}
        layers.append(Layer(values=config, source="LLM(…)"))
        self._start(build_config(EngineConfig, layers), progress)

    @classmethod
    def from_config(cls, config: EngineConfig, *, progress: Progress | None = None) -> Self:
        llm = cls.__new__(cls)
        llm._start(config, progress)
        return llm

    def _start(self, config: EngineConfig, progress: Progress | None) -> None:
        self.tokenizer: Tokenizer = load_tokenizer(resolve_model(config.model.path))
        self.engine: Engine = load_engine(config, self.tokenizer, progress=progress)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Generation]:
        """Completes prompts (texts, or token ids), all of them at once; the results are in the prompts' order.

        Raises:
          InvalidRequestError: for any of them, before the first one runs.
        """
        several = _listed(prompts)
        jobs = [self.job(prompt, p) for prompt, p in zip(several, _per_prompt(params, len(several)), strict=True)]
        return self._run_all(jobs)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> Generation:
        """Answers one conversation. `template_kwargs` go to the model's chat template.

        Raises:
          InvalidRequestError: the template refuses the messages, or the model has none.
        """
        return self._run_all([self.chat_job(messages, params or SamplingParams(), tools=tools, **template_kwargs)])[0]

    def job(self, prompt: Prompt, params: SamplingParams) -> Job:
        """Checks and encodes one prompt; raises InvalidRequestError."""
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return self._checked(Job(prompt_token_ids=token_ids, params=resolve_bad_words(params, self.tokenizer)))

    def chat_job(
        self,
        messages: Sequence[Message],
        params: SamplingParams,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> Job:
        """Checks, renders and encodes one conversation; raises InvalidRequestError."""
        template = pick_template(self.tokenizer, tools)
        if template is None:
            raise InvalidRequestError(
                f"model {self.engine.model_name} has no chat template; give a prompt instead", param="messages"
            )
        text = template.render(list(messages), tools=tools, **template_kwargs)
        return self._checked(
            Job(
                prompt_token_ids=self.tokenizer.encode_chat(text),
                params=resolve_bad_words(params, self.tokenizer),
                continues_prompt=False,
            )
        )

    def run(self, jobs: Iterable[tuple[int, Job]]) -> Iterator[tuple[int, Generation]]:
        """Runs any number of numbered jobs and yields each as it finishes. Takes from `jobs` only as the engine drains.

        Leaving the loop early aborts what is still running.
        """
        source = iter(jobs)
        window = QUEUED_PER_SLOT * self.engine.config.scheduler.max_num_seqs
        running: dict[str, tuple[int, _Growing]] = {}
        try:
            while True:
                while len(running) < window and (item := next(source, None)) is not None:
                    number, job = item
                    growing = _Growing(self.tokenizer, job)
                    for choice, params in enumerate(job.params.choices()):
                        request_id = f"{number}.{choice}"
                        self.engine.add(request_id, job.prompt_token_ids, params)
                        running[request_id] = (number, growing)
                if not running:
                    return
                for output in self.engine.step():
                    if output.request_id not in running:
                        continue  # the engine's word that a request ended which a stop string had ended before
                    number, growing = running[output.request_id]
                    choice = int(output.request_id.rpartition(".")[2])
                    if growing.push(choice, output):
                        self.engine.abort(output.request_id)
                        del running[output.request_id]
                        if growing.is_complete:
                            yield number, growing.result()
        finally:
            for request_id in running:
                self.engine.abort(request_id)
            while self.engine.has_work():
                self.engine.step()

    def _run_all(self, jobs: Sequence[Job]) -> list[Generation]:
        results = dict(self.run(enumerate(jobs)))
        return [results[number] for number in range(len(jobs))]

    def _checked(self, job: Job) -> Job:
        self.engine.validate(job.prompt_token_ids, job.params)
        return job


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    token_ids = [item for item in prompts if isinstance(item, int)]
    if token_ids and len(token_ids) == len(prompts):
        return [token_ids]
    return [item for item in prompts if not isinstance(item, int)]


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> Iterable[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return itertools.repeat(params or SamplingParams(), num_prompts)
    if len(params) != num_prompts:
        raise InvalidRequestError(f"{len(params)} sampling parameters for {num_prompts} prompts", param="params")
    return params


@dataclass(slots=True)
class _Choice:
    output: TextOutput
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class _Growing:
    """The n completions of one prompt while they grow."""

    def __init__(self, tokenizer: Tokenizer, job: Job) -> None:
        self._job = job
        context = job.prompt_token_ids if job.continues_prompt else ()
        self._choices = [_Choice(TextOutput(tokenizer, context, job.params)) for _ in range(job.params.n)]
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def is_complete(self) -> bool:
        return all(choice.finish_reason is not None for choice in self._choices)

    def push(self, index: int, output: RequestOutput) -> bool:
        """Returns whether this choice has ended."""
        choice = self._choices[index]
        delta = choice.output.push(output)
        choice.texts.append(delta.text)
        choice.token_ids += delta.token_ids
        choice.logprobs += delta.logprobs or ()
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        self._prompt_logprobs = self._prompt_logprobs or output.prompt_logprobs
        return choice.finish_reason is not None

    def result(self) -> Generation:
        completions = []
        for choice in self._choices:
            assert choice.finish_reason is not None
            completions.append(
                Completion(
                    text="".join(choice.texts),
                    token_ids=tuple(choice.token_ids),
                    logprobs=None if self._job.params.logprobs is None else tuple(choice.logprobs),
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                )
            )
        return Generation(
            prompt_token_ids=tuple(self._job.prompt_token_ids),
            completions=tuple(completions),
            prompt_logprobs=self._prompt_logprobs,
        )
