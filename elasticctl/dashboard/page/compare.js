// How another run differs from this one: what `elasticctl compare` prints, fetched when somebody asks.

import { el, say, show, table } from "./dom.js";
import { compare } from "./feed.js";
import { plural } from "./format.js";

const KINDS = { "+": "added", "-": "removed" };

export class Differences {
  #asked = 0;
  #shown = "";

  constructor() {
    this.state = el("p", { class: "muted", role: "status" });
    this.table = el("div");
    this.code = el("pre", { class: "stacks", tabindex: "0", role: "region", "aria-label": "How the code differs" });
    this.node = el("div", { class: "differences", hidden: true }, this.state, this.table, this.code);
  }

  /** Show how `other` differs from `job`; null: nothing. */
  async update(job, other) {
    const wanted = other === null ? "" : `${job.uid} ${other.uid}`;
    if (this.#shown === wanted) return;
    this.#shown = wanted;
    this.#asked += 1;
    const mine = this.#asked;
    show(this.node, other !== null);
    this.#tell("Comparing", null);
    if (other === null) return;
    try {
      const told = await compare(job, other);
      if (mine === this.#asked) this.#tell(words(told), told, [job.name, other.name]);
    } catch (error) {
      if (mine === this.#asked) this.#tell(error.message, null);
    }
  }

  #tell(state, told, names) {
    say(this.state, state);
    this.table.replaceChildren();
    show(this.code, Boolean(told?.lines.length));
    if (told === null) return;
    const rows = table("How the runs differ", [["What", ""], ...names.map((name) => [name, "wide"])]);
    rows.fill(told.rows.map(([name, ...values]) => [name, ...values.map((value) => value || "–")]));
    this.table.append(rows.node);
    this.code.replaceChildren(...told.lines.map((line) => el("span", { class: KINDS[line[0]] ?? null }, `${line}\n`)));
  }
}

function words({ code, more, troubles }) {
  return [`Code: ${code}`, more && `${plural(more, "line")} more are left out`, ...troubles].filter(Boolean).join("; ");
}
