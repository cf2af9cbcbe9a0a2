"""People who log in by OIDC through a proxy, as docs/dashboard.md has it: a real code flow, in Chromium."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from tests.support.dashboard.oidc import Proxy, Verifier, provider
from tests.support.dashboard.team import Guest, dashboard, served, team
from tests.support.dashboard.visitor import Visitor, see

pytestmark = pytest.mark.browser


def test_a_user_who_logs_in_by_oidc_has_their_own_rights_and_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visitor: Visitor
) -> None:
    people = {"jo@example.org": Guest("oidc:jo", {"ml"}, {"ml"}), "maria@example.org": Guest("oidc:maria", {"nlp"})}
    with provider() as issuer:
        with urllib.request.urlopen(f"{issuer}/jwks") as answer:
            known = Verifier(issuer, json.load(answer), people)
        with (
            team(tmp_path, monkeypatch, people, known.find) as cluster,
            served(dashboard(allow_changes=True, behind_proxy=True)) as upstream,
            served(Proxy(issuer, upstream)) as address,
        ):
            cluster.add("digits", "ml")
            pages = {}
            for name in people:
                page = pages[name] = visitor.open(f"{address}/")
                page.locator("input[name=sub]").fill(name)
                page.keyboard.press("Enter")
                see(page).to_have_url(f"{address}/in/ml/")
            jo, maria = pages.values()
            see(jo.get_by_role("heading", name="digits")).to_be_visible()
            see(jo.locator("#who")).to_have_text("oidc:jo")
            see(maria.get_by_text('User "oidc:maria" cannot list resource "elasticjobs"')).to_be_visible()
            assert "digits" not in maria.inner_text("body")
            jo.get_by_role("button", name="Suspend").click()
            jo.get_by_role("button", name="Suspend", exact=True).last.click()
            see(jo.get_by_text("suspend asked for")).to_be_visible()
            assert "oidc:jo" in json.dumps(cluster.job("ml", "digits")["metadata"]["annotations"])
            jo.get_by_role("button", name="Log out").click()
            see(jo.locator("input[name=sub]")).to_be_visible()
            people.clear()  # the cluster no longer knows anyone, whatever the proxy thinks
            see(maria.get_by_role("dialog", name="Log in to elasticctl")).to_be_visible()
            see(maria.get_by_role("alert")).to_contain_text("the cluster does not accept this token")
            see(maria.get_by_role("button", name="Try again")).to_be_visible()
            see(maria.get_by_label("A token of this cluster")).to_be_hidden()
