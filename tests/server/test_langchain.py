"""LangChain's OpenAI chat model against this server: whole, streamed, and several at once."""

import pytest
from live_server import TIMEOUT_S, LiveServer

langchain_openai = pytest.importorskip("langchain_openai", reason='needs the extra "clients"')

MESSAGES = [("system", "Be brief."), ("human", "What is 2 + 2?")]


def test_langchains_chat_model_answers_whole_streamed_and_in_batches(server: LiveServer) -> None:
    model = langchain_openai.ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        model="tiny",
        temperature=0,
        max_tokens=12,
        timeout=TIMEOUT_S,
        max_retries=0,
        stream_usage=True,
    )
    whole = model.invoke(MESSAGES)
    assert whole.response_metadata["finish_reason"] == "length"
    assert whole.usage_metadata["output_tokens"] == 12
    chunks = list(model.stream(MESSAGES))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) == 12
    assert [answer.content for answer in model.batch([MESSAGES, MESSAGES])] == [whole.content] * 2
