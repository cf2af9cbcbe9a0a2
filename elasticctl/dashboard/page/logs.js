// What the workers of a job print: live, around a moment, or the lines that have a text.

import { remember, route } from "./address.js";
import { coloured } from "./ansi.js";
import { el, keyed, say, show } from "./dom.js";
import { logs } from "./feed.js";
import { clock } from "./words.js";

const LIVE_MS = 2000;
const TYPING_MS = 300;
const AROUND_S = 5;
const BACK_S = 60;
const MAX_LINES = 3000; // more are in the storage, but not in the page
const NEAR_END_PX = 40;

export class Logs {
  #job = null;
  #workers = [];
  #lines = [];
  #mode = "live"; // or "around" a moment, or "found" by a text
  #asked = 0;
  #timer = 0;
  #busy = false;

  /** `onMoment(at)` is called when somebody wants to see the moment of a line in the curves. */
  constructor(onMoment) {
    this.onMoment = onMoment;
    this.toggle = el("button", { type: "button", "aria-expanded": "false", onclick: () => this.#turn() }, "Show the log");
    this.worker = el("select", { "aria-label": "Whose lines", onchange: () => this.#start() });
    this.find = el("input", { type: "search", placeholder: "Find in the log", "aria-label": "Find in the log", spellcheck: "false",
      autocomplete: "off", oninput: () => this.#later(() => this.#start(), TYPING_MS) });
    this.live = el("button", { type: "button", onclick: () => this.#start() }, "Live");
    this.earlier = el("button", { type: "button", onclick: () => this.#earlier() }, "Earlier");
    this.later = el("button", { type: "button", onclick: () => this.#more() }, "Later");
    this.state = el("span", { class: "muted", role: "status" });
    this.list = el("ol", { class: "lines", tabindex: "0", "aria-label": "Lines of the log" });
    this.body = el("div", { hidden: true },
      el("div", { class: "log-tools" }, this.worker, this.find, this.earlier, this.later, this.live, this.state), this.list);
    this.nodes = [this.toggle, this.body];
    document.addEventListener("visibilitychange", () => this.#schedule());
  }

  get #isOpen() {
    return !this.body.hidden;
  }

  /** Show the lines of this job. */
  update({ job, workersEver }) {
    const another = this.#job?.uid !== job.uid;
    this.#job = job;
    this.#workers = workersEver;
    keyed(this.worker, ["", ...workersEver], (name) => name, (name) => el("option", { value: name }, name || "All workers"), () => {});
    if (!another) return;
    this.find.value = "";
    this.worker.value = "";
    this.#open(route().settings.has("log"));
  }

  /** Show what was printed around a moment. */
  showAt(at) {
    show(this.body, true);
    this.#told();
    remember({ log: "1" });
    this.find.value = "";
    this.#mode = "around";
    this.#fetch({ since: at - AROUND_S, all: 1 }, (told) => {
      this.#replace(told);
      const first = [...this.list.children].find((line) => line.at >= at) ?? this.list.lastElementChild;
      first?.classList.add("here");
      first?.scrollIntoView({ block: "center" });
    });
    this.list.scrollIntoView({ block: "nearest" });
  }

  #turn() {
    this.#open(!this.#isOpen);
    this.body.scrollIntoView({ block: "nearest" });
  }

  #open(wanted) {
    show(this.body, wanted);
    this.#told();
    remember({ log: wanted ? "1" : null });
    clearTimeout(this.#timer);
    if (wanted) this.#start();
  }

  #told() {
    this.toggle.setAttribute("aria-expanded", String(this.#isOpen));
    say(this.toggle, this.#isOpen ? "Hide the log" : "Show the log");
  }

  #later(act, ms) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(act, ms);
  }

  /** From the newest lines on; with a text, all that have it. */
  #start() {
    this.#mode = this.find.value.trim() ? "found" : "live";
    this.#fetch(this.#mode === "found" ? { find: this.find.value.trim(), all: 1 } : {}, (told) => {
      this.#replace(told);
      this.list.scrollTop = this.list.scrollHeight;
    });
  }

  #earlier() {
    const first = this.#lines[0]?.at ?? Date.now() / 1000;
    this.#mode = "around";
    this.#fetch({ since: first - BACK_S * 2 ** this.#reach, until: first - 1e-6, all: 1 }, (told) => {
      this.#reach = told.lines.length ? 0 : this.#reach + 2;
      const height = this.list.scrollHeight;
      this.#lines = [...told.lines.map(read), ...this.#lines].slice(0, MAX_LINES);
      this.#draw();
      this.list.scrollTop += this.list.scrollHeight - height;
      say(this.state, told.lines.length ? this.#words(false) : "Nothing in that time: press again to look further back");
    });
  }

  #reach = 0;

  /** What comes after the last line. */
  #more() {
    const since = this.#lines.at(-1)?.at;
    if (since === undefined) {
      this.#start();
      return;
    }
    const atEnd = this.list.scrollHeight - this.list.scrollTop - this.list.clientHeight < NEAR_END_PX;
    this.#fetch({ since, ...(this.#mode === "around" && { all: 1 }) }, (told) => {
      const known = new Set(this.#lines.filter(({ at }) => at >= since).map(({ key }) => key));
      const added = told.lines.map(read).filter(({ key }) => !known.has(key));
      if (added.length) {
        this.#lines = [...this.#lines, ...added].slice(-MAX_LINES);
        this.#draw();
      }
      if (atEnd || this.#mode === "around") this.list.scrollTop = this.list.scrollHeight;
      say(this.state, this.#words(told.more));
    });
  }

  async #fetch(query, use) {
    this.#asked += 1;
    const [mine, job] = [this.#asked, this.#job];
    clearTimeout(this.#timer);
    try {
      const told = await logs(job, { ...query, ...(this.worker.value && { worker: this.worker.value }) });
      if (mine !== this.#asked || this.#job.uid !== job.uid) return;
      if (told) use(told);
    } catch (error) {
      if (mine === this.#asked) say(this.state, error.message);
    }
    if (mine === this.#asked) this.#schedule();
  }

  #schedule() {
    clearTimeout(this.#timer);
    if (this.#isOpen && this.#mode === "live" && !document.hidden) this.#later(() => this.#more(), LIVE_MS);
  }

  #replace(told) {
    this.#reach = 0;
    this.#lines = told.lines.map(read);
    this.#draw();
    say(this.state, this.#words(told.more));
  }

  #words(more) {
    if (!this.#lines.length) return this.#mode === "found" ? "No line has this text" : "Nothing has been printed";
    const lines = `${this.#lines.length.toLocaleString("en")} line${this.#lines.length === 1 ? "" : "s"}`;
    if (this.#mode === "found") return more ? `The last ${lines} with this text` : `${lines} with this text`;
    return this.#mode === "live" ? `Live, ${lines}` : `${lines}${more ? ", and more later" : ""}`;
  }

  #draw() {
    const several = this.#workers.length > 1 && !this.worker.value;
    const prefix = `${this.#job.name}-`;
    this.live.setAttribute("aria-pressed", String(this.#mode === "live"));
    keyed(this.list, this.#lines, ({ id }) => id, (line) => {
      const when = el("button", { type: "button", title: "Show in the curves", onclick: () => this.onMoment(line.at) }, clock(line.at));
      const made = el("li", {}, when, several ? el("span", { class: "who" }, line.worker.replace(prefix, "")) : "", coloured(line.text));
      made.at = line.at;
      return made;
    }, () => {});
  }
}

let numbered = 0;

/** A line; `key` tells it from others at the edge of what was read, `id` from all. */
const read = ([worker, at, text]) => ({ worker, at, text, key: `${at} ${worker} ${text}`, id: numbered++ });
