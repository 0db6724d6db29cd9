"""Tickets: which pushes make up an update, and which come too late."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.errors import PlanError
from outsize.runtime.parameter_server.update_policy import Tickets, UpdatePolicy


def test_synchronous_updates_take_one_version_s_pushes_and_no_more() -> None:
    """Two of three workers (one backup) fill update 0; the third is late; update 1 needs version 1."""
    tickets = Tickets(UpdatePolicy.synchronous(3, num_backup_workers=1))
    assert [tickets.claim(0), tickets.claim(0), tickets.claim(0)] == [0, 1, None]
    assert [tickets.claim(1), tickets.claim(0), tickets.claim(1)] == [2, None, 3]


def test_a_returned_ticket_is_given_out_first() -> None:
    """The place of a worker that died in update 0 is open again, for version 0 only."""
    tickets = Tickets(UpdatePolicy.synchronous(2))
    assert [tickets.claim(0), tickets.claim(0)] == [0, 1]
    assert not tickets.is_open(0)
    tickets.give_back(0)
    assert tickets.is_open(0)
    assert tickets.claim(0) == 0


@given(st.integers(1, 4), st.integers(0, 3), st.lists(st.integers(0, 12), max_size=60))
def test_no_push_is_accepted_beyond_the_bound(pushes: int, bound: int, versions_read: list[int]) -> None:
    """Every accepted push is applied at most ``bound`` after the version it read, every refused one later."""
    tickets = Tickets(UpdatePolicy.bounded_staleness(bound, pushes_per_update=pushes))
    for version_read in versions_read:
        update = tickets.next_update()
        ticket = tickets.claim(version_read)
        assert (ticket is not None) == (update - version_read <= bound)
        assert ticket is None or ticket // pushes == update


def test_impossible_policies_are_refused() -> None:
    """More backups than workers, or a negative bound."""
    with pytest.raises(PlanError):
        UpdatePolicy.synchronous(2, num_backup_workers=2)
    with pytest.raises(PlanError):
        UpdatePolicy.bounded_staleness(-1)
