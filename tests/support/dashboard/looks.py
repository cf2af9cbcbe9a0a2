"""What the tests of the page look with: assertions that wait, and what nobody should see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

PATIENCE_MS = 60_000
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

FAINT = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const over = (top, under) => top.slice(0, 3).map((part, i) => part * (top[3] ?? 1) + under[i] * (1 - (top[3] ?? 1)));
  const light = (colour) => colour.slice(0, 3).map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    const layers = [];
    for (let at = node; at; at = at.parentElement) layers.unshift(parse(getComputedStyle(at).backgroundColor));
    return layers.reduce((under, top) => over(top, under), [255, 255, 255]);
  };
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.checkVisibility() || node.closest(":disabled")) continue;
    const [text, under] = [light(parse(getComputedStyle(node).color)), light(ground(node))];
    const contrast = (Math.max(text, under) + 0.05) / (Math.min(text, under) + 0.05);
    if (contrast < 4.5) found.push(`${node.textContent.trim().slice(0, 40)}: ${contrast.toFixed(2)}`);
  }
  return found;
}"""
"""The texts that stand out from their ground by less than WCAG's AA asks for."""
