// Machines in use: what each worker uses of its own, and each of its GPUs, as launchers measure it.

import { remember, route } from "./address.js";
import { el, say, show, table } from "./dom.js";
import { clock } from "./words.js";

export class Machines {
  #shown = "";

  constructor() {
    this.summary = el("p");
    this.at = el("p", { class: "muted small-note" });
    this.each = el("button", { type: "button", onclick: () => this.#toggle() }, "Each GPU");
    this.tools = el("div", { class: "machine-tools" }, this.each);
    this.place = el("div");
    this.notes = el("p", { class: "muted small-note" });
    this.nodes = [this.summary, this.at, this.tools, this.place, this.notes];
  }

  /** Show what the server has told of a job. */
  update({ machines }) {
    this.machines = machines;
    const some = machines !== null;
    for (const node of [this.at, this.tools, this.place, this.notes]) show(node, some);
    say(this.summary, some ? machines.summary : "Nothing is measured yet: workers begin once they run.");
    if (some) this.#fill();
  }

  #fill() {
    const { at, uses, absent, unshown, workers } = this.machines;
    const eachGpu = route().settings.get("gpus") === "each";
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
