// What was planned for a job with a deadline or a budget, and what became of it, over one axis that ends at the deadline.

import { Chart, last, nearest } from "./charts.js";
import { range, together } from "./series.js";
import { el, say, show, table } from "./dom.js";
import { ended } from "./list.js";
import { clock, count, dollars, span } from "./format.js";

export class PlanView {
  constructor() {
    const on = { zoom: () => {}, pick: () => {} };
    this.words = el("p");
    this.why = el("p", { class: "muted small-note" });
    this.work = new Chart({ fromZero: true, whole: true }, on);
    this.workers = new Chart({ stepped: true, fromZero: true, whole: true }, on);
    const key = (kind, words) => el("span", {}, el("span", { class: `line-of ${kind}`, "aria-hidden": "true" }), words);
    this.key = el("p", { class: "plan-key muted" }, key("real", "what happened"), key("planned", "plan"), key("on-demand", "of it on demand"));
    this.decisions = table("Decisions", [["When", ""], ["Workers", ""], ["Why", "wide"]]);
    this.nodes = [this.words, this.why, this.key, this.work.node, this.workers.node,
      el("details", { class: "values" }, el("summary", {}, "Decisions as a table"), this.decisions.node)];
  }

  /** Show the plan of a job that has one; `now` is the server's time. */
  update(known, now) {
    const { job, plan } = known;
    say(this.words, ended(job) ? outcome(job, plan, known.cost) : plan.words);
    say(this.why, ended(job) ? "" : plan.why && `Why so many: ${plan.why}.`);
    show(this.why, Boolean(this.why.textContent));
    const [begin, end] = range(known, now);
    const open = !ended(job);
    const late = open && plan.finishAt ? plan.finishAt + plan.spreadS : end;
    const shown = [begin, Math.max(end, late, plan.finishBy ?? end)];
    const marks = [
      ...(plan.finishBy ? [{ x: plan.finishBy, kind: "deadline", word: "deadline" }] : []),
      ...(open ? [{ x: now, kind: "now", word: "now" }] : []),
    ];
    const timed = { over: "time", range: [shown[0], shown[1] + 0.02 * (shown[1] - shown[0])], marks };
    this.#drawWork(known, now, open, timed);
    this.#drawWorkers(known, now, open, timed);
    this.decisions.fill([...plan.steps].reverse().map((step) => [clock(step.at), inWords(step), step.why]));
  }

  /** Steps that were made, and from now on the way to the last one, give or take. */
  #drawWork({ job, curve, plan }, now, open, timed) {
    const done = curve.at.map((at, i) => [at, curve.step[i]]);
    if (job.step !== null && open) done.push([now, job.step]);
    const goes = open && plan.finishAt && job.totalSteps && job.step !== null && plan.finishAt > now;
    const ends = goes ? [plan.finishAt - plan.spreadS, plan.finishAt, plan.finishAt + plan.spreadS].map((at) => Math.max(at, now + 1)) : [];
    const x = [...new Set([...done.map(([at]) => at), ...ends])].sort((one, other) => one - other);
    const made = new Map(done);
    const real = x.map((at) => made.get(at));
    const way = (to) => x.map((at) => (at === now ? job.step : at >= to ? job.totalSteps : undefined));
    const [early, middle, late] = goes ? ends.map(way) : [0, 1, 2].map(() => x.map(() => undefined));
    const total = job.totalSteps ? ` of ${count(job.totalSteps)}` : "";
    const moments = done.map(([at]) => at);
    const words = (at) => {
      if (at === null) return `${count(job.step ?? 0)}${total}`;
      return `${clock(at)}  ${count(done[nearest(moments, at)][1])}${total}`;
    };
    const promise = goes ? `; expected to end at ${clock(plan.finishAt)}, give or take ${span(plan.spreadS)}` : "";
    this.work.update("Steps", done.length ? {
      ...timed, x, columns: [real, middle, early, late], moments, words,
      lines: [{ colour: "good", width: 2 }, { colour: "accent", width: 1.5, dash: [6, 4] }, { width: 0 }, { width: 0 }],
      bands: [{ low: 4, high: 3, fill: "accent-band" }],
      label: `Steps: ${words(null)} made${promise}`,
    } : null, "No step reported yet.");
  }

  #drawWorkers({ training, plan }, now, open, timed) {
    const until = open ? Math.max(now, plan.finishAt ?? plan.onDemandAt ?? now) : timed.range[1];
    const steps = plan.steps.filter(({ at }) => at !== null);
    const hold = (value) => [...steps.map((step) => [step.at, value(step)]), ...(steps.length ? [[Math.max(until, steps.at(-1).at), value(steps.at(-1))]] : [])];
    const real = training.length ? [...training, [open ? now : Math.max(timed.range[0], training.at(-1)[0]), training.at(-1)[1]]] : [];
    const { times, columns } = together(hold((step) => step.spot + step.onDemand), hold((step) => step.onDemand), real);
    const cut = (column, end) => column.map((value, i) => (times[i] > end ? null : value));
    const [planned, onDemand, trained] = [cut(columns[0], until), cut(columns[1], until), cut(columns[2], open ? now : Infinity)];
    const said = (i) => `${trained[i] ?? 0} training, ${planned[i] ?? 0} planned, ${onDemand[i] ?? 0} of them on demand`;
    const words = (x) => (x === null ? said(Math.max(0, last(times, now))) : `${clock(x)}  ${said(Math.max(0, last(times, x)))}`);
    this.workers.update("Workers", times.length ? {
      ...timed, axis: true, x: times, columns: [planned, onDemand, trained], moments: times, words,
      lines: [
        { colour: "accent", width: 1.5, dash: [6, 4], fill: "accent-band" },
        { colour: "run-1", width: 1.5, dash: [2, 3], fill: "run-1-band" },
        { colour: "good", width: 2 },
      ],
      label: `Workers: ${words(null)}`,
    } : null, "Nothing decided yet.");
  }
}

const inWords = ({ spot, onDemand, zone }) =>
  [spot && `${spot} on spot${zone ? ` in ${zone}` : ""}`, onDemand && `${onDemand} on demand`].filter(Boolean).join(", ") || "none";

/** What became of the goal of a job that has ended. */
function outcome(job, plan, cost) {
  const spare = plan.finishBy && job.endedAt ? plan.finishBy - job.endedAt : null;
  const time = spare === null ? "" : spare >= 0 ? `, ${span(spare)} before its deadline` : `, ${span(-spare)} after its deadline`;
  const money = cost ? `; it cost about ${dollars(cost.spentUsd)}${plan.budget ? ` of ${dollars(plan.budget)}` : ""}` : "";
  return `${job.phase}${time}${money}.`;
}
