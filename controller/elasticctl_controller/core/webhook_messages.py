"""Messages to webhooks: what they contain, in Slack's format, how they are signed, and which URLs may be called."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from elasticctl.api.errors import ElasticctlError
from elasticctl.api.text import is_loopback, visible
from elasticctl_controller.core.notifications import Notification

FORMAT = 1
MAX_ITEMS = 20
"""The most notifications in one message, which says how many more there are."""
MAX_URL_CHARS = 2048
KEY_PREFIX = "whsec_"
_NO_SPACE = "\u200b"


class WebhookError(ElasticctlError):
    """A webhook's URL is missing or unusable, or the receiver did not accept a message."""


@dataclass(frozen=True, slots=True)
class Webhook:
    """Where messages go, and the key that they are signed with (None: they are not signed)."""

    url: str
    key: bytes | None = None

    @classmethod
    def parse(cls, text: str) -> Webhook:
        """Read the value of a secret: a URL, and perhaps a key after it. Raises WebhookError if the URL must not be
        called, or if the key is none."""
        url, _, key = text.strip().partition("\n")
        if not key.strip():
            return cls(check_url(url))
        try:
            return cls(check_url(url), base64.b64decode(key.strip().removeprefix(KEY_PREFIX), validate=True))
        except ValueError:
            raise WebhookError(f"its second line is no key for signatures ({KEY_PREFIX} and base64)") from None

    def headers(self, message: bytes, now: float) -> dict[str, str]:
        """The headers of a message that is sent at `now`, signed as https://www.standardwebhooks.com describes.

        The id is the same for each attempt to send a message.
        """
        headers = {"Content-Type": "application/json", "User-Agent": "elasticctl"}
        if self.key is None:
            return headers
        message_id, timestamp = f"msg_{hashlib.sha256(message).hexdigest()[:32]}", str(int(now))
        signed = f"{message_id}.{timestamp}.".encode() + message
        signature = base64.b64encode(hmac.new(self.key, signed, hashlib.sha256).digest()).decode()
        return headers | {
            "webhook-id": message_id,
            "webhook-timestamp": timestamp,
            "webhook-signature": f"v1,{signature}",
        }


def check_url(text: str) -> str:
    """Return the URL, stripped. Raises WebhookError if it must not be called."""
    url = text.strip()
    try:
        parts = urlsplit(url)
        host, port_is_one = parts.hostname, parts.port is None or parts.port > 0
    except ValueError:
        host, port_is_one = None, False
    plain = url.isascii() and url.isprintable() and " " not in url and len(url) <= MAX_URL_CHARS
    if not plain or not host or not port_is_one or "@" in parts.netloc:
        raise WebhookError("it is not a single https:// URL without user or password")
    if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(host)):
        raise WebhookError("it is not an https:// URL (http:// is allowed for loopback addresses only)")
    return url


def build_message(notifications: Sequence[Notification], dropped: int = 0) -> bytes:
    """The message about some notifications, oldest first; `dropped` older ones were discarded."""
    lines = [
        f"*{escape(item.job)}* ({escape(item.namespace)}) {escape(item.text)}" for item in notifications[-MAX_ITEMS:]
    ]
    missing = dropped + max(0, len(notifications) - MAX_ITEMS)
    if missing:
        lines.insert(0, f"… and {missing} earlier {'change' if missing == 1 else 'changes'} of jobs")
    data = {"format": FORMAT, "events": [item.as_data() for item in notifications[-MAX_ITEMS:]], "omitted": missing}
    return json.dumps({"text": "\n".join(lines), "elasticctl": data}).encode()


def escape(text: str) -> str:
    """Escape Slack's markup: a job's message must not contain links or notify anybody.

    Other services that accept Slack's format recognize `@channel` in plain text: a zero-width space follows each `@`.
    """
    shown = visible(" ".join(text.split())).replace("@", f"@{_NO_SPACE}")
    return shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
