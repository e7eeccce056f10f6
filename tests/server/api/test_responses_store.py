"""The store of responses: bounded in number and in size, whatever is put into it."""

from server.api.responses_store import ResponseStore, StoredResponse


def stored(chars: int = 1) -> StoredResponse:
    return StoredResponse(body={}, messages=(), chars=chars)


def test_the_response_unread_for_longest_makes_room() -> None:
    store = ResponseStore(max_responses=2, max_chars=100)
    store.put("a", stored())
    store.put("b", stored())
    assert store.get("a") is not None
    store.put("c", stored())
    assert [store.get(name) is not None for name in "abc"] == [True, False, True]


def test_size_is_bounded_too_and_a_new_state_replaces_the_old() -> None:
    store = ResponseStore(max_responses=10, max_chars=100)
    for _ in range(5):
        store.put("a", stored(60))
    store.put("b", stored(40))
    assert store.get("a") is not None
    store.put("c", stored(1))
    assert [store.get(name) is not None for name in "abc"] == [True, False, True]
    store.put("huge", stored(101))
    assert all(store.get(name) is None for name in ("a", "b", "c", "huge"))
    assert not store.delete("huge")
    store.put("d", stored(100))
    assert store.get("d") is not None
