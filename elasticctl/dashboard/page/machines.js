// Machines in use: what each worker uses of its own, and each of its GPUs, as launchers measure it; and what all used before.

import { remember, route } from "./route.js";
import { el, say, show, table } from "./dom.js";
import { ended } from "./list.js";
import { UsageCharts } from "./usage.js";
import { clock } from "./format.js";

export class Machines {
  #shown = "";

  /** `on`: zoom(part) and pick(moment), as of a `Chart`. */
  constructor(on) {
    this.summary = el("p");
    this.steps = el("p", { class: "step-times" });
    this.at = el("p", { class: "muted small-note" });
    this.each = el("button", { type: "button", onclick: () => this.#toggle() }, "Each GPU");
    this.tools = el("div", { class: "machine-tools" }, this.each);
    this.place = el("div");
    this.notes = el("p", { class: "muted small-note" });
    this.charts = new UsageCharts(on);
    this.nodes = [this.summary, this.steps, this.at, this.tools, this.place, this.notes, ...this.charts.nodes];
  }

  /** Show what the server has told of a job, and the course of it in `view`. */
  update(known, view) {
    const { machines, job } = known;
    this.machines = machines;
    const some = machines !== null;
    for (const node of [this.steps, this.at, this.tools, this.place, this.notes]) show(node, some);
    const none = ended(job) ? "The job has ended: nothing is in use any more." : "Nothing is measured yet: workers begin once they run.";
    say(this.summary, some ? machines.summary : none);
    if (some) this.#fill();
    this.draw(known, view);
  }

  draw(known, view) {
    this.charts.update(known, view);
  }

  #fill() {
    const { at, uses, absent, unshown, workers } = this.machines;
    const eachGpu = route().settings.get("gpus") === "each";
    say(this.steps, `Where the time of the steps goes: ${this.machines.stepTimes}`);
    say(this.at, at === null ? "" : `Measured at ${clock(at)}, every ten seconds`);
    say(this.notes, [absent, unshown].filter(Boolean).join(" "));
    show(this.notes, Boolean(this.notes.textContent));
    show(this.tools, workers.some(({ gpus }) => gpus.length > 1));
    this.each.setAttribute("aria-pressed", String(eachGpu));
    const columns = uses.map((title, i) => [title, i]).filter(([, i]) => workers.some(({ words }) => words[i]));
    const hasNotes = workers.some(({ note }) => note);
    this.#table([...(hasNotes ? [["Note", "wide"]] : []), ...columns.map(([title]) => [title, ""])]);
    const row = (name, { words, parts }, note, unknown) =>
      [name, ...(hasNotes ? [note] : []), ...columns.map(([, i]) => ({ text: words[i] || unknown, part: parts[i] ?? null }))];
    this.table.fill(workers.flatMap((worker) => [
      row(worker.name, worker, worker.note, "–"),
      ...(eachGpu ? worker.gpus.map((gpu, number) => row(`\u2003GPU ${number}`, gpu, "", "")) : []),
    ]));
  }

  /** A table with the columns of what is known of any worker. */
  #table(columns) {
    if (this.#shown === columns.join()) return;
    this.#shown = columns.join();
    this.table = table("Machines in use", [["Worker", ""], ...columns]);
    this.place.replaceChildren(this.table.node);
  }

  #toggle() {
    remember({ gpus: route().settings.get("gpus") === "each" ? null : "each" });
    this.#fill();
  }
}
