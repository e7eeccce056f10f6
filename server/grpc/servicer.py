"""The engine's gRPC service: what each call does; knows neither sockets nor keys."""

import asyncio
import dataclasses
import json
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc

from jaxserve.config import EngineConfig
from jaxserve.errors import InvalidRequestError
from jaxserve.pooling import Pooling
from jaxserve.request import SamplingParams
from jaxserve.text.output import TextOutput, resolve_bad_words
from jaxserve.text.tokenizer import Tokenizer
from server.api.info import package_version
from server.engine.async_engine import AsyncEngine
from server.engine.commands import Job
from server.engine.engine_client import UnavailableError
from server.grpc import engine_pb2 as pb
from server.grpc.engine_pb2_grpc import EngineServicer
from server.grpc.errors import abort
from server.grpc.messages import embedding_params, from_params, pooling_of, to_response

T = TypeVar("T")
MAX_SEQUENCES = 4096  # of one call, as of one HTTP request
MAX_REQUEST_ID_CHARS = 128


class EngineService(EngineServicer):
    """Errors become the call's status; a call that is cancelled, or whose deadline passes, aborts what it started."""

    def __init__(self, engine: AsyncEngine, tokenizer: Tokenizer, text_threads: int, max_calls: int) -> None:
        """Args: max_calls: that work for their answer, at once; who aborts or asks for health is never refused."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._max_calls = max_calls
        self._num_calls = 0
        self._threads = ThreadPoolExecutor(text_threads, thread_name_prefix="text")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def Generate(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            with self._counted():
                jobs = await self._jobs(request.jobs, await self._params(request.params))
                texts = self._texts(jobs) if request.with_text else None
                with self._engine.submit(_request_id(request.request_id), jobs) as generation:
                    async for index, output in generation:
                        response = to_response(index, output)
                        if texts is not None:
                            delta = texts[index].push(output)
                            response.text = delta.text
                            response.finish_reason = delta.finish_reason or ""
                            if isinstance(delta.stop_reason, str):
                                response.stop_string = delta.stop_reason
                            if delta.finish_reason is not None:
                                generation.abort(index)  # a stop string ends the text; the engine does not know yet
                        yield response
        except Exception as error:
            await abort(context, error)

    async def Embed(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            with self._counted():
                pooling = self._engine.limits().config.model.pooling
                assert pooling != "auto"
                jobs = await self._jobs(request.jobs, SamplingParams(), pooling)
                embeddings: dict[int, Sequence[float]] = {}
                with self._engine.submit(_request_id(""), jobs) as generation:
                    async for index, output in generation:
                        if output.embedding is None:
                            raise UnavailableError("the embeddings were aborted")
                        embeddings[index] = output.embedding
                return pb.EmbedResponse(
                    embeddings=[pb.Embedding(values=embeddings[index]) for index in range(len(jobs))],
                    prompt_tokens=sum(len(job.prompt_token_ids) for job in jobs),
                )
        except Exception as error:
            await abort(context, error)

    async def Tokenize(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            with self._counted():
                special = request.add_special_tokens if request.HasField("add_special_tokens") else True
                ids = await self._encode("text", request.text, add_special_tokens=special)
                return pb.TokenizeResponse(token_ids=ids)
        except Exception as error:
            await abort(context, error)

    async def Abort(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        index = request.index if request.HasField("index") else None
        return pb.AbortResponse(aborted=self._engine.cancel(request.request_id, index))

    async def ModelInfo(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            limits = self._engine.limits()
        except Exception as error:
            await abort(context, error)
        return pb.ModelInfoResponse(
            name=limits.model_name,
            max_model_len=limits.max_model_len,
            num_token_ids=limits.num_token_ids,
            eos_token_ids=sorted(limits.eos_token_ids),
            config_json=limits.config.model_dump_json(include=set(EngineConfig.model_fields)),
            version=package_version(),
        )

    async def Flush(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return pb.FlushResponse(pages=await self._engine.flush())
        except Exception as error:
            await abort(context, error)

    async def Pages(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return pb.PagesResponse(pages_json=json.dumps(await self._engine.pages()))
        except Exception as error:
            await abort(context, error)

    async def Health(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        engine = self._engine
        progress, stats = engine.progress, engine.stats
        return pb.HealthResponse(
            state=engine.state,
            phase="" if progress is None else progress.phase,
            done=0 if progress is None else progress.done,
            total=0 if progress is None else progress.total,
            num_open=engine.num_open,
            stats={} if stats is None else dataclasses.asdict(stats),
        )

    @contextmanager
    def _counted(self) -> Iterator[None]:
        if self._num_calls >= self._max_calls:
            raise UnavailableError(f"{self._num_calls} calls are open already (server.limits.max_connections)")
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1

    async def _jobs(
        self, messages: Sequence[Any], shared: SamplingParams, default_pooling: Pooling | None = None
    ) -> list[Job]:
        """Texts are tokenized on a thread.

        Args:
          shared: of jobs without parameters.
          default_pooling: of jobs without a pooling.
        """
        if not messages:
            raise InvalidRequestError("jobs is empty; give at least one", param="jobs")
        jobs: list[Job] = []
        num_sequences = 0
        for message in messages:
            pooling = pooling_of(message) or default_pooling
            params = await self._params(message.params) if message.HasField("params") else shared
            if pooling is not None:
                params = embedding_params(params)
            num_sequences += params.n
            if num_sequences > MAX_SEQUENCES:
                raise InvalidRequestError(f"the jobs ask for more than {MAX_SEQUENCES} sequences", param="jobs")
            jobs.append(Job(prompt_token_ids=await self._token_ids(message), params=params, pooling=pooling))
        return jobs

    async def _params(self, message: Any) -> SamplingParams:
        params = from_params(message)
        if not params.bad_words:
            return params
        return await self._in_thread(lambda: resolve_bad_words(params, self._tokenizer))

    async def _token_ids(self, message: Any) -> Sequence[int]:
        if message.WhichOneof("prompt") != "text":
            return tuple(message.token_ids.ids)
        return await self._encode("prompt", message.text)

    async def _encode(self, param: str, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        tokenizer = self._tokenizer
        self._engine.limits().check_text(param, text, tokenizer.max_token_bytes)
        return await self._in_thread(lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def _texts(self, jobs: Sequence[Job]) -> list[TextOutput]:
        """One for each sequence."""
        return [
            TextOutput(self._tokenizer, job.prompt_token_ids, job.params) for job in jobs for _ in range(job.params.n)
        ]

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _request_id(asked: str) -> str:
    if len(asked) > MAX_REQUEST_ID_CHARS:
        raise InvalidRequestError(
            f"request_id has {len(asked)} characters; the limit is {MAX_REQUEST_ID_CHARS}", param="request_id"
        )
    return asked or f"grpc-{uuid.uuid4().hex}"
