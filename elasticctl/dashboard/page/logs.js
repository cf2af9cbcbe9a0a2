// What the workers of a job print, or one of its ranks: live, around a moment, or the lines that have a text.

import { remember, route } from "./route.js";
import { coloured } from "./ansi.js";
import { el, keyed, say, show } from "./dom.js";
import { logs } from "./feed.js";
import { clock } from "./format.js";

const LIVE_MS = 2000;
const TYPING_MS = 300;
const AROUND_S = 5;
const [LEAST_BACK_S, MOST_BACK_S] = [0.05, 60];
const MAX_LINES = 20_000; // more are in the storage, but not in the page
const DRAWN = 800; // of them, around those that are seen: each costs the browser time
const SHIFT = 300;
const EDGE_PX = 200;
const NEAR_END_PX = 40;
const PAGE = 1000; // lines in an answer, at most
const RANK = "rank:"; // which is no part of a worker's name

export class Logs {
  #job = null;
  #workers = [];
  #lines = [];
  #mode = "live"; // or "around" a moment, or "found" by a text
  #from = 0; // the first that is drawn
  #noEarlier = false;
  #asked = 0;
  #timer = 0;
  #busy = false;
  #hasMore = false;

  /** `onMoment(at)` is called when somebody wants to see the moment of a line in the curves. */
  constructor(onMoment) {
    this.onMoment = onMoment;
    this.toggle = el("button", { type: "button", "aria-expanded": "false", onclick: () => this.#turn() }, "Show the log");
    this.worker = el("select", { "aria-label": "Whose lines", onchange: () => this.#start() });
    this.find = el("input", { type: "search", placeholder: "Find in the log", "aria-label": "Find in the log", spellcheck: "false",
      autocomplete: "off", oninput: () => this.#later(() => this.#start(), TYPING_MS) });
    this.begin = el("button", { type: "button", onclick: () => this.#begin() }, "First");
    this.live = el("button", { type: "button", onclick: () => this.#start() }, "Live");
    this.earlier = el("button", { type: "button", onclick: () => this.#earlier() }, "Earlier");
    this.later = el("button", { type: "button", onclick: () => this.#more() }, "Later");
    this.state = el("span", { class: "muted", role: "status" });
    this.list = el("ol", { class: "lines", tabindex: "0", "aria-label": "Lines of the log" });
    this.body = el("div", { hidden: true },
      el("div", { class: "log-tools" }, this.worker, this.find, this.begin, this.earlier, this.later, this.live, this.state), this.list);
    this.nodes = [this.toggle, this.body];
    this.list.addEventListener("scroll", () => this.#scrolled());
    document.addEventListener("visibilitychange", () => this.#schedule());
  }

  get #isOpen() {
    return !this.body.hidden;
  }

  /** Show the lines of this job. */
  update({ job, workersEver, ranks }) {
    const another = this.#job?.uid !== job.uid;
    this.#job = job;
    this.#workers = workersEver;
    if (document.activeElement !== this.worker) {
      const options = [["", "All workers"], ...workersEver.map((name) => [name, name]), ...Array.from({ length: ranks }, (_, rank) => [RANK + rank, `Rank ${rank}`])];
      keyed(this.worker, options, ([value]) => value, ([value, words]) => el("option", { value }, words), () => {});
    }
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
      const place = told.lines.findIndex(([, moment]) => moment >= at);
      this.#replace(told, place < 0 ? told.lines.length : place);
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
      this.#replace(told, told.lines.length);
      this.list.scrollTop = this.list.scrollHeight;
    });
  }

  /** From the first line on. */
  #begin() {
    this.#mode = "around";
    this.#fetch({ since: 0, all: 1 }, (told) => {
      this.#replace(told, 0);
      this.#noEarlier = true;
      this.list.scrollTop = 0;
    });
  }

  /** What is before the first line: as far back as these lines reach, and further each time that there is nothing. */
  #earlier() {
    const first = this.#lines[0]?.at ?? Date.now() / 1000;
    const span = Math.min(Math.max((this.#lines[PAGE - 1]?.at ?? Infinity) - first, LEAST_BACK_S), MOST_BACK_S);
    this.#mode = "around";
    this.#fetch({ since: first - span * 2 ** this.#reach, until: first, skip: this.#at(first), all: 1 }, (told) => {
      this.#reach = told.lines.length ? 0 : this.#reach + 2;
      this.#noEarlier = !told.lines.length;
      this.#lines = [...told.lines.map(read), ...this.#lines].slice(0, MAX_LINES);
      this.#from += told.lines.length;
      this.#drawFrom(this.#from - SHIFT, this.list.firstElementChild);
      say(this.state, told.lines.length ? this.#words(false) : "Nothing in that time: press again to look further back");
    });
  }

  #reach = 0;

  /** What comes after the last line; `follows`: and have it seen. */
  #more(follows = true) {
    const since = this.#lines.at(-1)?.at;
    if (since === undefined) {
      this.#start();
      return;
    }
    const atEnd = this.#below < NEAR_END_PX && this.#from + DRAWN >= this.#lines.length;
    const isLive = this.#mode === "live";
    if (isLive && !atEnd && this.#lines.length >= MAX_LINES) {
      say(this.state, "Live, and waiting while you read: go to the end to see what is new");
      this.#schedule();
      return;
    }
    this.#fetch({ since, skip: this.#at(since), ...(!isLive && { all: 1 }) }, (told) => {
      if (isLive && atEnd && told.more) {
        this.#start(); // more is printed than anybody reads: the newest is what is wanted
        return;
      }
      const added = told.lines.map(read);
      if (added.length) {
        const dropped = Math.max(0, this.#lines.length + added.length - MAX_LINES);
        this.#lines = [...this.#lines, ...added].slice(dropped);
        this.#from -= dropped;
        const toEnd = follows && (atEnd || !isLive);
        this.#drawFrom(toEnd ? this.#lines.length : this.#from + (follows ? 0 : SHIFT), this.list.lastElementChild);
        if (toEnd) this.list.scrollTop = this.list.scrollHeight;
      }
      say(this.state, this.#words(told.more));
    });
  }

  /** How many lines of a moment are here: that many need not come again. */
  #at(moment) {
    return this.#lines.reduce((sum, { at }) => sum + (at === moment), 0);
  }

  /** How much of the list is below what is seen. */
  get #below() {
    return this.list.scrollHeight - this.list.scrollTop - this.list.clientHeight;
  }

  /** Near an end of what is drawn, draw what is beyond; near an end of what is here, fetch it. */
  #scrolled() {
    const { scrollTop, firstElementChild, lastElementChild } = this.list;
    if (scrollTop < EDGE_PX && this.#from > 0) this.#drawFrom(this.#from - SHIFT, firstElementChild);
    else if (this.#below < EDGE_PX && this.#from + DRAWN < this.#lines.length) this.#drawFrom(this.#from + SHIFT, lastElementChild);
    else if (this.#mode !== "around" || this.#busy) return;
    else if (scrollTop < EDGE_PX && !this.#noEarlier) this.#earlier();
    else if (this.#below < EDGE_PX && this.#hasMore) this.#more(false);
  }

  /** Draw the lines from a place on, as far as there are so many, and leave `anchor` where it is seen. */
  #drawFrom(place, anchor) {
    const seenAt = anchor ? anchor.offsetTop - this.list.scrollTop : 0;
    this.#from = Math.max(0, Math.min(place, this.#lines.length - DRAWN));
    this.#draw();
    if (anchor?.isConnected) this.list.scrollTop = anchor.offsetTop - seenAt;
  }

  async #fetch(query, use) {
    this.#busy = true;
    this.#asked += 1;
    const [mine, job] = [this.#asked, this.#job];
    clearTimeout(this.#timer);
    if (query.find) say(this.state, "Searching");
    try {
      const told = await logs(job, { ...query, ...this.#whose() });
      if (mine !== this.#asked || this.#job.uid !== job.uid) return;
      if (told) {
        this.#hasMore = told.more || query.until !== undefined;
        use(told);
      }
    } catch (error) {
      if (mine === this.#asked) say(this.state, error.message);
    }
    if (mine !== this.#asked) return;
    this.#busy = false;
    this.#schedule();
  }

  #whose() {
    const { value } = this.worker;
    if (value.startsWith(RANK)) return { rank: value.slice(RANK.length) };
    return value ? { worker: value } : {};
  }

  #schedule() {
    clearTimeout(this.#timer);
    if (this.#isOpen && this.#mode === "live" && !document.hidden) this.#later(() => this.#more(), LIVE_MS);
  }

  /** Other lines, of which that at `place` is to be seen. */
  #replace(told, place) {
    this.#reach = 0;
    this.#noEarlier = false;
    this.#lines = told.lines.map(read);
    this.#drawFrom(place - DRAWN / 2, null);
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
    keyed(this.list, this.#lines.slice(this.#from, this.#from + DRAWN), ({ id }) => id, (line) => {
      const when = el("button", { type: "button", title: "Show in the curves", onclick: () => this.onMoment(line.at) }, clock(line.at));
      const made = el("li", {}, when, several ? el("span", { class: "who" }, line.worker.replace(prefix, "")) : "", coloured(line.text));
      made.at = line.at;
      return made;
    }, () => {});
  }
}

let numbered = 0;

/** A line; `id` tells it from all others. */
const read = ([worker, at, text]) => ({ worker, at, text, id: numbered++ });
