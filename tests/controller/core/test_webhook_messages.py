"""Messages to webhooks: what is in them, who signed them, and which URLs are called."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from dataclasses import replace

import pytest

from elasticctl.api.status import JobStatus, Phase, ProgressStatus
from elasticctl_controller.core import notifications, webhook_messages
from elasticctl_controller.core.webhook_messages import Webhook, WebhookError
from tests.support.controller.samples import NOW, a_job

RUNNING = JobStatus(phase=Phase.RUNNING, active=3, desired=3)


def test_the_message_is_slacks_and_says_the_same_to_programs() -> None:
    status = replace(
        RUNNING, phase=Phase.FAILED, message="<!channel> & <http://evil|here>", progress=ProgressStatus(step=7)
    )
    items = notifications.list_notifications(a_job(status=RUNNING, namespace="team-a"), status, NOW)
    message = json.loads(webhook_messages.build_message(items))
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


def test_of_many_pieces_the_newest_are_told_and_the_others_counted() -> None:
    items = [
        replace(notifications.build_waiting_notification(a_job(), RUNNING, 900, NOW), text=f"change {n}")
        for n in range(30)
    ]
    message = json.loads(webhook_messages.build_message(items, dropped=5))
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
    assert webhook_messages.check_url(url) == url.strip()


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
        webhook_messages.check_url(url)
    assert "planted" not in str(error.value)


def test_a_jobs_words_notify_nobody_and_command_no_terminal() -> None:
    said = "<!channel> @everyone @channel \x1b[2J\x9b1A\nnext <http://x|y>"
    told = notifications.Notification(notifications.NotificationKind.FAILED, said, said, "uid", NOW, said)
    text = json.loads(webhook_messages.build_message([told]))["text"]
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
