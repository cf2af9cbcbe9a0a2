"""A browser that opens pages of a dashboard: a visitor, assertions that wait, and what pages must not show."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

from elasticctl.cluster.base import Cluster
from elasticctl.dashboard import feed
from elasticctl.dashboard.server import Dashboard
from elasticctl.dashboard.user_api import Scope
from elasticctl.settings.contexts import Context
from tests.support.dashboard.serving import Host, running

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request


class Visitor:
    """Opens pages in browsers that know nothing, and keeps what they complain of."""

    def __init__(self, chromium: Browser) -> None:
        self._chromium = chromium
        self._contexts: list[BrowserContext] = []
        self.complaints: list[str] = []
        self._requests: list[str] = []

    def __enter__(self) -> Visitor:
        return self

    def __exit__(self, *_: object) -> None:
        print("the last requests:", *self._requests[-30:], sep="\n")  # pytest shows it of a test that fails
        for context in self._contexts:
            context.close()

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False, scale: float = 1) -> Page:
        """A page in a window of so many pixels."""
        context = self._chromium.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            device_scale_factor=scale,
            reduced_motion="reduce",
        )
        self._contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", self._note)
        for kind in ("request", "requestfinished", "requestfailed"):
            page.on(kind, functools.partial(self._note_request, kind))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.goto(url)
        return page

    def _note_request(self, kind: str, request: Request) -> None:
        self._requests.append(f"{kind} {request.method} {request.url} {request.failure or ''}")

    def _note(self, message: ConsoleMessage) -> None:
        """Answers that say no are the business of the tests; what scripts or the content policy complain of is not."""
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)


@contextmanager
def hosted(cluster: Any, namespace: str | None = "default", access: Callable[[], Any] | None = None) -> Iterator[Host]:
    """A dashboard of `cluster`, which is looked at every tenth of a second, by a link that lets in."""
    place = Scope(cast(Cluster, cluster), Context("local", "local"), namespace, access)
    dashboard = Dashboard(place, poll_s=0.1)
    # A machine that is busy is no slow cluster, which would be polled only once a minute.
    with mock.patch.object(feed, "SHARE", 1.0), running(dashboard) as host:
        yield Host(host.link + dashboard.gate.issue(), host.cut)


CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")


FLAGS = (
    "--no-sandbox",  # which does not work as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

PATIENCE_MS = 240_000
"""How long anything on a page may take on a busy machine."""
MARKUP = "<img src=x onerror=\"document.title='hit'\"><b>bold</b>"
"""What a job might say of itself, to be shown as it stands."""


def see(found: Locator | Page) -> Any:
    """Playwright's assertions, which wait."""
    from playwright.sync_api import expect

    expect.set_options(timeout=PATIENCE_MS)
    return expect(found)  # type: ignore[arg-type]


RULES = "['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice']"
FOUND = f"""async () => (await axe.run({{ runOnly: {RULES} }})).violations
  .flatMap(({{ id, nodes }}) => nodes.map((node) => `${{id}}: ${{node.target}} ${{node.failureSummary}}`))"""
"""What axe-core finds on a page, once its script has been run there."""

PIXELS = """(shown, width) => {
  const copy = Object.assign(document.createElement("canvas"), { width: shown.width, height: shown.height });
  const context = copy.getContext("2d", { willReadFrequently: true });
  context.drawImage(shown, 0, 0);
  return context.getImageData(0, 0, width, copy.height).data;
}"""
"""The left part of a canvas that is shown, read from a copy: of one that is drawn in, Chromium warns."""
