// What all workers of a job used of their machines over time, and where the time of its steps went: charts, and a table.

import { Chart, nearest } from "./charts.js";
import { marks } from "./series.js";
import { el, keyed, show, table } from "./dom.js";
import { bytes, clock, number } from "./format.js";

const GIB = 2 ** 30;
const percent = (share) => `${Math.round(100 * share)}%`;
const rate = (bytesPerS) => `${number(bytesPerS / 1e6)} MB/s`;

/** [column, its title in the table, how a value is said]. */
const COLUMNS = [
  ["cpusUsed", "CPU", number], ["memoryBytes", "Memory", bytes], ["gpuPercent", "GPU", (value) => `${Math.round(value)}%`],
  ["gpuMemoryBytes", "GPU memory", bytes], ["powerW", "Power", (watts) => `${number(watts)} W`],
  ["receivedBytesPerS", "Received", rate], ["sentBytesPerS", "Sent", rate],
  ["data", "Data", percent], ["compute", "Compute", percent], ["allReduce", "All-reduce", percent], ["save", "Save", percent],
];
const SAID = Object.fromEntries(COLUMNS.map(([name, ...rest]) => [name, rest]));

const TIMES = ["data", "compute", "allReduce", "save"];

/** A chart each: its title, its columns, and what a value is divided by to be drawn. */
const CHARTS = [
  ["Processors in use", ["cpusUsed"], 1], ["Memory, GiB", ["memoryBytes"], GIB], ["GPUs, % of the time at work", ["gpuPercent"], 1],
  ["Network, MB/s", ["receivedBytesPerS", "sentBytesPerS"], 1e6],
  ["Where the time of the steps goes, %", TIMES, 0.01],
];
const LINES = [
  { colour: "accent", width: 1.75 }, { colour: "run-1", width: 1.75, dash: [8, 4] },
  { colour: "run-2", width: 1.75, dash: [2, 3] }, { colour: "run-3", width: 1.75, dash: [8, 3, 2, 3] },
];
const FAR_S = 60; // a line does not go through a longer time in which nothing was measured

const KEPT = "Of all workers together, at about 120 moments of the whole job; each value is the mean over ten seconds. "
  + "What was between those moments, and what single workers used, is not kept.";

export class UsageCharts {
  #charts = new Map();
  #shown = "";
  #known = null;

  constructor(on) {
    this.on = on;
    this.place = el("div", { class: "use-charts" });
    this.note = el("p", { class: "muted small-note" }, KEPT);
    this.values = el("div");
    this.details = el("details", { class: "values" }, el("summary", {}, "Use over time as a table"), this.values);
    this.details.addEventListener("toggle", () => this.#fill());
    this.key = el("p", { class: "plan-key muted" }, ...TIMES.map((name, i) =>
      el("span", {}, el("span", { class: `line-of use-${i}`, "aria-hidden": "true" }), SAID[name][0].toLowerCase())));
    this.nodes = [this.place, this.key, this.note, this.details];
  }

  /** Draw the part `view` of what is known. */
  update(known, view) {
    this.#known = known;
    const { at, columns } = known.machinesHistory;
    const some = at.length > 1;
    for (const node of [this.place, this.note, this.details]) show(node, some);
    show(this.key, some && TIMES.some((name) => columns[name]));
    const drawn = some ? CHARTS.filter(([, names]) => names.some((name) => columns[name])) : [];
    keyed(this.place, drawn, ([title]) => title, ([title]) => this.#chart(title).node,
      (_, item) => this.#draw(item, view, item === drawn.at(-1)));
    this.#fill();
  }

  #chart(title) {
    if (!this.#charts.has(title)) this.#charts.set(title, new Chart({ fromZero: true }, this.on));
    return this.#charts.get(title);
  }

  #draw([title, names, unit], range, isLast) {
    const { at, columns } = this.#known.machinesHistory;
    const known = names.filter((name) => columns[name]);
    const cuts = gaps(at);
    const x = at.flatMap((moment, i) => (cuts.has(i) ? [(at[i - 1] + moment) / 2, moment] : [moment]));
    const values = known.map((name) => columns[name].flatMap((value, i) => {
      const drawn = value === null ? null : value / unit;
      return cuts.has(i) ? [null, drawn] : [drawn];
    }));
    const said = (i) => known.map((name) => {
      const value = columns[name][i];
      const words = value === null ? "–" : SAID[name][1](value);
      return known.length > 1 ? `${SAID[name][0].toLowerCase()} ${words}` : words;
    }).join(" · ");
    const words = (moment) => (moment === null ? said(at.length - 1) : `${clock(moment)}  ${said(nearest(at, moment))}`);
    this.#chart(title).update(title, {
      over: "time", range, marks: marks(this.#known), axis: isLast, x, columns: values,
      lines: known.map((name) => LINES[names.indexOf(name)]), moments: at, words, label: `${title}: ${words(null)} at ${clock(at.at(-1))}`,
    });
  }

  /** The newest first; made only for somebody who has opened it. */
  #fill() {
    if (!this.details.open || this.#known === null) return;
    const { at, columns } = this.#known.machinesHistory;
    const known = COLUMNS.filter(([name]) => columns[name]);
    if (this.#shown !== known.join()) {
      this.#shown = known.join();
      this.table = table("Use over time", [["When", ""], ...known.map(([, title]) => [title, "number"])]);
      this.values.replaceChildren(this.table.node);
    }
    this.table.fill(at.map((moment, i) => [clock(moment), ...known.map(([name, , inWords]) => {
      const value = columns[name][i];
      return value === null ? "–" : inWords(value);
    })]).reverse());
  }
}

/** Before which moments nothing was measured for long. */
function gaps(at) {
  const apart = at.slice(1).map((moment, i) => moment - at[i]);
  const usual = [...apart].sort((one, other) => one - other)[apart.length >> 1] ?? 0;
  return new Set(apart.flatMap((span, i) => (span > Math.max(FAR_S, 4 * usual) ? [i + 1] : [])));
}
