// Where the ranks of a job are, by a button: it looks into every worker, so nobody is asked before somebody wants it.

import { el, say, show } from "./dom.js";
import { clock, plural } from "./format.js";

export class Stacks {
  #job = null;

  /** `read(job)` answers with { lines, more, troubles }. */
  constructor(read) {
    this.read = read;
    this.button = el("button", { type: "button", onclick: () => this.#look() }, "Stacks of all ranks");
    this.state = el("span", { class: "muted", role: "status" });
    this.lines = el("pre", { class: "stacks", tabindex: "0", role: "region", "aria-label": "Stacks of all ranks" });
    this.node = el("div", { class: "stack-tools" }, this.button, this.state, this.lines);
  }

  update({ job }, over) {
    show(this.node, !over && job.active > 0);
    if (this.#job?.uid !== job.uid) this.#print([], "");
    this.#job = job;
  }

  async #look() {
    const job = this.#job;
    this.button.disabled = true;
    this.#print([], "Looking into the workers");
    let [lines, words] = [[], ""];
    try {
      const told = await this.read(job);
      lines = told.lines;
      words = [`as of ${clock(Date.now() / 1000)}`, told.more && `${plural(told.more, "line")} more are left out`, ...told.troubles]
        .filter(Boolean).join("; ");
    } catch (error) {
      words = error.message;
    }
    this.button.disabled = false;
    if (this.#job.uid === job.uid) this.#print(lines, words);
  }

  #print(lines, words) {
    say(this.lines, lines.join("\n"));
    show(this.lines, lines.length > 0);
    say(this.state, words);
  }
}
