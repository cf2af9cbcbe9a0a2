// The front page of a team: what failed, waits and runs, and where the money went.

import { remember, route } from "./route.js";
import { el, keyed, say, show, table } from "./dom.js";
import { doing, ended, href, left } from "./list.js";
import { waits } from "./projects.js";
import { ago, clock, count, dollars, of, plural, span } from "./format.js";

const DAY_S = 86_400;
const PERIODS = { "": ["Since yesterday", 1], 7: ["7 days", 7], 30: ["30 days", 30], all: ["All that is known", Infinity] };
const MOST = 50;
const GROUPS = { "": ["By person", "Person"], project: ["By project", "Project"], day: ["By day", "Day"] };
const dayOf = new Intl.DateTimeFormat("sv"); // 2026-01-31, which sorts as it reads

export class TeamView {
  #jobs = [];
  #now = 0;
  #projects = null;

  /** `place` is where it is put, hidden. */
  constructor(place) {
    this.period = select("Period", PERIODS, (value) => this.#set({ since: value }));
    this.user = select("Person", {}, (value) => this.#set({ user: value }));
    this.project = select("Project", {}, (value) => this.#set({ project: value }));
    this.group = select("Money", GROUPS, (value) => this.#set({ by: value }));
    this.tiles = new Map(["Failed", "Waiting", "Running", "Goodput", "Interruptions", "Cost, estimated"].map((title) =>
      [title, [el("dd", { class: "value" }), el("dd", { class: "more" })]]));
    this.lists = Object.fromEntries([
      ["look", "Needs a look"], ["failed", "Failed"], ["waiting", "Waiting"], ["running", "Running"], ["succeeded", "Succeeded"],
    ].map(([kind, title]) => {
      const heading = el("h3", { id: `team-${kind}` }, title);
      const parts = { items: el("ul", { class: "sentences" }), more: el("p", { class: "muted" }) };
      return [kind, { ...parts, node: el("section", { class: "card", "aria-labelledby": heading.id }, heading, parts.items, parts.more) }];
    }));
    this.quotas = { items: el("ul", { class: "sentences" }) };
    this.quotas.node = el("section", { class: "card", "aria-labelledby": "team-quotas" },
      el("h3", { id: "team-quotas" }, "Shared slots"), this.quotas.items);
    this.money = table("Money", [["", ""], ["Jobs", "number"], ["Interruptions", "number"], ["Goodput", "number"], ["USD", "number"]]);
    this.head = this.money.node.querySelector("th");
    this.source = el("p", { class: "muted small-note" });
    const heading = el("h3", { id: "team-money" }, "Where the money went");
    this.body = el("article", { class: "team", hidden: true },
      el("header", { class: "head" },
        el("a", { class: "back", href: "#/" }, "‹ All jobs"),
        el("div", { class: "titles" }, el("h2", {}, "Overview")),
        el("div", { class: "curve-tools" }, ...[this.period, this.user, this.project].map((field) => field.parentElement))),
      el("dl", { class: "tiles" }, ...[...this.tiles].map(([title, parts]) => el("div", { class: "tile" }, el("dt", {}, title), ...parts))),
      ...Object.values(this.lists).map(({ node }) => node),
      this.quotas.node,
      el("section", { class: "card", "aria-labelledby": heading.id }, heading,
        el("div", { class: "curve-tools" }, this.group.parentElement), this.money.node, this.source));
    place.append(this.body);
  }

  hide() {
    show(this.body, false);
  }

  /** Show these jobs; `projects` is what the server has told of quotas, or null. */
  update(jobs, now, projects) {
    this.#jobs = jobs;
    this.#now = now;
    this.#projects = projects;
    show(this.body, true);
    const { settings } = route();
    this.#offer(this.user, "Everybody", new Set(jobs.map((job) => job.user).filter(Boolean)), settings.get("user"));
    this.#offer(this.project, "All projects", new Set(jobs.map((job) => job.namespace)), settings.get("project"));
    choose(this.period, settings.get("since"));
    choose(this.group, settings.get("by"));
    const since = now - DAY_S * (PERIODS[this.period.value]?.[1] ?? 1);
    const wanted = jobs.filter((job) => (!this.user.value || job.user === this.user.value)
      && (!this.project.value || job.namespace === this.project.value) && (!ended(job) || (job.endedAt ?? 0) >= since));
    const kinds = {
      look: wanted.filter((job) => !ended(job) && needsLook(job)),
      failed: wanted.filter((job) => job.phase === "Failed"),
      waiting: wanted.filter((job) => job.phase === "Pending" || job.phase === "Restarting"),
      running: wanted.filter((job) => job.phase === "Running" && !needsLook(job)),
      succeeded: wanted.filter((job) => job.phase === "Succeeded"),
    };
    for (const [kind, found] of Object.entries(kinds)) this.#list(kind, found);
    this.#fill(kinds, wanted, since);
    this.#hold();
  }

  /** How much of each pool is held. */
  #hold() {
    const pools = this.#projects?.pools ?? [];
    show(this.quotas.node, pools.length > 0);
    keyed(this.quotas.items, pools, ({ pool }) => pool, ({ pool }) => el("li", {}, el("a", { href: "#/projects" }, pool), el("span")),
      ({ lastChild }, { held, slots, free, unit, projects }) => {
        const waiting = projects.reduce((sum, row) => sum + (row.waiting ?? 0), 0);
        const whole = slots === undefined ? plural(held, unit) : `${count(held)} of ${plural(slots, unit)}`;
        say(lastChild, ` ${[`${whole} held`, free === undefined ? "" : `${count(free)} free`, waiting ? waits(waiting) : ""].filter(Boolean).join(", ")}`);
      });
  }

  #set(changes) {
    remember(changes);
    this.update(this.#jobs, this.#now, this.#projects);
  }

  #offer(field, all, names, chosen) {
    if (document.activeElement === field) return;
    if (chosen) names.add(chosen); // an address may name somebody whose jobs are gone
    keyed(field, ["", ...[...names].sort()], (name) => name, (name) => el("option", { value: name }, name || all), () => {});
    choose(field, chosen);
  }

  #list(kind, found) {
    const { node, items, more } = this.lists[kind];
    show(node, found.length > 0);
    const words =  { look: this.#wrong, failed: this.#why, waiting: this.#why, running: this.#far, succeeded: this.#end }[kind];
    keyed(items, found.slice(0, MOST), (job) => job.uid,
      (job) => el("li", {}, el("a", { href: href(job) }, job.name), el("span", { class: "muted" }), el("span")),
      ({ children: [, whose, told] }, job) => {
        say(whose, ` ${[job.user, job.namespace].filter(Boolean).join(" · ")} `);
        say(told, words.call(this, job));
      });
    say(more, found.length > MOST ? `and ${plural(found.length - MOST, "other job")}` : "");
  }

  #wrong(job) {
    const idle = job.idleGpus ? `${plural(job.idleGpus, "GPU")} ${job.idleGpus > 1 ? "do" : "does"} nothing` : "";
    const wrong = [job.notFinite && `${job.notFinite}, and it goes on`, idle].filter(Boolean).join("; ");
    return `${wrong}: step ${of(job.step ?? 0, job.totalSteps)}`;
  }

  #why(job) {
    const waited = this.#waited(job);
    const when = job.endedAt ? ago(this.#now - job.endedAt) : waited ? `for ${span(waited)}` : "";
    return [when, job.reason || doing(job, this.#now)].filter(Boolean).join(": ");
  }

  /** How long a job has waited for its first start; 0: it has started before, and since when it waits is not known. */
  #waited(job) {
    return job.startedAt || !job.createdAt ? 0 : this.#now - job.createdAt;
  }

  #far(job) {
    const seconds = left(job);
    const step = job.step === null ? doing(job, this.#now) : `step ${of(job.step, job.totalSteps)}`;
    return [`${job.active} of ${plural(job.desired, "worker")}`, step, seconds === null ? "" : `about ${span(Math.max(10, seconds))} left`]
      .filter(Boolean).join(", ");
  }

  #end(job) {
    return [job.endedAt ? ago(this.#now - job.endedAt) : "", job.notFinite].filter(Boolean).join(", ");
  }

  #fill(kinds, wanted, since) {
    const gpus = (jobs) => jobs.reduce((sum, job) => sum + job.placed * job.gpusPerWorker, 0);
    const running = [...kinds.running, ...kinds.look];
    const longest = Math.max(0, ...kinds.waiting.map((job) => this.#waited(job)));
    const spent = wanted.map((job) => [job, spread(job, since, this.#now)]);
    const usd = spent.reduce((sum, [, days]) => sum + total(days), 0);
    const priced = wanted.filter((job) => job.costUsd !== null).length;
    const share = goodput(wanted, this.#now);
    const tell = (title, value, more) => {
      const [big, small] = this.tiles.get(title);
      say(big, value);
      say(small, more || "\u00a0");
    };
    tell("Failed", count(kinds.failed.length), kinds.succeeded.length ? `${count(kinds.succeeded.length)} succeeded` : "");
    tell("Waiting", count(kinds.waiting.length), longest ? `up to ${span(longest)}` : "");
    tell("Running", count(running.length), gpus(running) ? plural(gpus(running), "GPU") : plural(running.reduce((sum, job) => sum + job.placed, 0), "worker"));
    tell("Goodput", share === null ? "–" : `${(100 * share).toFixed(1)} %`, share === null ? "" : "weighted by time");
    tell("Interruptions", count(wanted.reduce((sum, job) => sum + job.interruptions, 0)), "of these jobs");
    tell("Cost, estimated", priced ? dollars(usd) : "–", priced === wanted.length ? "" : `${count(wanted.length - priced)} without price`);
    const groups = grouped(spent, this.group.value);
    say(this.head, GROUPS[this.group.value][1]);
    this.money.fill(groups.map(([name, { jobs, cost }]) => {
      const part = goodput(jobs, this.#now);
      const losses = jobs.reduce((sum, job) => sum + job.interruptions, 0);
      return [name, count(jobs.length), count(losses), part === null ? "–" : `${(100 * part).toFixed(1)} %`, cost === null ? "–" : dollars(cost)];
    }));
    const sources = [...new Set(wanted.map((job) => job.pricesOf).filter(Boolean))].sort();
    say(this.source, sources.length ? `Prices: ${sources.join("; ")}. A job's cost is spread evenly over its time; what a job cost before ${clock(Math.max(since, 0))} is left out.`
      : "No job has a known price: a job's pod template has to name an instance type, or a GPU.");
    show(this.source, wanted.length > 0);
  }
}

/** What a job has cost on each day since then, spread evenly over its time: day -> USD; null: unknown. */
export function spread(job, since, now) {
  if (job.costUsd === null) return null;
  const begin = job.startedAt ?? job.createdAt ?? now;
  const end = Math.max(job.endedAt ?? now, begin + 1);
  const days = new Map();
  for (let at = Math.max(begin, since); at < end;) {
    const midnight = new Date(1000 * at);
    midnight.setHours(24, 0, 0, 0);
    const until = Math.min(end, midnight / 1000);
    days.set(dayOf.format(new Date(1000 * at)), (job.costUsd * (until - at)) / (end - begin));
    at = until;
  }
  return days;
}

/** Does something go on that ought not to: a loss that is no number, GPUs that do nothing? */
const needsLook = (job) => Boolean(job.notFinite || job.idleGpus);

const total = (days) => [...(days?.values() ?? [])].reduce((sum, usd) => sum + usd, 0);

/** [name, { jobs, cost }] of each person, project or day; the dearest first, days in order. */
function grouped(spent, by) {
  const groups = new Map();
  const add = (name, job, usd) => {
    const group = groups.get(name) ?? { jobs: [], cost: null };
    group.jobs.push(job);
    if (usd !== null) group.cost = (group.cost ?? 0) + usd;
    groups.set(name, group);
  };
  for (const [job, days] of spent) {
    if (by === "day") for (const [day, usd] of days ?? []) add(day, job, usd);
    else add((by === "project" ? job.namespace : job.user) || "unknown", job, days && total(days));
  }
  return [...groups].sort(by === "day" ? ([one], [other]) => (one < other ? 1 : -1) : ([, one], [, other]) => (other.cost ?? 0) - (one.cost ?? 0));
}

/** The goodput of several jobs together, by their time; null where none is known. */
function goodput(jobs, now) {
  const wall = (job) => Math.max(1, (job.endedAt ?? now) - (job.startedAt ?? now));
  const known = jobs.filter((job) => job.goodput !== undefined);
  const whole = known.reduce((sum, job) => sum + wall(job), 0);
  return whole ? known.reduce((sum, job) => sum + job.goodput * wall(job), 0) / whole : null;
}

function select(label, options, onChange) {
  const field = el("select", {}, ...Object.entries(options).sort(([one]) => (one === "" ? -1 : 1)).map(([value, [words]]) => el("option", { value }, words)));
  field.addEventListener("change", () => onChange(field.value));
  el("label", {}, el("span", {}, label), field);
  return field;
}

/** Set a field to what the address says, or to its first. */
function choose(field, value) {
  if (document.activeElement === field) return;
  field.value = value ?? "";
  if (field.selectedIndex < 0) field.value = "";
}
