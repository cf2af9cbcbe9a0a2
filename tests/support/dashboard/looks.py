"""What the tests of the page look with: assertions that wait, and what nobody should see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
