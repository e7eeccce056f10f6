"""A device in a few lines: what it samples depends on every key and value that a real one would read.

The "keys and values" of a token are a number that follows from the one before it, as read from the pages, and from the
token. So a page shared wrongly, evicted while in use, or written by another request changes the tokens that come out,
and what must come out (`expected_tokens`) is known without any engine.
"""

import numpy as np

from jaxserve.device.runner import HostLogprobs, StepOutput
from jaxserve.request import SamplingParams
from jaxserve.scheduling.host_tier import Copies
from jaxserve.scheduling.plan import Plan
from jaxserve.scheduling.prefix_cache import RootKey

VOCAB = 150


def chain(value: int, token: int) -> int:
    return hash((value, token))


def origin(root: RootKey) -> int:
    return sum(ord(char) * (i + 1) for i, char in enumerate(repr(root)))


def sampled(value: int, seed: int) -> int:
    return hash((value, seed)) % VOCAB


def expected_tokens(root: RootKey, prompt: list[int], params: SamplingParams, ends: frozenset[int]) -> list[int]:
    """The output of a request that runs to its end."""
    assert params.max_tokens is not None
    assert params.seed is not None
    value = origin(root)
    for token in prompt:
        value = chain(value, token)
    output: list[int] = []
    while len(output) < params.max_tokens:
        output.append(sampled(value, params.seed))
        if output[-1] in ends:
            break
        value = chain(value, output[-1])
    return output


class ShadowDevice:
    """The runner of an engine."""

    def __init__(self, page_size: int, block_q: int) -> None:
        self._page_size = page_size
        self._block_q = block_q
        self._kv: dict[tuple[int, int], int] = {}
        self._host: dict[int, list[int]] = {}
        self._last_tokens: dict[int, int] = {}
        self.num_computed = 0

    def dispatch(self, plan: Plan) -> "ShadowStep":
        if plan.copies is not None:
            self._copy(plan.copies)
        values = []
        for request in plan.decodes:
            position = request.num_computed - 1
            values.append(self._write(request.root, request.pages, position, self._last_tokens[request.slot]))
        for chunk in plan.chunks:
            request = chunk.request
            for position in range(chunk.start, chunk.start + chunk.count):
                value = self._write(request.root, request.pages, position, request.token_ids[position])
            if chunk.is_last:
                values.append(value)
        tokens = []
        for request, value in zip(plan.samples, values, strict=True):
            tokens.append(sampled(value, request.seed))
            self._last_tokens[request.slot] = tokens[-1]
        blocks = sum(chunk.num_blocks(self._block_q) for chunk in plan.chunks)
        return ShadowStep(tokens, blocks, self._block_q)

    def _copy(self, copies: Copies) -> None:
        # A page that was not written whole has no business on the host: reading it fails.
        offsets = range(self._page_size)
        saved = {host_page: [self._kv[page, offset] for offset in offsets] for page, host_page in copies.saved}
        assert len(saved) == len(copies.saved), "a host page is saved over within a step"
        self._host |= saved
        for host_page, page in copies.restored:
            self._kv |= {(page, offset): value for offset, value in zip(offsets, self._host[host_page], strict=True)}

    def _write(self, root: RootKey, pages: list[int], position: int, token: int) -> int:
        def slot(p: int) -> tuple[int, int]:
            return pages[p // self._page_size], p % self._page_size

        before = self._kv[slot(position - 1)] if position else origin(root)
        self._kv[slot(position)] = value = chain(before, token)
        self.num_computed += 1
        return value


class ShadowStep:
    def __init__(self, tokens: list[int], blocks: int, block_q: int) -> None:
        self._tokens = tokens
        self._shape = (blocks, block_q)

    def read(self) -> StepOutput:
        wide = (*self._shape, 20)
        return StepOutput(
            tokens=np.array(self._tokens, np.int32),
            is_finite=np.ones(len(self._tokens), np.bool_),
            prompt_logprobs=HostLogprobs(chosen=np.zeros(self._shape), top_ids=np.zeros(wide, int), top=np.zeros(wide)),
        )
