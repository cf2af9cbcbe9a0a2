"""Who is let in, who may change something, and which changes the page may make to which job."""

from __future__ import annotations

from typing import Any

import pytest

from elasticctl.api.errors import ConflictError, NotFoundError, UsageError
from elasticctl.dashboard.access import (
    MAX_TICKETS,
    TOKEN_HEADER,
    ChangeRequest,
    Gate,
    apply_change,
    is_cross_site,
    is_local,
)
from elasticctl.operations.target import Target
from elasticctl.settings.contexts import Context
from tests.support.dashboard.cluster import Jobs
from tests.support.job_samples import FAILED, job


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


def test_unused_tickets_do_not_pile_up() -> None:
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
def test_headers_that_are_not_utf8_are_refused(text: str) -> None:
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


def target(cluster: Jobs) -> Target:
    return Target(Context("lab", "kubernetes"), "default", cluster)  # type: ignore[arg-type]


def spec_after(verb: str, workers: int = 0, **status: Any) -> dict[str, Any]:
    cluster = Jobs(job(**status))
    apply_change(target(cluster), "digits", ChangeRequest(verb, "uid-digits", workers))
    found: dict[str, Any] = cluster.jobs["digits"]["spec"]
    return found


def test_each_verb_does_what_the_command_does() -> None:
    assert spec_after("suspend")["suspend"] is True
    assert spec_after("resume", phase="Suspended")["suspend"] is False
    assert spec_after("cancel")["cancel"] is True
    assert spec_after("scale", 2)["replicaSpecs"]["Worker"]["replicas"] == 2


def test_bounds_are_those_of_the_command() -> None:
    with pytest.raises(UsageError, match="5 workers are more than the maximum of digits, 4"):
        spec_after("scale", 5)


def test_a_change_in_between_is_not_overwritten() -> None:
    cluster = Jobs(job())
    cluster.in_between = job()
    cluster.in_between["metadata"]["resourceVersion"] = "8"
    cluster.in_between["spec"]["minReplicas"] = 2
    apply_change(target(cluster), "digits", ChangeRequest("scale", "uid-digits", 2))
    spec = cluster.jobs["digits"]["spec"]
    assert (spec["minReplicas"], spec["replicaSpecs"]["Worker"]["replicas"]) == (2, 2)


def test_another_job_of_the_same_name_is_left_alone() -> None:
    with pytest.raises(NotFoundError, match="another job now has its name"):
        apply_change(target(Jobs(job())), "digits", ChangeRequest("cancel", "another-uid"))


def test_a_job_that_has_ended_stays_as_it_is() -> None:
    with pytest.raises(ConflictError, match="has ended"):
        apply_change(target(Jobs(job(**FAILED))), "digits", ChangeRequest("resume", "uid-digits"))
    with pytest.raises(NotFoundError):
        apply_change(target(Jobs()), "digits", ChangeRequest("resume", "uid-digits"))


@pytest.mark.parametrize(
    ("verb", "body", "said"),
    [
        ("delete", {"uid": "u"}, "scale, suspend, resume or cancel"),
        ("cancel", {}, "which job"),
        ("cancel", {"uid": 7}, "which job"),
        ("cancel", [], "which job"),
        ("cancel", {"uid": "u", "workers": 3}, "no other verb takes one"),
        ("scale", {"uid": "u"}, "scale needs a number"),
        ("scale", {"uid": "u", "workers": "3"}, "not a number"),
        ("scale", {"uid": "u", "workers": True}, "not a number"),
        ("scale", {"uid": "u", "workers": -1}, "not a number"),
        ("scale", {"uid": "u", "workers": 10**9}, "not a number"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(verb: str, body: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ChangeRequest.parse(verb, body)
