// The list of jobs: found, filtered, a page at a time. A thousand jobs are fifty elements.

import { remember, route } from "./route.js";
import { byId, el, keyed, say, show } from "./dom.js";
import { ago, count, of, span } from "./format.js";

const PER_PAGE = 50;
const ENDED = new Set(["Succeeded", "Failed", "Cancelled"]);
const KINDS = {
  all: () => true,
  running: (job) => job.phase === "Running",
  waiting: (job) => job.phase === "Pending" || job.phase === "Restarting",
  suspended: (job) => job.phase === "Suspended",
  failed: (job) => job.phase === "Failed",
  ended: (job) => ENDED.has(job.phase),
};

export const ended = (job) => ENDED.has(job.phase);
export const href = (job) => `#/${encodeURIComponent(job.namespace)}/${encodeURIComponent(job.name)}`;

/** What it is doing, in a word. */
export function state(job) {
  if (job.cancelling) return "Cancelling";
  return job.suspending ? "Suspending" : job.phase;
}

/** How much of all steps is done, from 0 to 1; of a job that has succeeded all, even where it never said how many. */
export function done(job) {
  if (job.phase === "Succeeded") return 1;
  return job.totalSteps ? Math.min(1, (job.step ?? 0) / job.totalSteps) : 0;
}

/** About how long until all steps are done, or null. */
export function left(job) {
  if (!job.stepsPerS || !job.totalSteps || job.phase !== "Running") return null;
  return Math.max(0, job.totalSteps - job.step) / job.stepsPerS;
}

/** Those that still go on first, the newest first. */
export const sorted = (jobs) => [...jobs].sort(order);

function order(one, other) {
  return ended(one) - ended(other) || (other.createdAt ?? 0) - (one.createdAt ?? 0) || (one.uid < other.uid ? -1 : 1);
}

export class List {
  #page = 0;
  #jobs = [];
  #settings = { open: null, now: 0, everywhere: false };

  constructor() {
    const { settings } = route();
    byId("filter").value = settings.get("q") ?? "";
    if (KINDS[settings.get("phase")]) byId("phase").value = settings.get("phase");
    const again = () => {
      this.#page = 0;
      remember({ q: byId("filter").value, phase: byId("phase").value === "all" ? null : byId("phase").value });
      this.#draw();
    };
    byId("filter").addEventListener("input", again);
    byId("phase").addEventListener("change", again);
    byId("earlier").addEventListener("click", () => this.#turn(-1));
    byId("later").addEventListener("click", () => this.#turn(1));
  }

  /** Show these jobs in this order; `open` is the uid of the one beside the list, `now` in the server's time. */
  update(jobs, settings) {
    this.#jobs = jobs;
    this.#settings = settings;
    this.#draw();
  }

  #turn(by) {
    this.#page += by;
    this.#draw();
    byId("list").scrollTop = 0;
  }

  #draw() {
    const wanted = byId("filter").value.trim().toLowerCase();
    const kind = KINDS[byId("phase").value];
    const found = this.#jobs.filter((job) => kind(job) && job.name.toLowerCase().includes(wanted));
    const pages = Math.max(1, Math.ceil(found.length / PER_PAGE));
    this.#page = Math.min(Math.max(this.#page, 0), pages - 1);
    const begin = this.#page * PER_PAGE;
    const here = found.slice(begin, begin + PER_PAGE);
    keyed(byId("list"), here, (job) => job.uid, make, (item, job) => this.#fill(item, job));
    show(byId("none"), this.#jobs.length > 0 && found.length === 0);
    say(byId("none"), "No jobs match.");
    show(byId("pager"), pages > 1);
    say(byId("range"), `${count(begin + 1)} to ${count(begin + here.length)} of ${count(found.length)}`);
    byId("earlier").disabled = this.#page === 0;
    byId("later").disabled = this.#page === pages - 1;
  }

  #fill(item, job) {
    const { open, now, everywhere } = this.#settings;
    const link = item.firstElementChild;
    const { name, workers, what, when, bar } = item.parts;
    if (link.getAttribute("href") !== href(job)) link.setAttribute("href", href(job));
    if (open === job.uid) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
    item.dataset.phase = job.phase.toLowerCase();
    say(name, everywhere ? `${job.namespace}/${job.name}` : job.name);
    say(workers, ended(job) ? "" : `${job.active}/${job.desired}`);
    workers.title = `${job.active} of ${job.desired} workers run, ${job.training} train, ${job.placed} have a node`;
    say(what, told(job, now));
    say(when, due(job, now));
    bar.style.width = `${100 * done(job)}%`;
  }
}

function make() {
  const parts = {};
  for (const part of ["name", "workers", "what", "when", "bar"]) parts[part] = el("span", { class: part });
  const item = el(
    "li",
    {},
    el(
      "a",
      {},
      el("span", { class: "line" }, el("span", { class: "dot", "aria-hidden": "true" }), parts.name, parts.workers),
      el("span", { class: "line small" }, parts.what, parts.when),
      el("span", { class: "track", "aria-hidden": "true" }, parts.bar),
    ),
  );
  item.parts = parts;
  return item;
}

/** "first step (4m00s so far; last time 6m00s)", or "training": what the group of workers does. */
export function doing(job, now) {
  if (!job.doing) return "";
  const { words, since, lastS, steady } = job.doing;
  if (steady || since === null) return words;
  const took = Math.max(0, now - since);
  const last = lastS === null ? "" : `; last time ${span(lastS)}`;
  return `${words} (${took < 60 ? `${Math.floor(took)}s` : span(took)} so far${last})`;
}

function told(job, now) {
  const words = [state(job)];
  if (job.notFinite) words.push(job.notFinite);
  if (job.doing && !job.doing.steady) words.push(doing(job, now));
  if (job.reason && job.phase !== "Cancelled") words.push(job.reason);
  else if (job.step !== null) words.push(`step ${of(job.step, job.totalSteps)}`);
  return words.join(" · ");
}

function due(job, now) {
  if (job.endedAt) return ago(now - job.endedAt);
  const seconds = left(job);
  return seconds === null ? "" : `${span(Math.max(10, seconds))} left`;
}
