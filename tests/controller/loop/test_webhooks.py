"""Webhooks: what messages contain, who signed them, and which hosts are called."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import socket
from dataclasses import replace
from typing import Any

import pytest

from elasticctl.api.status import JobStatus, Phase, ProgressStatus
from elasticctl_controller.core import notifications
from elasticctl_controller.loop import webhooks
from elasticctl_controller.loop.webhooks import NoAnswer, Webhook, WebhookClient, WebhookError, WebhookRules
from tests.support.controller.samples import NOW, a_job
from tests.support.webhooks import Hook, serving

INTERNAL = [
    "127.0.0.1", "127.8.8.8", "0.0.0.0", "::1", "::", "10.96.0.1", "172.16.3.4", "192.168.1.1", "100.64.0.1",
    "100.100.100.200", "169.254.169.254", "169.254.170.2", "168.63.129.16", "192.0.0.192", "fe80::1", "fe80::1%eth0",
    "fd00:ec2::254", "fd20:ce::254", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe",
    "2002:7f00:1::", "224.0.0.1", "ff02::1", "240.0.0.1", "255.255.255.255",
]  # fmt: skip
PUBLIC = ["1.1.1.1", "3.64.0.9", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"]


@pytest.mark.parametrize("address", INTERNAL)
def test_nothing_inside_is_called(address: str) -> None:
    with pytest.raises(WebhookError, match="inside the cluster or machine") as refused:
        WebhookRules().check("hooks.example", address)
    assert address not in str(refused.value), "or a webhook would look names up for its user"


@pytest.mark.parametrize("address", PUBLIC)
def test_what_is_public_is(address: str) -> None:
    WebhookRules().check("hooks.example", address)


def test_an_administrator_may_allow_other_hosts() -> None:
    rules = WebhookRules.parse(["chat.corp.example", "*.slack.com", "10.1.0.0/16", "127.0.0.1"])
    rules.check("Chat.Corp.Example.", "192.168.1.1")
    rules.check("hooks.slack.com", "3.64.0.9")
    rules.check("anything", "10.1.2.3")
    rules.check("localhost", "127.0.0.1")
    for host, address in (
        ("hooks.example", "3.64.0.9"),
        ("slack.com.evil.example", "3.64.0.9"),
        ("slack.com", "3.6.0.9"),
    ):
        with pytest.raises(WebhookError, match="may not call its host"):
            rules.check(host, address)
    for address in ("169.254.169.254", "127.0.0.2", "168.63.129.16", "fe80::1", "fd00:ec2::254"):  # of a name, never
        with pytest.raises(WebhookError, match="inside the cluster"):
            rules.check("chat.corp.example", address)
    with pytest.raises(ValueError, match=r"10\.0\.0\.0/33"):
        WebhookRules.parse(["10.0.0.0/33"])


def test_the_local_clusters_own_machine_is_its_users() -> None:
    WebhookRules(own_machine=True).check("localhost", "127.0.0.1")
    with pytest.raises(WebhookError):
        WebhookRules(own_machine=True).check("metadata", "169.254.169.254")


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What names resolve to, one answer after the other; the last one stays."""
    answers: dict[str, list[str]] = {}
    system = socket.getaddrinfo

    def resolve(host: Any, port: Any, *more: Any, **named: Any) -> Any:
        if host not in answers:
            return system(host, port, *more, **named)
        addresses = answers[host].pop(0) if len(answers[host]) > 1 else answers[host][0]
        return [found for address in addresses.split() for found in system(address, port, 0, socket.SOCK_STREAM)]

    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(webhooks.socket, "getaddrinfo", resolve)
    return answers


def post(rules: WebhookRules, url: str) -> int:
    async def call() -> int:
        client = WebhookClient(rules, answer_s=600.0)
        try:
            return (await client.post("project", url, b"{}", {"Content-Type": "application/json"})).status
        finally:
            client.close()

    return asyncio.run(call())


def test_a_name_is_resolved_once_and_that_address_called(names: dict[str, list[str]]) -> None:
    """A name that answers differently the second time (DNS rebinding) gains nothing."""
    with serving(Hook()) as hook:
        names["hooks.example"] = ["127.0.0.1", "169.254.169.254"]
        url = hook.url.replace("127.0.0.1", "hooks.example")
        assert post(WebhookRules(own_machine=True), url) == 200
        assert names["hooks.example"] == ["169.254.169.254"]
        with pytest.raises(WebhookError, match="inside the cluster"):
            post(WebhookRules(own_machine=True), url)
        assert len(hook.calls) == 1


@pytest.mark.parametrize("answer", ["127.0.0.1", "1.1.1.1 127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_a_name_with_one_internal_address_is_not_called(names: dict[str, list[str]], answer: str) -> None:
    with serving(Hook()) as hook:
        names["hooks.example"] = [answer]
        with pytest.raises(WebhookError, match="inside the cluster"):
            post(WebhookRules(), hook.url.replace("127.0.0.1", "hooks.example"))
        for literal in ("127.0.0.1", "[::ffff:127.0.0.1]", "localhost"):
            with pytest.raises(WebhookError, match="inside the cluster"):
                post(WebhookRules(), hook.url.replace("127.0.0.1", literal))
        assert hook.calls == []


@pytest.mark.parametrize("literal", ["2130706433", "0x7f000001", "0177.0.0.1", "127.1"])
def test_no_way_to_write_an_address_gets_round_it(names: dict[str, list[str]], literal: str) -> None:
    with serving(Hook()) as hook:
        with pytest.raises((WebhookError, NoAnswer)):
            post(WebhookRules(), hook.url.replace("127.0.0.1", literal))
        assert hook.calls == []


def test_a_proxy_decides_what_is_reached(names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy's own address may be internal; the machine's netrc is not read for it or for others."""
    with serving(Hook()) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.partition("/services")[0])
        assert post(WebhookRules(), "http://hooks.example/services") == 200
        with pytest.raises(WebhookError):
            post(WebhookRules(), "http://169.254.169.254/latest")
        assert len(proxy.calls) == 1


LOOKS = [
    "127.0.0.1", "127.0.0.1.", "0x7f000001", "0x7f.0.0.1", "2130706433", "017700000001", "127.1", "0", "[::1]",
    "[::ffff:127.0.0.1]", "localhost", "LOCALHOST.", "\u2460\u2461\u2466.\u24ea.\u24ea.\u2460",
    "\uff11\uff12\uff17.0.0.1",
    "127\u30020\u30020\u30021", "%31%32%37.0.0.1", "127%2e0.0.1", "[::1%25lo]", "example.com@127.0.0.1",
    "127.0.0.1#@example.com", "example.com\\@127.0.0.1", "127.0.0.1%00.example.com", "12\t7.0.0.1", "127.000.000.001",
]  # fmt: skip
"""Ways to write this machine's address, which one reader of URLs takes for it and another does not."""


@pytest.mark.parametrize("host", LOOKS)
def test_this_machine_is_not_called_in_any_notation(host: str) -> None:
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        server.settimeout(0.05)
        url = f"http://{host}:{server.getsockname()[1]}/"
        with pytest.raises((WebhookError, NoAnswer)):
            post(webhooks.EVERY_PUBLIC_HOST, url)
        with pytest.raises(TimeoutError):
            server.accept()


RUNNING = JobStatus(phase=Phase.RUNNING, active=3, desired=3)


def test_the_message_is_in_slacks_format_and_has_the_same_data_for_programs() -> None:
    status = replace(
        RUNNING, phase=Phase.FAILED, message="<!channel> & <http://evil|here>", progress=ProgressStatus(step=7)
    )
    items = notifications.list_notifications(a_job(status=RUNNING, namespace="team-a"), status, NOW)
    message = json.loads(webhooks.build_message(items))
    assert message["text"] == "*digits* (team-a) failed, at step 7: &lt;!channel&gt; &amp; &lt;http://evil|here&gt;"
    assert message["elasticctl"] == {
        "format": 1,
        "omitted": 0,
        "events": [
            {
                "event": "failed",
                "namespace": "team-a",
                "job": "digits",
                "uid": "job-uid-1",
                "at": "1970-01-12T13:46:40.000000Z",
                "phase": "Failed",
                "message": "failed, at step 7: <!channel> & <http://evil|here>",
                "activeWorkers": 3,
                "desiredWorkers": 3,
                "step": 7,
                "restarts": {},
            }
        ],
    }


def test_of_many_notifications_the_newest_are_in_the_message_and_the_others_counted() -> None:
    items = [
        replace(notifications.build_waiting_notification(a_job(), RUNNING, 900, NOW), text=f"change {n}")
        for n in range(30)
    ]
    message = json.loads(webhooks.build_message(items, dropped=5))
    lines = message["text"].split("\n")
    assert lines[0] == "… and 15 earlier changes of jobs"
    assert [line.rpartition(" ")[2] for line in lines[1:]] == [str(n) for n in range(10, 30)]
    assert message["elasticctl"]["omitted"] == 15


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.slack.com/services/T0/B0/x",
        "  https://hooks.example.org:8443/x?y=z\n",
        "http://127.0.0.1:8080/x",
        "http://[::1]/x",
        "http://localhost/x",
    ],
)
def test_urls_that_are_called(url: str) -> None:
    assert webhooks.check_url(url) == url.strip()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://hooks.slack.com/planted",
        "http://127.0.0.1.evil.example/planted",
        "http://169.254.169.254/planted",
        "file:///etc/planted",
        "ftp://localhost/planted",
        "https://user:planted@host/x",
        "https://host/planted\nhttps://other/planted",
        "https:///planted",
        "https://host:x/planted",
        "https://[::1/planted",
        "planted",
        "https://host/" + "planted" * 400,
    ],
)
def test_other_urls_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(WebhookError) as error:
        webhooks.check_url(url)
    assert "planted" not in str(error.value)


def test_a_jobs_words_mention_no_one_and_control_no_terminal() -> None:
    said = "<!channel> @everyone @channel \x1b[2J\x9b1A\nnext <http://x|y>"
    item = notifications.Notification(notifications.NotificationKind.FAILED, said, said, "uid", NOW, said)
    text = json.loads(webhooks.build_message([item]))["text"]
    for mention in ("<!channel>", "@everyone", "@channel", "<http", "\x1b", "\x9b", "\n"):
        assert mention not in text
    assert "\\u001b[2J" in text


def test_a_message_is_signed_with_the_key_after_the_url_as_standard_webhooks_describes() -> None:
    key = b"a key for signatures"
    hook = Webhook.parse(f"https://example.org/x\nwhsec_{base64.b64encode(key).decode()}\n")
    headers = hook.headers(b"{}", 1700000000.9)
    signed = f"{headers['webhook-id']}.1700000000.{{}}".encode()
    assert headers["webhook-signature"] == "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
    assert hook.headers(b"{}", 1700000005.0)["webhook-id"] == headers["webhook-id"], "the next attempt"
    assert hook.headers(b"[]", 1700000005.0)["webhook-id"] != headers["webhook-id"]


def test_without_a_key_nothing_is_signed() -> None:
    assert not [name for name in Webhook.parse("https://example.org/x").headers(b"{}", NOW) if "signature" in name]


@pytest.mark.parametrize("second", ["planted", "whsec_planted!", "https://other/planted"])
def test_a_second_line_that_is_no_key_is_refused_and_not_repeated(second: str) -> None:
    with pytest.raises(WebhookError) as error:
        Webhook.parse(f"https://example.org/x\n{second}")
    assert "planted" not in str(error.value)
