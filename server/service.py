"""What every route needs: the engine, the tokenizer, the limits and the threads for text; owns those threads."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request

from jaxserve.request import SamplingParams
from jaxserve.text.output import resolve_bad_words
from jaxserve.text.tokenizer import Tokenizer
from server.api.body import BodyT, Chooser, ModelBody, parse_body
from server.api.responses_store import ResponseStore
from server.config import ServerSection
from server.dashboard.feed import Feed
from server.engine.engine_client import EngineClient, UnavailableError
from server.errors import BodyTimeoutError, BodyTooLargeError, MediaTypeError, ModelNotFoundError
from server.observability.metrics import Metrics

T = TypeVar("T")

# Work that takes less than about a millisecond is done where it is: a trip to a thread costs a tenth of that.
INLINE_BYTES = 64 * 1024  # of JSON
INLINE_CHARS = 1024  # of text to tokenize


class Service:
    """One model behind one engine."""

    def __init__(self, *, engine: EngineClient, tokenizer: Tokenizer, limits: ServerSection, created: int) -> None:
        """Args: created: Unix time, for `/v1/models`."""
        self.engine = engine
        self.tokenizer = tokenizer
        self.limits = limits
        self.created = created
        self.metrics = Metrics(engine, limits.observability.metrics_prefix)
        self.feed = Feed(engine, self.metrics)
        self.responses = ResponseStore(
            max_responses=limits.max_stored_responses, max_chars=limits.max_stored_response_chars
        )
        self.is_profiling = False
        self._num_text_jobs = 0
        self._threads = ThreadPoolExecutor(limits.text_threads, thread_name_prefix="text")

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Runs what would hold up the event loop; more calls than threads wait their turn.

        Raises:
          UnavailableError: too many wait already.
        """
        limit = self.limits.limits.max_text_jobs
        if self._num_text_jobs >= limit + self.limits.text_threads:
            raise UnavailableError(f"{limit} prompts wait to be tokenized already (server.limits.max_text_jobs)")
        self._num_text_jobs += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._num_text_jobs -= 1

    async def resolve_bad_words(self, params: SamplingParams) -> SamplingParams:
        """See `jaxserve.text.output`."""
        if not params.bad_words:
            return params
        return await self.in_thread(lambda: resolve_bad_words(params, self.tokenizer))

    def check_text(self, param: str, text: str) -> None:
        """See `RequestLimits`."""
        self.engine.limits().check_text(param, text, self.tokenizer.max_token_bytes)

    async def read_body(self, request: Request, schema: type[BodyT] | Chooser[BodyT]) -> BodyT:
        """Reads and checks a request.

        Raises:
          BodyTooLargeError: before the rest is read.
          InvalidRequestError: names the field at fault.
          ModelNotFoundError: the request is for another model.
          UnavailableError, EngineDeadError: nothing can be served now; the body is not even read.
        """
        served = self.engine.limits().model_name
        media_type = request.headers.get("content-type", "application/json")
        if media_type.partition(";")[0].strip().lower() != "application/json":
            raise MediaTypeError(media_type)
        try:
            async with asyncio.timeout(self.limits.limits.body_timeout_s):
                raw = await self._read(request)
        except TimeoutError:
            raise BodyTimeoutError(self.limits.limits.body_timeout_s) from None
        if len(raw) <= INLINE_BYTES:
            body = parse_body(schema, raw)
        else:
            body = await self.in_thread(lambda: parse_body(schema, raw))
        if isinstance(body, ModelBody) and body.model not in (served, None):
            raise ModelNotFoundError(str(body.model), served)
        return body

    async def _read(self, request: Request) -> bytes:
        limit = self.limits.max_body_bytes
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise BodyTooLargeError(limit)
        chunks = []
        length = 0
        async for chunk in request.stream():
            length += len(chunk)
            if length > limit:
                raise BodyTooLargeError(limit)
            chunks.append(chunk)
        return b"".join(chunks)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
