"""Webhooks: what messages to them contain and how they are signed, and the client that sends them.

Messages are in Slack's format. A webhook's URL comes from a Secret of a project. Through the controller, that project's
users must not reach what the controller's network reaches: other services of the cluster, the machines' metadata, the
controller itself. So a host's name is resolved once, the addresses are checked, and the connection goes to one of them.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass
from weakref import WeakValueDictionary

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

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
        called, or if the key is invalid."""
        url, _, key = text.strip().partition("\n")
        if not key.strip():
            return cls(check_url(url))
        try:
            return cls(check_url(url), base64.b64decode(key.strip().removeprefix(KEY_PREFIX), validate=True))
        except ValueError:
            raise WebhookError(f"its second line is not a key for signatures ({KEY_PREFIX} and base64)") from None

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
    """Escape Slack's markup: a job's message must not contain links or notify people.

    Other services that accept Slack's format recognize `@channel` in plain text: a zero-width space follows each `@`.
    """
    shown = visible(" ".join(text.split())).replace("@", f"@{_NO_SPACE}")
    return shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


THREADS = 64
LOOKUPS = 4
"""How many secrets and names of one project are looked up at a time, in threads: the servers may take their time."""
_METADATA = ("168.63.129.16", "192.0.0.192", "100.100.100.200", "fd00:ec2::254", "fd20:ce::254")
"""Addresses of metadata services that are not link-local: Azure, Oracle, Alibaba, AWS and Google."""
_NOT_PUBLIC = (ipaddress.ip_network("192.0.0.0/24"), ipaddress.ip_network("64:ff9b:1::/48"))
"""Networks that Python, or some versions of it, considers public."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WebhookRules:
    """Which hosts may be called: every public one or, if there are `hosts` or `networks`, only these.

    `hosts` are names or `*.domain`; they may have internal addresses, but not loopback or link-local ones. `networks`
    may be any. `own_machine`: loopback may be called, because it belongs to the user.
    """

    hosts: tuple[str, ...] = ()
    networks: tuple[Network, ...] = ()
    own_machine: bool = False

    @classmethod
    def parse(cls, texts: list[str]) -> WebhookRules:
        """Parse `HOST`, `*.DOMAIN`, addresses and networks. Raises ValueError for an invalid network."""
        networks = [ipaddress.ip_network(text) for text in texts if _is_network(text)]
        hosts = [text.lower().rstrip(".") for text in texts if not _is_network(text)]
        return cls(tuple(hosts), tuple(networks))

    def check(self, host: str, address: str) -> None:
        """Raise WebhookError, without the address in its text, unless `host` may be called at `address`."""
        for ip in _meanings(ipaddress.ip_address(address.partition("%")[0])):
            if self.own_machine and ip.is_loopback:
                continue
            if any(ip in network for network in self.networks):
                continue
            named = any(_matches(host, pattern) for pattern in self.hosts)
            if (self.hosts or self.networks) and not named:
                raise WebhookError("the controller may not call its host (--webhook-to)")
            if not _is_public(ip) and not (named and _is_internal(ip)):
                raise WebhookError(
                    "its host has an address inside the cluster or machine, which is not called. FIX: an"
                    " administrator can allow it (elasticctl install --webhook-to)"
                )


EVERY_PUBLIC_HOST = WebhookRules()


@dataclass(frozen=True, slots=True)
class Answer:
    """A receiver's response; `retry_after_s` is how long it asks to wait."""

    status: int
    retry_after_s: float


class NoAnswer(Exception):
    """The receiver did not answer; the message contains no secret."""


class WebhookClient:
    """Sends messages to webhooks. Blocking calls run in threads, and each project has a share of these. Not
    thread-safe."""

    def __init__(self, rules: WebhookRules, answer_s: float) -> None:
        self._rules, self._answer_s = rules, answer_s
        self._threads = ThreadPoolExecutor(THREADS, "notify")
        self._shares = WeakValueDictionary[str, asyncio.Semaphore]()  # by project, while it has a call under way

    def close(self) -> None:
        """Take no more calls."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, project: str, function: Callable[..., T], *args: object) -> T:
        """Run a function that may block in a thread of the project's share, which it occupies until it has ended."""
        share = self._shares.setdefault(project, asyncio.Semaphore(LOOKUPS))
        await share.acquire()
        try:
            running = asyncio.get_running_loop().run_in_executor(self._threads, function, *args)
        except BaseException:
            share.release()
            raise

        def ended(future: asyncio.Future[T]) -> None:
            share.release()
            if not future.cancelled():
                future.exception()  # the caller may no longer wait for it

        running.add_done_callback(ended)
        return await asyncio.shield(running)

    async def post(self, project: str, url: str, message: bytes, headers: Mapping[str, str]) -> Answer:
        """Send one message. Raises NoAnswer, or WebhookError if the URL may not be called."""
        host = urlsplit(url).hostname or ""
        if not host.isascii():  # aiohttp folds such letters, and takes the result for an address that needs no lookup
            raise WebhookError("its host has non-ASCII letters. FIX: write it as xn--...")
        if _is_address(host):  # it will not be resolved
            self._rules.check(host, host)
        proxy = _proxy_for(url, host)
        resolver = None if proxy else _CheckedResolver(self._rules, lambda *args: self.run(project, *args))
        try:
            async with (
                aiohttp.ClientSession(
                    timeout=aiohttp.ClientTimeout(total=self._answer_s),
                    connector=aiohttp.TCPConnector(resolver=resolver),
                ) as session,
                session.post(url, data=message, headers=headers, allow_redirects=False, proxy=proxy) as response,
            ):
                asked = response.headers.get("Retry-After", "")
                return Answer(response.status, float(asked) if asked.isascii() and asked.isdigit() else 0.0)
        except TimeoutError:
            raise NoAnswer(f"no answer within {self._answer_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as e:
            raise NoAnswer(f"no connection ({type(e).__name__})") from None  # its text may hold the URL


class _CheckedResolver(AbstractResolver):
    """Resolves a name to addresses that may be called: the connection goes to one of these, even if DNS has changed by
    then."""

    def __init__(self, rules: WebhookRules, run: Callable[..., Awaitable[Any]]) -> None:
        self._rules, self._run = rules, run

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._run(lambda: socket.getaddrinfo(host, port, family, socket.SOCK_STREAM))
        results: list[ResolveResult] = []
        for kind, _, protocol, _, address in found:
            self._rules.check(host, str(address[0]))  # one that may not be called makes the whole name unusable
            results.append(
                ResolveResult(
                    hostname=host,
                    host=str(address[0]),
                    port=int(address[1]),
                    family=kind,
                    proto=protocol,
                    flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
                )
            )
        return results

    async def close(self) -> None:
        return


def _proxy_for(url: str, host: str) -> str | None:
    """The proxy that the environment names for a URL, which then decides what can be reached; None if there is none."""
    return None if proxy_bypass(host) else getproxies_environment().get(urlsplit(url).scheme)


def _meanings(ip: Address) -> tuple[Address, ...]:
    """The address, and the IPv4 address that an IPv6 address stands for, if it does."""
    if isinstance(ip, ipaddress.IPv4Address):
        return (ip,)
    inner = [ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())]
    if ip in _NAT64:
        inner.append(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
    found = tuple(one for one in inner if one is not None)
    return found if ip.ipv4_mapped is not None or ip in _NAT64 else (ip, *found)


def _is_public(ip: Address) -> bool:
    special = ip.is_multicast or ip.is_reserved or any(ip in network for network in _NOT_PUBLIC)
    return ip.is_global and not special and str(ip) not in _METADATA


def _is_internal(ip: Address) -> bool:
    """Is it the address of another machine in a private network that is no metadata service?"""
    own = ip.is_loopback or ip.is_link_local or ip.is_unspecified
    return ip.is_private and not own and str(ip) not in _METADATA


def _matches(host: str, pattern: str) -> bool:
    host = host.lower().rstrip(".")
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True


def _is_network(text: str) -> bool:
    return "/" in text or _is_address(text)
