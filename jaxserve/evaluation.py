"""What a setting does to a model's answers: its distance from the unquantized model on a text; prints nothing."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxserve.config import EngineConfig
from jaxserve.device.buckets import StepShape
from jaxserve.device.programs import Params, ProgramSpec, compile_programs
from jaxserve.device.prompt import prompt_batch
from jaxserve.device.runner import DeviceRunner
from jaxserve.device.sharding import bytes_per_device
from jaxserve.errors import ConfigError
from jaxserve.simulation.profiler import full_plan, measure_step
from jaxserve.startup.loading import Vocabulary, load_model
from models.config import WeightFormat
from models.step import KVPool, StepBatch
from pallas_kernels.kv_dtype import KVDtype, token_bytes

log = logging.getLogger(__name__)

GIB = 2**30
REQUEST_TOKENS = 1024  # of the requests that are counted into a GiB of pages
DECODE_ROWS = 8
DECODE_STEPS_S = 2.0  # at least so long is measured
_HEAD = ("embed_tokens", "lm_head")

Progress = Callable[[str, int, int], None]  # what, done, total


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is compared."""

    quantization: WeightFormat | Literal["auto"] = "auto"
    kv_dtype: KVDtype | Literal["auto"] = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One setting's numbers.

    Attributes:
      quantization: of the layers' matrices, or "none"; kv_dtype: of keys and values.
      perplexity: exp of the mean negative log-likelihood of a token, given those before it in its window.
      agreement: share of tokens where the likeliest next one is also the unquantized model's.
      kl: mean Kullback-Leibler divergence of a next-token distribution from the unquantized model's, nats.
      weight_bytes: of each device.
      kv_bytes_per_token: over all layers, scales included.
      pages_per_gib, requests_per_gib: how many pages, and requests of 1,024 tokens, a GiB of pages holds.
      tokens_per_s: of a step with 8 decode rows at the window's end.
    """

    quantization: WeightFormat | Literal["none"]
    kv_dtype: KVDtype
    num_tokens: int
    perplexity: float
    agreement: float
    kl: float
    weight_bytes: int
    kv_bytes_per_token: int
    pages_per_gib: int
    requests_per_gib: int
    tokens_per_s: float


def evaluate(
    config: EngineConfig,
    vocabulary: Vocabulary,
    token_ids: Sequence[int],
    settings: Sequence[Setting],
    *,
    window: int,
    report: Progress = lambda what, done, total: None,
) -> list[Evaluation]:
    """The unquantized model first, then each setting. Every one runs the model's own step over pages of its own.

    The text is cut into windows, each a prompt that is computed whole; all but a window's first token are scored.

    Args:
      config: cache.dtype and model.quantization are overridden by the settings, shapes are chosen to suit.
      token_ids: the text.
      window: tokens.

    Raises:
      ConfigError: the text is shorter than two tokens, or the window longer than the model's context; or as a start.
    """
    if len(token_ids) < 2:
        raise ConfigError(f"the text has {len(token_ids)} tokens; to predict one from another takes 2")
    windows = [np.asarray(token_ids[i : i + window], np.int32) for i in range(0, len(token_ids), window)]
    windows = [one for one in windows if len(one) > 1]
    total = (1 + len(settings)) * len(windows)
    reference: _Reference | None = None
    evaluations = []
    for number, setting in enumerate((Setting(), *settings)):
        resolved, spec, params = load_model(_config(config, setting, window), vocabulary)

        def tell(done: int, number: int = number) -> None:
            report("evaluating", number * len(windows) + done, total)

        scores = _Scores(resolved, spec, params, windows, tell)
        if reference is None:
            reference = _Reference(spec=spec, head=_head(params), hidden=scores.hidden)
        evaluations.append(scores.against(reference))
        del params, scores
    return evaluations


def _config(config: EngineConfig, setting: Setting, window: int) -> EngineConfig:
    """Pages and shapes for one window's prompt, and for decode rows at its end."""
    matmul = config.execution.matmul_backend
    if setting.quantization == "auto" and matmul not in ("auto", "xla"):
        log.info("the model as its checkpoint has it takes matmul_backend auto: %s may not serve it", matmul)
        matmul = "auto"
    updates: dict[str, dict[str, Any]] = {
        "model": {"max_model_len": window + 1, "quantization": setting.quantization},
        "cache": {"dtype": setting.kv_dtype, "num_pages": "auto"},
        "scheduler": {"max_num_seqs": DECODE_ROWS, "max_num_batched_tokens": "auto", "step_times": None},
        "execution": {"decode_buckets": (DECODE_ROWS,), "prefill_buckets": "auto", "matmul_backend": matmul},
    }
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in updates.items()}
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reference:
    """The unquantized model's answers, as hidden states and what makes logits of them: a thousandth of the logits."""

    spec: ProgramSpec
    head: dict[tuple[Any, ...], Array]
    hidden: list[Array]


class _Scores:
    """One setting's model, and its hidden states of every window: [padded tokens, hidden] each."""

    def __init__(
        self,
        config: EngineConfig,
        spec: ProgramSpec,
        params: Params,
        windows: Sequence[np.ndarray[Any, Any]],
        tell: Callable[[int], None],
    ) -> None:
        self._config, self._spec, self._params, self._windows = config, spec, params, windows
        weights = jax.tree.leaves(params)
        step = jax.jit(partial(_forward, spec), donate_argnums=1)
        kv = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), spec.state().kv)
        self.hidden: list[Array] = []
        padded = -(-max(map(len, windows)) // spec.block_q) * spec.block_q
        for done, window in enumerate(windows, start=1):
            hidden, kv = step(weights, kv, _prefill(spec, window, padded))
            self.hidden.append(jax.block_until_ready(hidden))
            tell(done)

    def against(self, reference: _Reference) -> Evaluation:
        spec, head = self._spec, _head(self._params)
        compare = jax.jit(partial(_compare, spec, reference.spec))
        sums = np.zeros(3)
        for window, hidden, expected in zip(self._windows, self.hidden, reference.hidden, strict=True):
            targets = np.zeros(hidden.shape[0], np.int32)
            targets[: len(window) - 1] = window[1:]
            scores = compare(head, hidden, reference.head, expected, targets)
            sums += [np.asarray(score, np.float64)[: len(window) - 1].sum() for score in scores]
        count = sum(len(window) - 1 for window in self._windows)
        nll, agreed, kl = (float(value) / count for value in sums)
        page_bytes = KVPool.page_bytes(spec.model, spec.page_size, spec.kv_dtype)
        pages = GIB // page_bytes
        per_layer = token_bytes(spec.model.num_kv_heads, spec.model.head_dim, spec.kv_dtype)
        quantization = self._config.model.quantization
        assert quantization != "auto"
        return Evaluation(
            quantization=quantization,
            kv_dtype=spec.kv_dtype,
            num_tokens=count,
            perplexity=math.exp(nll),
            agreement=agreed,
            kl=kl,
            weight_bytes=bytes_per_device(jax.tree.leaves(spec.params)),
            kv_bytes_per_token=per_layer * spec.model.num_layers,
            pages_per_gib=pages,
            requests_per_gib=pages // -(-REQUEST_TOKENS // spec.page_size),
            tokens_per_s=self._tokens_per_s(),
        )

    def _tokens_per_s(self) -> float:
        shape = StepShape(decode_rows=DECODE_ROWS, prefill_blocks=0)
        programs = compile_programs(self._spec, lambda done, total: None, shapes=(shape,))
        runner = DeviceRunner(self._spec, programs, self._params)
        plan = full_plan(self._config, shape, max(map(len, self._windows)))
        seconds: list[float] = []
        start = time.perf_counter()
        while not seconds or time.perf_counter() - start < DECODE_STEPS_S:
            seconds.append(measure_step(runner, plan))
        return DECODE_ROWS / float(np.median(seconds))


def _forward(spec: ProgramSpec, weights: list[Array], kv: KVPool, batch: StepBatch) -> tuple[Array, KVPool]:
    model = nnx.merge(spec.graph, jax.tree.unflatten(jax.tree.structure(spec.params), weights))
    hidden, kv = model(batch, kv, spec.backend, spec.mesh)
    return hidden, kv


def _prefill(spec: ProgramSpec, token_ids: np.ndarray[Any, Any], padded: int) -> StepBatch:
    return prompt_batch(
        token_ids, padded, block_q=spec.block_q, page_size=spec.page_size, pages_per_seq=spec.pages_per_seq
    )


def _compare(
    spec: ProgramSpec,
    reference_spec: ProgramSpec,
    head: dict[tuple[Any, ...], Array],
    hidden: Array,
    reference_head: dict[tuple[Any, ...], Array],
    reference_hidden: Array,
    targets: Array,
) -> tuple[Array, Array, Array]:
    """Negative log-likelihood, agreement and divergence of each token: three [tokens].

    Block by block, for the logits of a whole window could fill the memory.
    """
    vocab = spec.num_token_ids  # what lies beyond is never sampled

    def score(block: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        states, reference_states, target = block
        log_p = jax.nn.log_softmax(_logits(reference_spec, reference_head, reference_states)[:, :vocab])
        log_q = jax.nn.log_softmax(_logits(spec, head, states)[:, :vocab])
        nll = -jnp.take_along_axis(log_q, target[:, None], axis=1)[:, 0]
        agrees = log_p.argmax(axis=1) == log_q.argmax(axis=1)
        return nll, agrees, (jnp.exp(log_p) * (log_p - log_q)).sum(axis=1)

    blocks = tuple(array.reshape(-1, spec.block_q, *array.shape[1:]) for array in (hidden, reference_hidden, targets))
    nll, agrees, kl = jax.lax.map(score, blocks)
    return nll.ravel(), agrees.ravel(), kl.ravel()


def _head(params: Params) -> dict[tuple[Any, ...], Array]:
    """The parameters that make logits of hidden states."""
    return {path: param.get_value() for path, param in nnx.to_flat_state(params) if path[0] in _HEAD}


def _logits(spec: ProgramSpec, head: dict[tuple[Any, ...], Array], hidden: Array) -> Array:
    """The model's `logits`; its other parameters stay shapes."""
    flat = nnx.to_flat_state(spec.params)
    params = nnx.from_flat_state([(path, param.replace(head.get(path, param.get_value()))) for path, param in flat])
    logits: Array = nnx.merge(spec.graph, params).logits(hidden)
    return logits
