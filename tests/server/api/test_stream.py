"""Server-sent events: what is rendered once says the same as what is rendered each time."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.api.stream import TextEvent, event


@given(st.text())
def test_a_text_event_is_the_event_that_its_payload_would_make(text: str) -> None:
    def payload(place: str) -> dict[str, object]:
        return {"id": "cmpl-ü", "choices": [{"index": 1, "text": place, "logprobs": None}], "model": '"\\'}

    rendered = TextEvent(event(payload(TextEvent.PLACE)))
    assert rendered(text) == event(payload(text))
    assert json.loads(rendered(text).removeprefix(b"data: ")) == payload(text)
    assert rendered(text).count(b"\n") == 2


def test_an_example_without_a_place_is_our_own_error() -> None:
    with pytest.raises(AssertionError):
        TextEvent(event({"text": "x"}))
