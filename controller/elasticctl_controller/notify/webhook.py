"""What a webhook gets, and which URLs one may have; pure.

The body is what Slack's incoming webhooks take, and Mattermost's and others after them: `{"text": …}`. Beside it stands
the same for programs under `elasticctl`, which those ignore. No error repeats a URL: it is a secret.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Sequence
from urllib.parse import urlsplit

from elasticctl.errors import ElasticctlError
from elasticctl_controller.notify.news import Item

FORMAT = 1
MAX_ITEMS = 20
"""In one message; of more, their number is said."""
MAX_URL_CHARS = 2048


class WebhookError(ElasticctlError):
    """A webhook's URL cannot be had or used, or its other end did not take what was sent."""


def check_url(text: str) -> str:
    """The URL in a secret, without the blanks around it. Raises WebhookError for one that is not to be called."""
    url = text.strip()
    try:
        parts = urlsplit(url)
        host, port_is_one = parts.hostname, parts.port is None or parts.port > 0
    except ValueError:
        host, port_is_one = None, False
    plain = url.isascii() and url.isprintable() and " " not in url and len(url) <= MAX_URL_CHARS
    if not plain or not host or not port_is_one or "@" in parts.netloc:
        raise WebhookError("it is not one URL, https://…, without user or password")
    if parts.scheme != "https" and not (parts.scheme == "http" and _is_loopback(host)):
        raise WebhookError("it is not an https:// URL (http:// is for this machine's own addresses)")
    return url


def body(found: Sequence[Item], dropped: int = 0) -> bytes:
    """The message about some pieces of news, oldest first; `dropped` older ones were lost."""
    lines = [f"*{escaped(item.job)}* ({escaped(item.namespace)}) {escaped(item.text)}" for item in found[-MAX_ITEMS:]]
    missing = dropped + max(0, len(found) - MAX_ITEMS)
    if missing:
        lines.insert(0, f"… and {missing} earlier {'change' if missing == 1 else 'changes'} of jobs")
    data = {"format": FORMAT, "events": [item.as_data() for item in found[-MAX_ITEMS:]], "omitted": missing}
    return json.dumps({"text": "\n".join(lines), "elasticctl": data}).encode()


def escaped(text: str) -> str:
    """Text in which Slack finds no links and nobody to call: what a job says must not wake a whole channel."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
