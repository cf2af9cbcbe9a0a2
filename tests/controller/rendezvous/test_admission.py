"""Who may connect, by address."""

from __future__ import annotations

import pytest

from elasticctl_controller.rendezvous import admission
from elasticctl_controller.rendezvous.admission import Admission, most_connections, network_of

HOSTILE, OTHER = "10.0.0.7", "192.168.0.8"


def test_unknown_clients_of_an_address_are_capped_and_others_are_not_concerned() -> None:
    door = Admission()
    admitted = [door.admit(HOSTILE, 0.0) for _ in range(admission.UNKNOWN_PER_ADDRESS + 10)]
    assert admitted.count(True) == admission.UNKNOWN_PER_ADDRESS
    assert door.admit(OTHER, 0.0)
    door.leave(HOSTILE, known=False)
    assert door.admit(HOSTILE, 0.0)


def test_an_address_connects_no_faster_than_its_rate() -> None:
    door, seconds = Admission(), 20
    admitted = 0
    for tick in range(seconds * 1000):
        if door.admit(HOSTILE, tick / 1000):
            admitted += 1
            door.leave(HOSTILE, known=False)
    assert admitted == pytest.approx(admission.CONNECTS + seconds * admission.CONNECTS_PER_S, rel=0.01)


def test_workers_that_share_one_address_are_all_accepted() -> None:
    door = Admission()
    for _ in range(20_000):
        assert door.admit(HOSTILE, 0.0)
        door.leave(HOSTILE, known=True)


def test_no_number_of_addresses_takes_much_memory() -> None:
    door = Admission()
    assert door.admit(OTHER, 0.0)
    for number in range(40_000):
        peer = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        assert door.admit(peer, 0.0)
        door.leave(peer, known=False)
    assert len(door._addresses) <= admission.ADDRESSES
    for _ in range(admission.UNKNOWN_PER_ADDRESS - 1):
        assert door.admit(OTHER, 0.0)
    assert not door.admit(OTHER, 0.0), "connected clients are not dropped"


@pytest.mark.parametrize(
    ("peer", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
    ],
)
def test_a_machine_cannot_choose_among_many_addresses(peer: str, network: str) -> None:
    assert network_of(peer) == network


def test_a_job_may_have_more_connections_the_more_workers_it_has() -> None:
    assert most_connections(0) >= 16
    assert most_connections(1000) >= 16_000
