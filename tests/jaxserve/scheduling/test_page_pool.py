"""Who holds which page."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from jaxserve.scheduling.page_pool import PagePool

NUM_PAGES = 9


def test_the_dummy_page_is_never_handed_out() -> None:
    pool = PagePool(NUM_PAGES)
    assert pool.total == NUM_PAGES - 1
    assert sorted(pool.allocate(pool.total)) == list(range(1, NUM_PAGES))
    assert (pool.num_free, pool.num_active) == (0, pool.total)


def test_a_released_page_comes_back_and_may_be_taken_again() -> None:
    pool = PagePool(NUM_PAGES)
    pages = pool.allocate(pool.total)
    pool.release(pages[2:4])
    assert sorted(pool.allocate(2)) == sorted(pages[2:4])


def test_taking_no_page_takes_none() -> None:
    pool = PagePool(NUM_PAGES)
    assert pool.allocate(0) == []
    assert pool.num_free == pool.total


@pytest.mark.parametrize("num_pages", [-1, 0, 1])
def test_a_pool_without_a_usable_page_is_refused(num_pages: int) -> None:
    with pytest.raises(ValueError, match=f"num_pages is {num_pages}; at least 2"):
        PagePool(num_pages)


def test_more_pages_than_are_free_is_an_error_that_takes_none() -> None:
    pool = PagePool(NUM_PAGES)
    pool.allocate(5)
    with pytest.raises(AssertionError):
        pool.allocate(4)
    assert pool.num_free == 3


def test_releasing_a_page_twice_is_an_error_that_names_it() -> None:
    pool = PagePool(NUM_PAGES)
    (page,) = pool.allocate(1)
    pool.release([page])
    with pytest.raises(AssertionError, match=f"page {page} was released more often"):
        pool.release([page])


@pytest.mark.parametrize(
    ("held_by", "message"),
    [
        ({"a": []}, "page 1 counts 1 holders; it has 0"),
        ({"a": [1, 2], "b": [3]}, r"page 3 counts 0 holders; it has 1: \['b'\]"),
        ({"a": [1, 2], "b": [2]}, r"page 2 counts 1 holders; it has 2: \['a', 'b'\]"),
        ({"a": [1, 2, 2]}, "request a holds a page twice"),
        ({"a": [0, 1, 2]}, "request a holds the dummy page"),
    ],
    ids=["leak", "not_allocated", "shared_unawares", "twice", "dummy"],
)
def test_the_integrity_check_names_page_and_request(held_by: dict[str, list[int]], message: str) -> None:
    pool = PagePool(NUM_PAGES)
    assert pool.allocate(2) == [1, 2]
    pool.check_integrity({"a": [1, 2]})
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity(held_by)


@given(st.lists(st.integers(0, NUM_PAGES - 1)))
def test_no_page_is_handed_out_twice(counts: list[int]) -> None:
    pool = PagePool(NUM_PAGES)
    held: list[int] = []
    for count in counts:
        if count <= pool.num_free:
            held += pool.allocate(count)
    assert len(set(held)) == len(held) == pool.num_active


class PoolMachine(RuleBasedStateMachine):
    """Takes and releases in any order; the machine's own books must always agree with the pool's."""

    allocations = Bundle("allocations")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.held: dict[str, list[int]] = {}
        self.count = 0

    @rule(target=allocations, count=st.integers(0, NUM_PAGES))
    def allocate(self, count: int) -> str:
        name = f"request {self.count}"
        self.count += 1
        self.held[name] = self.pool.allocate(min(count, self.pool.num_free))
        return name

    @rule(name=consumes(allocations))
    def release(self, name: str) -> None:
        self.pool.release(self.held.pop(name))

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def release_one_page(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name, pages in self.held.items() if pages]))
        self.pool.release([self.held[name].pop()])

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_integrity(self.held)
        assert self.pool.num_active == sum(map(len, self.held.values()))
        assert self.pool.num_free + self.pool.num_active == self.pool.total


test_pool_machine = PoolMachine.TestCase
