// One job: why it stands where it does, how far it is, its curves, what disturbed it, what it costs.

import { coloured } from "./ansi.js";
import { Curves } from "./curves.js";
import { command, el, keyed, say, show, table } from "./dom.js";
import { doing, done, ended, left, state } from "./list.js";
import { Logs } from "./logs.js";
import { Machines } from "./machines.js";
import { PlanView } from "./plan.js";
import { Stacks } from "./stacks.js";
import { ago, bytes, clock, count, dollars, of, plural, short, span } from "./format.js";

const TILES = ["Workers", "Rate", "Checkpoint", "Interruptions", "Goodput", "Cost, estimated"];
const VERBS = ["scale", "suspend", "resume", "cancel"];

export class JobView {
  #known = null;
  #words = "";

  /**
   * `onVerb(verb)` is called when somebody wants something done to the job; `others()` are all jobs, `readStacks(job)`
   * looks into its workers.
   */
  constructor(place, onVerb, others, readStacks) {
    this.place = place;
    this.name = el("h2");
    this.badge = el("span", { class: "badge" });
    this.since = el("span", { class: "muted" });
    this.buttons = Object.fromEntries(
      VERBS.map((verb) => {
        const label = verb[0].toUpperCase() + verb.slice(1);
        return [verb, el("button", { type: "button", class: verb === "cancel" ? "danger" : null, onclick: () => onVerb(verb) }, label)];
      }),
    );
    this.findings = el("div", { class: "findings" });
    this.tiles = new Map(TILES.map((title) => [title, { value: el("dd", { class: "value" }), more: [el("dd", { class: "more" }), el("dd", { class: "more" })] }]));
    this.progress = { text: el("span"), more: el("span", { class: "muted" }), bar: el("progress", { max: "1", "aria-label": "Progress" }) };
    this.curves = new Curves(others, (at) => this.logs.showAt(at));
    this.logs = new Logs((at) => this.curves.pointAt(at));
    this.machines = new Machines({ zoom: (part) => this.curves.zoomTime(part), pick: (at) => this.logs.showAt(at) });
    this.curves.onView = () => this.#known && this.machines.draw(this.#known, this.curves.view(this.#known, this.#known.now));
    this.disturbances = table("Interruptions and scalings", [
      ["When", ""], ["What", ""], ["Who", ""], ["Why", "wide"], ["Training after", "number"], ["Steps redone", "number"],
    ]);
    this.workers = table("Workers", [["Worker", ""], ["State", ""], ["Node", ""], ["Since", ""]]);
    this.more = el("p", { class: "muted" });
    this.plan = null; // most jobs have none
    this.stacks = new Stacks(readStacks);
    this.events = el("ol", { class: "events", tabindex: "0", "aria-label": "What happened" });
    this.runs = el("dl", { class: "runs" });
    this.#assemble();
  }

  #assemble() {
    const tiles = [...this.tiles].map(([title, { value, more }]) => el("div", { class: "tile" }, el("dt", {}, title), value, ...more));
    const bar = el("div", { class: "line" }, this.progress.text, this.progress.more);
    const key = el(
      "p",
      { class: "key muted" },
      el("span", { class: "mark interruption", "aria-hidden": "true" }), "interruption",
      el("span", { class: "mark scaling", "aria-hidden": "true" }), "scaling",
    );
    this.sections = Object.fromEntries(
      [
        ["plan", "Plan"],
        ["course", "Course", key, ...this.curves.nodes],
        ["machines", "Machines in use", ...this.machines.nodes],
        ["logs", "Log", ...this.logs.nodes],
        ["disturbances", "Interruptions and scalings", this.disturbances.node],
        ["workers", "Workers", this.workers.node, this.more, this.stacks.node],
        ["events", "What happened", this.events],
        ["runs", "What it runs", this.runs],
      ].map(([name, title, ...parts]) => {
        const heading = el("h3", { id: `heading-${name}` }, title);
        return [name, el("section", { class: `card ${name}`, "aria-labelledby": heading.id }, heading, ...parts)];
      }),
    );
    this.body = el(
      "article",
      { hidden: true },
      el("header", { class: "head" },
        el("a", { class: "back", href: "#/" }, "‹ All jobs"),
        el("div", { class: "titles" }, this.name, this.badge, this.since),
        el("div", { class: "buttons" }, ...VERBS.map((verb) => this.buttons[verb]))),
      this.findings,
      el("div", { class: "card far" }, bar, this.progress.bar),
      el("dl", { class: "tiles" }, ...tiles),
      ...Object.values(this.sections),
    );
    this.empty = el("div", { class: "empty" });
    this.place.replaceChildren(this.empty, this.body);
  }

  /** The uid of the job that is shown, or null. */
  get shown() {
    return this.#known?.job.uid ?? null;
  }

  #showPlan(known, now) {
    if (this.plan === null) {
      this.plan = new PlanView();
      this.sections.plan.append(...this.plan.nodes);
    }
    this.plan.update(known, now);
  }

  hide() {
    show(this.body, false);
    show(this.empty, false);
  }

  /** Nothing to show: say why, and what to type. */
  clear(title, text, toType) {
    this.#known = null;
    show(this.body, false);
    show(this.empty, true);
    const words = [title, text, toType].join("\n");
    if (words === this.#words) return; // it is said every second, and may have the focus
    this.#words = words;
    this.empty.replaceChildren(el("h2", {}, title), el("p", { class: "muted" }, text), ...(toType ? [command(toType)] : []));
  }

  /** Show what the server has told of a job; `now` is its time. */
  update(known, now) {
    if (this.#known?.job.uid !== known.job.uid) this.place.scrollTop = 0;
    this.#known = known;
    show(this.empty, false);
    show(this.body, true);
    this.#head(known.job, now);
    this.#found(known.findings);
    this.#far(known.job, now);
    this.#fill(known, now);
    show(this.sections.plan, known.plan !== null);
    if (known.plan !== null) this.#showPlan(known, now);
    this.curves.update(known, now);
    show(this.sections.machines, known.machinesHistory.at.length > 0 || (!ended(known.job) && (known.machines !== null || known.job.active > 0)));
    this.machines.update(known, this.curves.view(known, now));
    this.logs.update(known);
    this.stacks.update(known, ended(known.job));
    this.#tell(known, now);
  }

  #head(job, now) {
    say(this.name, job.name);
    say(this.badge, state(job));
    this.badge.dataset.phase = job.phase.toLowerCase();
    say(this.since, since(job, now));
    const over = ended(job) || job.cancelling;
    const suspended = job.phase === "Suspended" || job.suspending;
    show(this.buttons.scale, !over);
    show(this.buttons.suspend, !over && !suspended);
    show(this.buttons.resume, !over && suspended);
    show(this.buttons.cancel, !over);
  }

  #found(findings) {
    const make = () => {
      const parts = { text: el("p"), details: el("pre", { tabindex: "0" }), mends: el("ul") };
      const made = el("div", {}, parts.text, parts.details, parts.mends);
      made.parts = parts;
      return made;
    };
    keyed(this.findings, findings.map((item, i) => ({ ...item, i })), (item) => item.i, make, (node, item) => {
      node.className = `finding ${item.severity}`;
      say(node.parts.text, item.text);
      const printed = item.details.join("\n");
      if (node.printed !== printed) node.parts.details.replaceChildren(...item.details.flatMap((line) => [coloured(line), "\n"]));
      node.printed = printed;
      show(node.parts.details, item.details.length > 0);
      keyed(node.parts.mends, item.mends, (mend) => `${mend.advice} ${mend.command}`,
        (mend) => el("li", {}, `${mend.advice}: `, command(mend.command)), () => {});
    });
  }

  #far(job, now) {
    const { text, more, bar } = this.progress;
    say(text, job.step === null ? (job.phase === "Succeeded" ? "Done; it reported no steps" : "No step reported") : `Step ${of(job.step, job.totalSteps)}`);
    const seconds = left(job);
    const epoch = job.epoch === null ? "" : `epoch ${of(job.epoch, job.totalEpochs)}`;
    say(more, [doing(job, now), epoch, seconds === null ? "" : `about ${span(Math.max(10, seconds))} left`].filter(Boolean).join(" · "));
    bar.value = done(job);
    bar.dataset.phase = job.phase.toLowerCase();
  }

  /** `more` are lines below the value: as many for each tile, so that none grows. */
  #tile(title, value, ...more) {
    const tile = this.tiles.get(title);
    say(tile.value, value || "–");
    [0, 1].forEach((i) => say(tile.more[i], more[i] || "\u00a0"));
  }

  #fill({ job, checkpoint, goodput, cost, restarts, stepsRedone }, now) {
    const each = job.gpusPerWorker ? `${plural(job.gpusPerWorker, "GPU")} each` : "on CPUs";
    const workers = ended(job) ? count(job.desired) : `${count(job.active)} of ${count(job.desired)}`;
    const lent = job.borrowed && !ended(job) ? ` · ${count(job.borrowed)} borrowed` : "";
    const bounds = job.max === null ? `${job.min} or more` : `${job.min} to ${job.max}`;
    this.#tile("Workers", workers, `${bounds}${lent}`, each);
    const pace = job.stepsPerS ? `${Number(job.stepsPerS.toPrecision(3))} steps/s` : "";
    this.#tile("Rate", job.samplesPerS === null ? "" : `${short(job.samplesPerS)}/s`, job.samplesPerS === null ? "" : "samples", pace);
    if (checkpoint.step === null) this.#tile("Checkpoint", "none");
    else {
      const age = checkpoint.at && !ended(job) ? ago(now - checkpoint.at) : "";
      const lines = [age, `${count(checkpoint.committed)} committed`].filter(Boolean);
      this.#tile("Checkpoint", `step ${count(checkpoint.step)}`, ...lines);
    }
    this.tiles.get("Checkpoint").value.title = checkpoint.sizeBytes ? bytes(checkpoint.sizeBytes) : "";
    const causes = Object.entries(restarts).map(([cause, times]) => `${cause} ${times}`).join(", ");
    this.#tile("Interruptions", count(job.interruptions), causes || "none", stepsRedone === null ? "redone: unknown" : `${plural(stepsRedone, "step")} redone`);
    this.tiles.get("Interruptions").more[0].title = causes;
    const share = goodput ? `${(100 * goodput.share).toFixed(1)} %` : "";
    this.#tile("Goodput", share, goodput ? `of ${span(goodput.wallS)}` : "", goodput?.whole === false ? "of the last groups" : "");
    const saved = cost && cost.onDemandUsd > cost.spentUsd ? `${dollars(cost.onDemandUsd)} on demand` : "";
    const rate = cost?.perHourUsd ? `${dollars(cost.perHourUsd)} an hour` : "";
    if (cost) this.#tile("Cost, estimated", dollars(cost.spentUsd), ...[saved, rate].filter(Boolean));
    else this.#tile("Cost, estimated", "", "no known price");
    this.tiles.get("Cost, estimated").value.title = cost ? [...new Set([cost.instance, cost.pricesOf])].join(", ") : "";
  }

  #tell({ interruptions, scalings, workers, workersInAll, timeline, runs }, now) {
    const cost = (item) => [item.recoveryS === null ? "–" : span(item.recoveryS), item.stepsRedone === null ? "–" : count(item.stepsRedone)];
    const rows = [
      ...interruptions.map((item) => [item.at, item.stayed ? "Ranks failed" : "Interruption", item.worker, [item.cause, item.stayed && item.message].filter(Boolean).join(": "), ...cost(item)]),
      ...scalings.map((item) => [item.at, "Scaling", `${item.from} → ${item.to} workers`, item.by ? `by ${item.by}` : "", ...cost(item)]),
    ].sort((one, other) => (other[0] ?? 0) - (one[0] ?? 0));
    show(this.sections.disturbances, rows.length > 0);
    this.disturbances.fill(rows.map(([at, ...cells]) => [at === null ? "" : clock(at), ...cells]));
    show(this.sections.workers, workers.length > 0 || !this.stacks.node.hidden);
    show(this.workers.node, workers.length > 0);
    this.workers.fill(workers.map((worker) => [worker.name, worker.cause || worker.phase, worker.node || "–", age(worker, now)]));
    say(this.more, workersInAll > workers.length ? `and ${count(workersInAll - workers.length)} more` : "");
    keyed(this.events, [...timeline].reverse().map((entry, i) => ({ ...entry, i: timeline.length - i })), (entry) => `${entry.i} ${entry.at}`,
      ({ at }) => el("li", {}, el("time"), el("b"), el("span"),
        el("button", { type: "button", class: "copy", "aria-label": `The log at ${clock(at)}`, onclick: () => this.logs.showAt(at) }, "log")),
      ({ children: [time, what, rest] }, entry) => {
        say(time, clock(entry.at));
        say(what, entry.what);
        say(rest, [entry.about, entry.details].filter(Boolean).join(": "));
      });
    const facts = { Command: runs.command, Storage: runs.storage, Image: runs.image, Capacity: runs.spot ? "spot" : "" };
    keyed(this.runs, Object.entries(facts).filter(([, text]) => text), ([title]) => title,
      ([title]) => el("div", {}, el("dt", {}, title), el("dd")), (node, [, text]) => say(node.lastChild, text));
  }
}

/** Since when a job runs, or has ended; a moment that nobody has noted is not told. */
function since(job, now) {
  if (ended(job)) return job.endedAt ? `ended ${ago(now - job.endedAt)}` : "";
  return job.startedAt ? `for ${span(now - job.startedAt)}` : "";
}

function age(worker, now) {
  if (worker.cause) return worker.endedAt ? `ended ${ago(now - worker.endedAt)}` : "ended";
  return worker.startedAt ? span(now - worker.startedAt) : "";
}
