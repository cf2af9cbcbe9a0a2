// Elements and their text. Strings become text and nothing else: what jobs say is never markup.

/** An element; children are elements or strings, attributes that are null or false are left out. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

export const byId = (id) => document.getElementById(id);

/** Change a text only where it is another one: what does not change does not move, nor is it read out again. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function show(node, wanted) {
  if (node.hidden === wanted) node.hidden = !wanted;
}

/** Make the children of `parent` fit `items`: those with the same key stay, in their new place, and are updated. */
export function keyed(parent, items, key, make, update) {
  const present = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let child = present.get(name);
    present.delete(name);
    if (!child) {
      child = make(item);
      child.dataset.key = name;
    }
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
    update(child, item);
  }
  for (const child of present.values()) child.remove();
}

/** A command to type, and a button that copies it. */
export function command(text) {
  const copy = el("button", { type: "button", class: "copy", "aria-label": `Copy: ${text}`, title: "Copy" }, "copy");
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      say(copy, "copied");
    } catch {
      say(copy, "not allowed");
    }
    setTimeout(() => say(copy, "copy"), 1500);
  });
  return el("span", { class: "command" }, el("code", {}, text), copy);
}

function fillCell(node, cell) {
  say(node, cell.text ?? cell);
  const isBar = (cell.part ?? null) !== null;
  node.classList.toggle("filled", isBar);
  if (isBar) node.style.setProperty("--part", cell.part);
}

/** A table with a head; `columns` are [title, class or ""]. A cell is a text, or { text, part }: how full a bar below it is, or null. */
export function table(caption, columns) {
  const body = el("tbody");
  const head = el("tr", {}, ...columns.map(([title, kind]) => el("th", { scope: "col", class: kind || null }, title)));
  const whole = el("table", {}, el("caption", { class: "unseen" }, caption), el("thead", {}, head), body);
  const fill = (rows) =>
    keyed(
      body,
      rows.map((cells, position) => ({ cells, position })),
      (row) => row.position,
      () => el("tr", {}, ...columns.map(([, kind]) => el("td", { class: kind || null }))),
      (child, row) => row.cells.forEach((cell, column) => fillCell(child.children[column], cell)),
    );
  return { node: el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${caption}, as a table` }, whole), fill };
}
