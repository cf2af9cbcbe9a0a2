// Projects: who holds what of what is shared, as bars and in words; who waits for whom, and why.

import { el, keyed, say, show } from "./dom.js";
import { href } from "./list.js";
import { count, plural } from "./format.js";

const PARTS = [["own", "held by right"], ["lent", "borrowed"], ["unused", "guaranteed, not used"], ["limit", "limit"]];
const NOTHING = "No project has a quota, and no jobs share this cluster.";

const atLeast = (number) => Math.max(0, number);

/** "1 job waits", "2 jobs wait". */
export const waits = (number) => `${plural(number, "job")} ${number === 1 ? "waits" : "wait"}`;

/** How many jobs have nothing, of what the server has told. */
export const waiting = (projects) => projects.waiting.jobs.length + projects.waiting.more;

export class ProjectsView {
  /** `place` is where it is put, hidden; `known(namespace, name)` says whether the page has that job. */
  constructor(place, known) {
    this.known = known;
    this.notes = el("div", { class: "notes" });
    this.pools = el("div", { class: "pools" });
    this.nothing = el("p", { class: "muted why", hidden: true });
    this.key = el("p", { class: "swatches muted" }, ...PARTS.map(([kind, words]) =>
      el("span", {}, el("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), words)));
    this.lists = {
      waiting: sentences("waiting", "Waiting"),
      running: sentences("running", "What each job has, and why not more"),
    };
    this.body = el(
      "article",
      { class: "projects", hidden: true },
      el("header", { class: "head" },
        el("a", { class: "back", href: "#/" }, "‹ All jobs"),
        el("div", { class: "titles" }, el("h2", {}, "Projects"), el("span", { class: "muted" }, "A project is a namespace."))),
      this.notes,
      this.nothing,
      this.key,
      this.lists.waiting.node,
      this.pools,
      this.lists.running.node,
    );
    place.append(this.body);
  }

  hide() {
    show(this.body, false);
  }

  /** Show what the server has told; null: nothing yet, and `why` says what it waits for. */
  update(projects, why) {
    const pools = projects?.pools ?? [];
    show(this.body, true);
    show(this.nothing, pools.length === 0);
    say(this.nothing, projects === null ? why : NOTHING);
    show(this.key, pools.length > 0);
    keyed(this.notes, pools.length ? projects.notes : [], (note) => note, () => el("div", { class: "finding info" }, el("p")),
      (node, note) => say(node.firstElementChild, note));
    keyed(this.pools, pools, (pool) => pool.pool, makePool, (node, pool) => fillPool(node, pool));
    for (const [kind, list] of Object.entries(this.lists)) this.#list(list, projects?.[kind] ?? { jobs: [], more: 0 });
  }

  #list({ node, items, more }, { jobs, more: others }) {
    show(node, jobs.length > 0);
    const key = (item) => `${this.known(item.project, item.job)} ${item.project}/${item.job}`;
    keyed(items, jobs, key, (item) => this.#sentence(item), (child, item) => {
      const last = item.change ? ` Last change: ${item.change}.` : "";
      say(child.lastElementChild, ` ${item.message}.${last}`);
    });
    say(more, others ? `and ${plural(others, "other job")}` : "");
  }

  #sentence({ project, job }) {
    const name = `${project}/${job}`;
    const here = this.known(project, job);
    return el("li", {}, here ? el("a", { href: href({ namespace: project, name: job }) }, name) : el("b", {}, name), el("span"));
  }
}

function sentences(kind, title) {
  const heading = el("h3", { id: `projects-${kind}` }, title);
  const items = el("ul", { class: "sentences" });
  const more = el("p", { class: "muted" });
  return { node: el("section", { class: `card ${kind}`, "aria-labelledby": heading.id, hidden: true }, heading, items, more), items, more };
}

let made = 0;

function makePool({ pool }) {
  made += 1; // a pool may be called anything, an id may not
  const parts = { heading: el("h3", { id: `pool-${made}` }, pool), total: el("p", { class: "muted" }), rows: el("ul", { class: "parts" }), more: el("p", { class: "muted" }) };
  const section = el("section", { class: "card pool", "aria-labelledby": parts.heading.id },
    el("div", { class: "line" }, parts.heading, parts.total), parts.rows, parts.more);
  section.parts = parts;
  return section;
}

function fillPool({ parts }, pool) {
  const held = pool.slots === undefined ? `${plural(pool.held, pool.unit)} held` : `${count(pool.held)} of ${plural(pool.slots, pool.unit)} held`;
  say(parts.total, pool.free === undefined ? held : `${held} · ${count(pool.free)} free`);
  keyed(parts.rows, pool.projects, (row) => row.project, makeRow, (node, row) => fillRow(node, row, pool.scale));
  say(parts.more, pool.more ? `and ${plural(pool.more, "other project")}` : "");
}

/** The words say all that the bar shows, which nobody has to see. */
function makeRow({ project }) {
  const words = el("span", { class: "muted" });
  const bars = Object.fromEntries(PARTS.map(([kind]) => [kind, el("span", { class: kind })]));
  const item = el("li", {}, el("b", {}, project), words, el("span", { class: "meter", "aria-hidden": "true" }, ...Object.values(bars)));
  item.parts = { words, bars };
  return item;
}

function fillRow({ parts: { words, bars } }, row, scale) {
  say(words, inWords(row));
  const part = (slots) => (scale ? 100 * Math.min(1, atLeast(slots) / scale) : 0);
  const sizes = { own: row.held - row.borrowed, lent: row.borrowed, unused: row.unused };
  for (const [kind, slots] of Object.entries(sizes)) {
    show(bars[kind], slots > 0);
    bars[kind].style.width = `${part(slots)}%`;
  }
  show(bars.limit, row.limit !== undefined && row.limit <= scale);
  bars.limit.style.left = `${part(row.limit ?? 0)}%`;
}

function inWords(row) {
  const unused = row.unused ? ` (${count(row.unused)} of them not used)` : "";
  return [
    `${count(row.held)} held`,
    row.guaranteed ? `${count(row.guaranteed)} guaranteed${unused}` : "",
    row.borrowed ? `${count(row.borrowed)} borrowed` : "",
    row.limit === undefined ? "" : `limit ${count(row.limit)}`,
    row.weight === 1 ? "" : `weight ${row.weight}`,
    row.waiting ? waits(row.waiting) : "",
  ].filter(Boolean).join(" · ");
}
