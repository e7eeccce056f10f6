"""Which host pages are given up, and that a copy which is still to be dispatched is never spoilt by the next one."""

from jaxserve.scheduling.host_tier import Copies, HostTier


def test_the_least_recently_used_host_page_is_the_first_to_go() -> None:
    host = HostTier(3)
    first, second, third = (host.save(page) for page in (11, 12, 13))
    assert not host.has_room
    assert host.oldest() == first
    host.touch(first)
    assert host.oldest() == second
    host.drop(second)
    assert host.has_room
    assert host.oldest() == third
    host.check_integrity()


def test_a_host_page_that_is_restored_is_not_saved_over_before_that_copy_is_handed_over() -> None:
    host = HostTier(1)
    host_page = host.save(11)
    assert host.hand_over() == Copies(saved=((11, host_page),), restored=())
    host.restore(host_page, 12)
    assert not host.has_room
    assert host.oldest() is None
    assert host.oldest_duplicate() is None
    host.drop(host_page)
    assert not host.has_room
    assert host.hand_over() == Copies(saved=(), restored=((host_page, 12),))
    assert host.has_room
    host.check_integrity()


def test_what_is_dropped_before_its_copy_is_dispatched_is_not_copied() -> None:
    host = HostTier(1)
    host.drop(host.save(11))
    assert host.hand_over() is None
    host.drop(host.save(11))
    host_page = host.save(12)
    assert host.hand_over() == Copies(saved=((12, host_page),), restored=())
    assert (host.num_held, host.num_saved) == (1, 1)


def test_what_is_wanted_back_is_given_up_last_of_all_that_is_saved() -> None:
    host = HostTier(4)
    host.max_saves = 2
    first, second = host.save(11), host.save(12)
    assert not host.may_save
    assert host.oldest_save() == first
    host.touch(first)
    assert host.oldest_save() == second
    host.restore(second, 13)
    assert host.oldest_save() == first
    host.restore(first, 14)
    assert host.oldest_save() is None
    host.hand_over()
    assert host.may_save


def test_a_page_that_is_wanted_back_at_once_goes_out_and_in_within_one_step() -> None:
    host = HostTier(2)
    host_page = host.save(11)
    host.restore(host_page, 12)
    other = host.save(13)
    assert other != host_page
    assert host.hand_over() == Copies(saved=((11, host_page), (13, other)), restored=((host_page, 12),))
    host.check_integrity()
