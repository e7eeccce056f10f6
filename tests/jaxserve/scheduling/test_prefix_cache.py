"""What is found in the tree, what is given up when room is needed, and that the books of tree and pool agree."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.prefix_cache import Prefix, PrefixCache, RootKey, root_key

SIZE = 2
ROOT = root_key(model="m")


class Holder:
    """One request as the cache sees it: its tokens and its pages."""

    def __init__(self, cache: PrefixCache, tokens: list[int], root: RootKey = ROOT) -> None:
        self.cache = cache
        self.tokens = tokens
        matched = cache.match(root, tokens)
        self.prefix: Prefix
        self.prefix, self.pages = cache.open(root, matched)
        self.num_matched = len(self.pages)  # on the device
        self.pages += cache.allocate(-(-len(tokens) // SIZE) - self.num_matched)

    def insert(self) -> int | None:
        return self.cache.insert(self.prefix, self.tokens, self.pages, len(self.tokens) // SIZE)

    def leave(self) -> None:
        self.cache.release(self.pages)
        self.pages = []

    def follow(self, end: int, *, max_restored: int = 100) -> int:
        self.cache.follow(self.prefix, self.tokens, self.pages, end, max_restored=max_restored)
        return self.prefix.depth


def make_cache(num_pages: int = 20, host_pages: int = 0) -> PrefixCache:
    return PrefixCache(PagePool(num_pages + 1), page_size=SIZE, host_pages=host_pages)


def check(cache: PrefixCache, *holders: Holder) -> None:
    cache.check_integrity({str(i): holder.pages for i, holder in enumerate(holders)})


def serve(cache: PrefixCache, tokens: list[int], root: RootKey = ROOT) -> Holder:
    """A request that comes, computes and leaves."""
    holder = Holder(cache, tokens, root)
    holder.insert()
    holder.leave()
    return holder


def test_a_prefix_is_found_page_by_page_and_the_partial_tail_is_not() -> None:
    cache = make_cache()
    serve(cache, [1, 2, 3, 4, 5])
    assert [node.token_ids for node in cache.match(ROOT, [1, 2, 3, 4, 5, 6, 7])] == [(1, 2), (3, 4)]
    assert [node.token_ids for node in cache.match(ROOT, [1, 2, 3, 9, 9])] == [(1, 2)]
    assert cache.match(ROOT, [9, 2, 3, 4]) == []
    assert cache.match(ROOT, [1]) == []


def test_at_least_one_token_is_always_left_to_compute() -> None:
    cache = make_cache()
    serve(cache, [1, 2, 3, 4])
    assert len(cache.match(ROOT, [1, 2, 3, 4])) == 1
    assert len(cache.match(ROOT, [1, 2, 3, 4, 5])) == 2


def test_a_shared_page_is_the_same_page_held_twice() -> None:
    cache = make_cache()
    first = Holder(cache, [1, 2, 3])
    first.insert()
    second = Holder(cache, [1, 2, 9])
    assert second.pages[0] == first.pages[0]
    assert second.pages[1] != first.pages[1]
    assert cache.pool.num_shared == 1
    check(cache, first, second)
    first.leave()
    assert cache.pool.num_cached == 0, "the other one still holds it"
    check(cache, second)


@pytest.mark.parametrize(
    "other", [{"salt": "a"}, {"tenant": "a"}, {"salt": "b"}, {"salt": "a", "tenant": "a"}, {"salt": "m"}, {}]
)
def test_trees_of_different_roots_share_nothing(other: dict[str, str]) -> None:
    roots = [root_key(model="m", **other), root_key(model="m", salt="c"), root_key(model="m", tenant="c")]
    cache = make_cache()
    for root in roots:
        assert serve(cache, [1, 2, 3, 4, 5], root).num_matched == 0
    assert cache.pool.num_cached == 6


def test_the_least_recently_used_leaf_goes_first_and_parents_after_their_children() -> None:
    cache = make_cache(5)
    serve(cache, [1, 2, 3, 4])
    serve(cache, [5, 6, 7, 8])
    serve(cache, [1, 2, 3, 4])  # used again, with the fifth page for a while: the other one is the oldest now
    assert cache.num_evictions == 0
    cache.allocate(2)
    assert [len(cache.match(ROOT, [*tokens, 0])) for tokens in ([1, 2, 3, 4], [5, 6, 7, 8])] == [2, 1]
    cache.allocate(1)
    assert [len(cache.match(ROOT, [*tokens, 0])) for tokens in ([1, 2, 3, 4], [5, 6, 7, 8])] == [2, 0]
    cache.allocate(1)
    assert len(cache.match(ROOT, [1, 2, 3, 4, 0])) == 1
    assert cache.num_evictions == 3


def test_a_page_in_use_is_never_evicted_nor_those_before_it() -> None:
    cache = make_cache(4)
    holder = Holder(cache, [1, 2, 3, 4])
    holder.insert()
    serve(cache, [5, 6, 7, 8])
    assert cache.available == 2
    assert not set(cache.allocate(2)) & set(holder.pages)
    assert cache.available == 0


def test_two_who_computed_the_same_end_up_with_one_copy() -> None:
    cache = make_cache()
    first, second = Holder(cache, [1, 2, 3, 4, 5]), Holder(cache, [1, 2, 3, 4, 6])
    own = list(second.pages)
    first.insert()
    assert second.insert() == 0, "the block table changes from its first page on"
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] == own[2]
    assert cache.pool.num_active == 4
    check(cache, first, second)


def test_what_another_has_computed_meanwhile_is_taken_over() -> None:
    cache = make_cache()
    first, second = Holder(cache, [1, 2, 3, 4, 5]), Holder(cache, [1, 2, 3, 4, 6])
    assert second.follow(2) == 0
    first.insert()
    assert second.follow(1) == 1
    assert second.follow(2) == 2
    assert second.pages[:2] == first.pages[:2]
    check(cache, first, second)


def test_a_flush_forgets_everything_and_leaves_the_running_ones_theirs() -> None:
    cache = make_cache()
    runner = Holder(cache, [1, 2, 3, 4, 5])
    runner.insert()
    serve(cache, [7, 8, 9])
    assert cache.flush() == 3
    assert cache.match(ROOT, [1, 2, 3, 4, 5]) == []
    check(cache, runner)
    runner.tokens += [6]
    assert runner.insert() is None
    assert cache.match(ROOT, [1, 2, 3, 4, 5, 6, 7]) == [], "it began before the flush, so it shares nothing any more"
    runner.leave()
    assert cache.pool.num_free == cache.pool.total
    check(cache)


def test_pages_of_a_request_that_went_wrong_are_found_by_nobody() -> None:
    cache = make_cache()
    serve(cache, [1, 2, 3])
    wrong = Holder(cache, [1, 2, 3, 4, 5, 6])
    wrong.insert()
    follower = Holder(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    assert follower.num_matched == 3
    follower.insert()
    cache.discard(wrong.prefix)
    assert len(cache.match(ROOT, [1, 2, 3, 4, 5, 6, 7])) == 1, "what it found there stays; what it made is gone"
    check(cache, wrong, follower)
    wrong.leave()
    follower.leave()
    check(cache)
    assert cache.pool.num_cached == 1


def test_trees_of_salts_go_with_their_pages() -> None:
    cache = make_cache(2)
    for salt in range(50):
        serve(cache, [1, 2, 3], root_key(model="m", salt=str(salt)))
    assert len(cache._roots) <= 2


def test_a_cache_that_is_off_keeps_nothing() -> None:
    cache = PrefixCache(PagePool(10), page_size=SIZE, is_enabled=False)
    assert serve(cache, [1, 2, 3, 4, 5]).num_matched == 0
    assert serve(cache, [1, 2, 3, 4, 5]).num_matched == 0
    assert cache.pool.num_free == cache.pool.total


def test_an_evicted_page_comes_back_to_a_page_of_who_wants_it() -> None:
    cache = make_cache(3, host_pages=10)
    serve(cache, [1, 2, 3, 4, 5])
    first, second = (node.page for node in cache.match(ROOT, [1, 2, 3, 4, 5]))
    assert cache.take_copies() is None
    other = Holder(cache, [6, 7, 8, 9, 10])  # takes all three pages
    copies = cache.take_copies()
    assert copies is not None
    assert [page for page, _ in copies.saved] == [second, first]
    assert copies.restored == ()
    other.leave()
    back = Holder(cache, [1, 2, 3, 4, 5])
    assert back.num_matched == 0, "nothing of it is on the device"
    assert back.follow(2) == 2
    copies = cache.take_copies()
    assert copies is not None
    assert [page for _, page in copies.restored] == back.pages[:2]
    assert (cache.host.num_held, cache.host.num_restored, cache.num_host_hits) == (0, 2, 1)
    check(cache, back)


def test_a_page_that_came_back_and_is_evicted_again_is_not_copied_again() -> None:
    cache = make_cache(3, host_pages=2)
    serve(cache, [1, 2, 3, 4, 5])
    Holder(cache, [6, 7, 8, 9, 10]).leave()
    cache.take_copies()
    back = Holder(cache, [1, 2, 3, 4, 5])
    assert back.follow(2) == 2
    cache.take_copies()
    back.leave()
    assert (cache.host.num_held, cache.host.has_room) == (0, False), "host memory has what the device has"
    other = Holder(cache, [6, 7, 8, 9, 10])
    assert cache.take_copies() is None
    assert (cache.host.num_held, cache.host.num_saved) == (2, 2)
    check(cache, other)


def test_what_the_device_has_too_makes_room_on_the_host_before_what_is_only_there() -> None:
    cache = make_cache(4, host_pages=2)
    serve(cache, [1, 2, 0])
    serve(cache, [3, 4, 0])
    Holder(cache, [9] * 7).leave()  # both are on the host now
    back = Holder(cache, [1, 2, 0])
    cache.take_copies()
    assert back.follow(1) == 1
    cache.take_copies()
    serve(cache, [7, 8, 0])
    Holder(cache, [9, 9, 9]).leave()
    assert [len(cache.match(ROOT, [*tokens, 0])) for tokens in ([1, 2], [3, 4], [7, 8])] == [1, 1, 1]
    check(cache, back)


def test_only_so_many_pages_come_back_at_once() -> None:
    cache = make_cache(3, host_pages=10)
    serve(cache, [1, 2, 3, 4, 5])
    Holder(cache, [6, 7, 8, 9, 10]).leave()
    back = Holder(cache, [1, 2, 3, 4, 5])
    assert not cache.follow(back.prefix, back.tokens, back.pages, 2, max_restored=1)
    assert (back.prefix.depth, cache.host.num_restored) == (1, 1)
    assert cache.follow(back.prefix, back.tokens, back.pages, 2, max_restored=1)
    assert (back.prefix.depth, cache.host.num_restored) == (2, 2)
    check(cache, back)


def test_of_more_than_a_step_may_save_the_ends_and_what_was_used_least_recently_are_lost() -> None:
    cache = make_cache(6, host_pages=10)
    cache.host.max_saves = 3
    serve(cache, [1, 2, 0])
    serve(cache, [3, 4, 5, 6, 7, 8, 9, 10, 0])
    other = Holder(cache, [0] * 12)  # takes all six pages
    copies = cache.take_copies()
    assert copies is not None
    assert len(copies.saved) == 3
    assert [len(cache.match(ROOT, tokens)) for tokens in ([1, 2, 0], [3, 4, 5, 6, 7, 8, 9, 10, 0])] == [0, 3]
    assert (cache.num_evictions, cache.num_unsaved, cache.host.num_saved) == (5, 2, 3)
    check(cache, other)


def test_what_does_not_pay_stays_on_the_host_until_it_is_computed_again() -> None:
    cache = PrefixCache(PagePool(4), page_size=SIZE, host_pages=10, pays=lambda depth, count: count > 2)
    serve(cache, [1, 2, 3, 4, 5])
    Holder(cache, [6, 7, 8, 9, 10]).leave()
    assert cache.match(ROOT, [1, 2, 3, 4, 5]) == []
    again = Holder(cache, [1, 2, 3, 4, 5])
    assert again.follow(2) == 0
    assert cache.host.num_held == 2
    again.insert()
    assert (cache.host.num_held, cache.host.num_restored) == (0, 0)
    assert [node.page for node in cache.match(ROOT, [1, 2, 3, 4, 5])] == again.pages[:2]
    check(cache, again)


def test_a_full_host_gives_up_the_end_of_what_was_used_least_recently() -> None:
    cache = make_cache(3, host_pages=3)
    serve(cache, [1, 2, 3, 4, 0])
    serve(cache, [5, 6, 7, 8, 0])
    Holder(cache, [9] * 5).leave()  # all four pages come to the host, which has room for three
    assert [len(cache.match(ROOT, [*tokens, 0])) for tokens in ([1, 2, 3, 4], [5, 6, 7, 8])] == [1, 2]
    check(cache)


def test_room_for_a_request_is_made_at_the_end_of_what_it_wants_back() -> None:
    cache = make_cache(4, host_pages=3)
    serve(cache, [1, 2, 3, 4, 5])
    serve(cache, [6, 7, 8, 9, 0, 0, 0])
    assert [node.host_page is None for node in cache.match(ROOT, [1, 2, 3, 4, 5])] == [False, False]
    back = Holder(cache, [1, 2, 3, 4, 5])  # evicts two pages, and the host has room for one
    assert back.follow(2) == 1
    check(cache, back)


def test_what_is_forgotten_is_forgotten_on_the_host_too() -> None:
    cache = make_cache(3, host_pages=10)
    holder = Holder(cache, [1, 2])
    holder.insert()
    serve(cache, [1, 2, 3, 4, 5])
    Holder(cache, [9, 9, 9]).leave()
    assert (cache.host.num_held, len(cache.match(ROOT, [1, 2, 3, 4, 5]))) == (1, 2)
    cache.discard(holder.prefix)
    assert cache.host.num_held == 0, "what was built on wrong pages goes with them"
    holder.leave()
    serve(cache, [1, 2, 3, 4, 5])
    Holder(cache, [9] * 5).leave()
    assert cache.host.num_held == 2
    assert cache.flush() == 2
    assert cache.host.num_held == 0
    assert cache.match(ROOT, [1, 2, 3, 4, 5]) == []
    check(cache)


@settings(max_examples=300)
@given(
    data=st.data(),
    num_pages=st.sampled_from([6, 12]),
    host_pages=st.sampled_from([0, 1, 3, 8, 40]),
    max_saves=st.sampled_from([1, 3, 100]),
)
def test_tree_pool_and_host_agree_through_any_traffic(
    data: st.DataObject, num_pages: int, host_pages: int, max_saves: int
) -> None:
    """Each live holder's pages must hold its own tokens: `content` is what a device would have written there.

    Copies are made when a step would be dispatched, some actions after they were decided; nothing is written before.
    """
    cache = make_cache(num_pages, host_pages)
    cache.host.max_saves = max_saves
    live: list[Holder] = []
    content: dict[int, tuple[RootKey, tuple[int, ...]]] = {}
    on_host: dict[int, tuple[RootKey, tuple[int, ...]]] = {}

    def dispatch() -> None:
        copies = cache.take_copies()
        if copies is not None:
            assert len(copies.saved) <= max_saves
            on_host.update({host_page: content[page] for page, host_page in copies.saved})
            content.update({page: on_host[host_page] for host_page, page in copies.restored})
        for holder in live:  # what the step computes: pages that the tree does not have yet
            for index in range(holder.prefix.depth, len(holder.tokens) // SIZE):
                content[holder.pages[index]] = (holder.prefix.root, tuple(holder.tokens[: (index + 1) * SIZE]))
        cache.check_integrity({str(i): holder.pages for i, holder in enumerate(live)})
        for holder in live:
            for index in range(holder.prefix.depth):
                expected = (holder.prefix.root, tuple(holder.tokens[: (index + 1) * SIZE]))
                assert content[holder.pages[index]] == expected, "a page holds other tokens or another root's"

    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["come", "come", "insert", "grow", "leave", "leave", "discard", "flush"]))
        if action == "come":
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=9))
            root = root_key(salt=data.draw(st.sampled_from([None, "a"])))
            matched = [node for node in cache.match(root, tokens) if node.host_page is None]
            needed = -(-len(tokens) // SIZE) - len(matched)
            unheld = sum(not cache.pool.is_held(node.page) for node in matched)
            if needed + unheld > cache.available:
                continue
            holder = Holder(cache, tokens, root)
            assert not {page for other in live for page in other.pages} & set(holder.pages[holder.num_matched :])
            if data.draw(st.booleans()):
                holder.follow((len(tokens) - 1) // SIZE, max_restored=data.draw(st.integers(0, 4)))
            live.append(holder)
        elif not live:
            continue
        else:
            holder = data.draw(st.sampled_from(live))
            if action == "grow":
                if len(holder.tokens) % SIZE == 0:
                    if not cache.available:
                        continue
                    holder.pages += cache.allocate(1)
                holder.tokens.append(data.draw(st.integers(0, 1)))
            elif action == "insert":
                dispatch()  # it is put in with the step that computes it
                holder.insert()
            elif action in ("leave", "discard"):
                if action == "discard":
                    cache.discard(holder.prefix)
                live.remove(holder)
                holder.leave()
            else:
                cache.flush()
        if data.draw(st.booleans()):
            dispatch()
        else:
            check(cache, *live)
    for holder in live:
        holder.leave()
    assert len(cache.allocate(num_pages)) == num_pages, "everything could be evicted"
    cache.check_integrity({"all": list(range(1, num_pages + 1))})
