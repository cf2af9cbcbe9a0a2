"""Who is let in, and who may change something."""

from __future__ import annotations

import pytest

from elasticctl.dashboard.access import MAX_TICKETS, TOKEN_HEADER, Gate, is_cross_site, is_local


def ticket_of(path: str) -> str:
    return path.partition("?ticket=")[2]


def test_a_ticket_lets_in_once() -> None:
    gate = Gate()
    path = gate.issue()
    assert path.startswith(gate.base)
    assert not gate.redeem("")
    assert not gate.redeem(gate.session)
    assert gate.redeem(ticket_of(path))
    assert not gate.redeem(ticket_of(path))


def test_tickets_that_nobody_uses_do_not_pile_up() -> None:
    gate = Gate()
    tickets = [ticket_of(gate.issue()) for _ in range(MAX_TICKETS + 1)]
    assert not gate.redeem(tickets[0])
    assert gate.redeem(tickets[1])
    assert gate.redeem(tickets[-1])


def test_no_secret_is_in_another_or_in_the_next_run() -> None:
    one, other = Gate(), Gate()
    assert len({text for gate in (one, other) for text in (gate.base, gate.session, gate.token)}) == 6
    assert one.admits(one.session)
    assert not one.admits(other.session)
    assert not one.admits("")
    assert not one.admits("ünicode")


@pytest.mark.parametrize("text", ["\udcff", "\x00"])
def test_what_is_no_text_is_not_good_either(text: str) -> None:
    """As headers are that are not UTF-8."""
    gate = Gate()
    assert not gate.admits(text)
    assert not gate.redeem(text)
    assert not gate.may_change({TOKEN_HEADER: text, "Host": "localhost", "Origin": "http://localhost"})


def test_a_change_needs_the_token_and_the_pages_own_origin() -> None:
    gate = Gate()
    good = {TOKEN_HEADER: gate.token, "Host": "localhost:9000", "Origin": "http://localhost:9000"}
    assert gate.may_change(good)
    for wrong in (
        {TOKEN_HEADER: gate.session},
        {TOKEN_HEADER: ""},
        {"Origin": "http://localhost:9001"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": "https://localhost:9000"},
    ):
        assert not gate.may_change(good | wrong), wrong


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:41235", "localhost:9000"])
def test_this_machine_has_two_names_and_any_port(host: str) -> None:
    assert is_local(host)


@pytest.mark.parametrize(
    "host", ["", "evil.example", "evil.example:41235", "127.0.0.1.evil.example", "127.0.0.1:x", "10.0.0.1:80"]
)
def test_another_name_for_this_machine_is_none_of_ours(host: str) -> None:
    assert not is_local(host)


def test_other_sites_may_link_here_and_no_more() -> None:
    assert not is_cross_site({})
    assert not is_cross_site({"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"})
    assert not is_cross_site({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"})
    assert is_cross_site({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"})
    assert is_cross_site({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"})
