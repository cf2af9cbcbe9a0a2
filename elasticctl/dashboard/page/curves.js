// The course of a job: its metrics, several at once, beside those of other runs; steps and workers; one cursor for all.

import { remember, route } from "./route.js";
import { Chart, colour, last, nearest } from "./charts.js";
import { marks, range, smoothed, spansDecades, together } from "./series.js";
import { Differences } from "./compare.js";
import { el, keyed, say, show, table } from "./dom.js";
import { curves, tablePath } from "./feed.js";
import { ended, href } from "./list.js";
import { sheet } from "./svg.js";
import { clock, count, number, plural, span } from "./format.js";

import uPlot from "./vendor/uPlot.esm.js";

const WAIT_MS = 120; // somebody who drags or turns the wheel goes on
const MAX_SHOWN = 12;
const MAX_COMPARED = 4;
const SMOOTH = { "": "None", 0.6: "Light", 0.9: "Medium", 0.97: "Strong" };
const NO_CURVE = "Scripts that use the training library report steps and metrics.";
const COUNTED = { step: "Steps", samples: "Samples" };
const NO_SAMPLES = "How many samples its steps had is not known: only run.loader, ElasticDataLoader and the Hugging Face hook tell, and of what is kept in a storage.";
const UNKEPT = "Only about a hundred points of each curve are known: ";

export class Curves {
  #known = null;
  #now = 0;
  #chosen = null;
  #answers = new Map(); // uid -> what the server told of a run
  #charts = new Map();
  #zoom = null;
  #asked = 0;
  #timer = 0;
  #calling = null;

  /** `others()` are the jobs that runs may be compared with; `onPick(moment)` is called for a moment that is pointed at. */
  constructor(others, onPick) {
    this.others = others;
    this.onPick = onPick;
    this.chips = el("div", { class: "choice", role: "group", "aria-label": "Which metrics" });
    this.tools = {
      over: choice("Over", { "": "Time", ...COUNTED }, () => this.#set({ x: this.tools.over.value, from: null, to: null }, true)),
      scale: choice("Scale", { "": "Automatic", linear: "Linear", log: "Logarithmic" }, () => this.#set({ y: this.tools.scale.value })),
      smooth: choice("Smoothing", SMOOTH, () => this.#set({ s: this.tools.smooth.value })),
      compare: choice("Compare with", { "": "Another run …" }, () => this.#compare()),
    };
    const button = (words, label, act) => el("button", { type: "button", "aria-label": label, title: label, onclick: act }, words);
    const first = () => this.#shownCharts()[0];
    this.all = button("All", "Show all of it", () => this.#zoomTo(null));
    this.csv = el("a", { class: "button", download: true, title: "Every value, as a table" }, "CSV");
    this.bar = el("div", { class: "curve-tools" },
      ...Object.values(this.tools).map((select) => select.parentElement),
      el("span", { class: "group", role: "group", "aria-label": "What is in view" },
        button("+", "Zoom in", () => first()?.zoom(1 / 2)), button("−", "Zoom out", () => first()?.zoom(2)),
        button("‹", "Earlier", () => first()?.pan(-0.5)), button("›", "Later", () => first()?.pan(0.5)), this.all),
      el("span", { class: "group" }, this.csv, button("PNG", "The charts as a picture", () => this.#picture()),
        button("SVG", "The charts as a drawing that can be enlarged", () => this.#drawing())));
    this.runs = el("ul", { class: "compared", "aria-label": "Runs that are compared" });
    this.differences = new Differences();
    this.note = el("p", { class: "muted small-note" });
    this.place = el("div", { class: "metric-charts" });
    const on = { zoom: (part) => this.#zoomTo(part), pick: (x) => this.#pick(x) };
    this.on = on;
    this.none = el("p", { class: "nothing" });
    this.step = new Chart({ fromZero: true, whole: true }, on);
    this.workers = new Chart({ stepped: true, fromZero: true, whole: true }, {
      ...on, zoom: (part) => this.#over === "time" && this.#zoomTo(part), pick: (at) => this.onPick(at),
    });
    this.values = table("Values", [["Run", ""], ["Metric", ""], ["Last", "number"], ["Lowest", "number"], ["Highest", "number"]]);
    this.details = el("details", { class: "values" }, el("summary", {}, "Values as a table"), this.values.node);
    this.nodes = [this.chips, this.bar, this.runs, this.differences.node, this.note, this.place, this.none, this.step.node, this.workers.node, this.details];
    this.onView = () => {};
    addEventListener("hashchange", () => this.#known && this.#restore());
  }

  /** From when to when the charts show a job, as far as they are over time; `onView` is called when that has changed. */
  view(known, now) {
    return (this.#over === "time" && this.#zoom) || range(known, now);
  }

  /** Show another part of the time, or all of it (null). */
  zoomTime(part) {
    if (this.#over === "time") this.#zoomTo(part);
  }

  /** Put the cursor of the charts at a moment, and have them seen. */
  pointAt(at) {
    this.workers.node.scrollIntoView({ block: "nearest" });
    const metric = this.#shownCharts()[0];
    const own = Object.values(this.#answers.get(this.#known.job.uid)?.series ?? {})[0];
    if (metric && this.#over !== "time" && own) {
      const moments = own.other.map((moment) => moment ?? Infinity);
      metric.point(this.#over === "elapsed" ? at - this.#begin(this.#known.job) : own.x[nearest(moments, at)]);
    } else this.workers.point(at);
    (metric ?? this.workers).node.scrollIntoView({ block: "nearest" });
  }

  get #over() {
    const x = route().settings.get("x");
    if (x in COUNTED) return x;
    return this.#compared.length ? "elapsed" : "time";
  }

  get #compared() {
    const wanted = new Set(route().settings.getAll("vs"));
    return this.others().filter((job) => wanted.has(`${job.namespace}/${job.name}`) && job.uid !== this.#known?.job.uid).slice(0, MAX_COMPARED);
  }

  #shownCharts() {
    return [...this.#charts.values()].filter(({ node }) => node.isConnected);
  }

  /** Show what the server has told of a job; `now` is its time. */
  update(known, now) {
    const another = this.#known?.job.uid !== known.job.uid;
    const fresh = this.#known !== known && (another || this.#known.now !== known.now);
    this.#known = known;
    this.#now = now;
    if (another) {
      this.#answers.clear();
      this.#restore();
    } else if (fresh) this.#askSoon(0);
    this.#draw();
  }

  /** What the address says is shown. */
  #restore() {
    const { settings } = route();
    this.#chosen = settings.has("m") ? settings.getAll("m") : null;
    const [low, high] = [settings.get("from"), settings.get("to")].map((text) => (text === null ? NaN : Number(text)));
    this.#zoom = low < high ? [low, high] : null;
    this.tools.over.value = settings.get("x") ?? "";
    this.tools.scale.value = settings.get("y") ?? "";
    this.tools.smooth.value = settings.get("s") ?? "";
    for (const tool of Object.values(this.tools)) if (tool.selectedIndex < 0) tool.value = "";
    this.#askSoon(0);
  }

  #set(changes, again = false) {
    remember(changes);
    if (again) this.#restore();
    this.#draw();
  }

  #compare() {
    const added = this.tools.compare.value;
    this.tools.compare.value = "";
    if (added) this.#set({ vs: [...new Set([...route().settings.getAll("vs"), added])], from: null, to: null }, true);
  }

  #zoomTo(part) {
    this.#zoom = part;
    const digits = this.#over === "step" ? 0 : 1;
    remember({ from: part ? part[0].toFixed(digits) : null, to: part ? part[1].toFixed(digits) : null });
    this.#askSoon(WAIT_MS);
    this.#draw();
    this.onView();
  }

  /** Somebody points at an x: of which moment is that? */
  #pick(x) {
    const over = this.#over;
    if (over === "time") this.onPick(x);
    else if (over === "elapsed") this.onPick(x + this.#begin(this.#known.job));
    else {
      const found = Object.values(this.#answers.get(this.#known.job.uid)?.series ?? {})[0];
      if (found?.x.length) this.onPick(found.other[nearest(found.x, x)] ?? this.#now);
    }
  }

  #begin(job) {
    return job.startedAt ?? job.createdAt ?? 0;
  }

  #askSoon(waitMs) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#ask(), waitMs);
  }

  /** Ask for the part in view of each run; an answer that comes late is not of what is seen any more. */
  async #ask() {
    if (!this.#known) return;
    this.#asked += 1;
    const [mine, { job }] = [this.#asked, this.#known];
    this.#calling?.abort();
    this.#calling = new AbortController();
    const { signal } = this.#calling;
    const over = this.#over;
    const points = Math.min(Math.max(this.place.clientWidth, 300), 1500);
    const wanted = async (run) => {
      const shift = over === "elapsed" ? this.#begin(run) : 0;
      const part = this.#zoom?.map((x) => x + shift);
      const known = this.#answers.get(run.uid);
      const ask = (names) => curves(run, { over: over === "elapsed" ? "time" : over, names, part, points }, signal);
      let told = await ask(this.#names(known));
      if (told && this.#names(told).some((name) => !(name in told.series))) told = await ask(this.#names(told));
      return told && { ...told, over, shift };
    };
    const runs = [job, ...this.#compared];
    try {
      const told = await Promise.all(runs.map(wanted));
      if (mine !== this.#asked || this.#known.job.uid !== job.uid) return;
      runs.forEach((run, i) => told[i] && this.#answers.set(run.uid, told[i]));
      this.#draw();
    } catch {
      // it is asked for again in a moment; that the server is away is said at the top
    }
  }

  /** The metrics that are shown, of those that a run has. */
  #names(told) {
    const names = told?.names ?? [];
    if (this.#chosen) return this.#chosen.filter((name) => !names.length || names.includes(name)).slice(0, MAX_SHOWN);
    return names.includes("loss") ? ["loss"] : names.slice(0, 1);
  }

  #draw() {
    const { job } = this.#known;
    const own = this.#answers.get(job.uid);
    const over = this.#over;
    const compared = this.#compared;
    const runs = [job, ...compared].map((run, i) => ({ job: run, colour: i ? `run-${i}` : "accent", told: this.#answers.get(run.uid) }))
      .filter(({ told }) => told?.over === over);
    this.#choose(own?.names ?? []);
    this.#tell(job, own, compared);
    const all = range(this.#known, this.#now);
    const part = over === "time" ? (this.#zoom ?? all) : all;
    const timed = { over: "time", range: part, marks: marks(this.#known) };
    const names = this.#names(own);
    const shown = runs.length ? names : [];
    const within = over === "time" ? part : (this.#zoom ?? extent(shown.flatMap((name) => runs.map(({ told }) => [told.series[name], told.shift]))));
    this.all.disabled = this.#zoom === null;
    keyed(this.place, shown, (name) => name, (name) => this.#chart(name).node, (_, name) => this.#drawMetric(name, runs, over, { ...timed, range: within }, name === shown.at(-1)));
    show(this.none, own !== undefined && !shown.length);
    say(this.none, this.#known.curve.at.length ? "The script reports no metric." : `${ended(job) ? "No steps were reported." : "No steps reported yet."} ${NO_CURVE}`);
    this.#drawSteps(timed, over);
    this.#drawWorkers(timed, all);
    this.#fillValues(runs, names);
  }

  #chart(name) {
    if (!this.#charts.has(name)) this.#charts.set(name, new Chart({}, this.on));
    return this.#charts.get(name);
  }

  #drawMetric(name, runs, over, timed, isLast) {
    const chart = this.#chart(name);
    const found = runs.flatMap((run) => (run.told.series[name]?.x.length ? [{ ...run, ...run.told.series[name], shift: run.told.shift }] : []));
    if (!found.length) {
      chart.update(name, null, over === "samples" && !runs.some(({ told }) => told.samples) ? NO_SAMPLES : "Not reported by this run.");
      return;
    }
    const wish = this.tools.scale.value;
    const log = wish === "log" || (wish === "" && spansDecades(name, found));
    const weight = Number(this.tools.smooth.value);
    const positive = (column) => (log ? column.map((value) => (value !== null && value <= 0 ? null : value)) : column);
    const tables = found.map(({ x, y, low, high, shift }) => {
      const empty = () => x.map(() => undefined);
      const line = weight ? smoothed(y, weight) : y;
      return [x.map((value) => value - shift), ...[line, weight ? y : empty(), low ?? empty(), high ?? empty()].map(positive)];
    });
    const [x, ...columns] = tables.length > 1 ? uPlot.join(tables) : tables[0];
    const lines = found.flatMap((run) => [
      { colour: run.colour, width: 1.75 }, { colour: run.colour, width: weight ? 1 : 0, alpha: 0.35 }, { width: 0 }, { width: 0 },
    ]);
    const bands = found.map((run, i) => ({ low: 4 * i + 3, high: 4 * i + 4, fill: `${run.colour}-band` }));
    const own = found[0];
    const lost = found.flatMap((run) => run.lost.map(([at, word]) => ({ x: at - run.shift, kind: "lost", word })));
    const through = timed.marks.flatMap((mark) => this.#along(mark, over, own));
    chart.update(name, {
      x, columns, lines, bands, over, log, axis: isLast && over !== "time",
      range: timed.range,
      marks: [...through, ...lost],
      moments: tables[0][0],
      words: (at) => this.#words(found, tables, at, over),
      label: inWords(name, own, tables[0], over),
    });
  }

  /** A mark of the open job, which has a moment, where its metric is drawn. */
  #along(mark, over, own) {
    if (over === "time") return [mark];
    if (over === "elapsed") return [{ ...mark, x: mark.x - own.shift }];
    const all = Object.values(this.#answers.get(this.#known.job.uid).series);
    const dense = all.reduce((most, series) => (series.x.length > most.x.length ? series : most), own); // the same for all charts
    const place = dense.other.findIndex((at) => at !== null && at >= mark.x);
    return place < 0 ? [] : [{ ...mark, x: dense.x[place] }];
  }

  #words(found, tables, at, over) {
    const read = found.map((run, i) => {
      const [x, line] = tables[i];
      const place = at === null ? x.length - 1 : nearest(x, at);
      const value = line[place];
      const end = at === null && run.lostNow ? lostWords(run) : null;
      const words = end ?? (value === null || value === undefined ? (lostAt(run, x[place] + run.shift) ?? "–") : number(value));
      return found.length > 1 ? `${run.job.name} ${words}` : words;
    });
    return `${at === null ? "" : `${place(over, at)}  `}${read.join(" · ")}`;
  }

  #drawSteps(timed, over) {
    const { curve } = this.#known;
    const { at, step } = curve;
    show(this.step.node, over === "time" && at.length > 0);
    const words = (x) => (x === null ? count(step.at(-1)) : `${clock(x)}  ${count(step[nearest(at, x)])}`);
    this.step.update("Steps", at.length ? {
      ...timed, x: at, columns: [step], lines: [{ colour: "accent", width: 1.75 }], moments: at, words,
      label: `Steps: ${count(step[0])} at ${clock(at[0])}, ${count(step.at(-1))} at ${clock(at.at(-1))}`,
    } : null, "");
  }

  #drawWorkers(timed, all) {
    const { training, wanted, curve } = this.#known;
    const extended = training.length ? [...training, [all[1], training.at(-1)[1]]] : [];
    const { times, columns } = together(extended, [...wanted, [all[1], wanted.at(-1)?.[1] ?? 0]]);
    const said = (i) => `${columns[0][i] ?? 0} of ${columns[1][i] ?? 0} wanted`;
    const words = (x) => (x === null ? said(times.length - 1) : `${clock(x)}  ${said(last(times, x))}`);
    this.workers.update("Workers training", {
      ...timed, axis: true, x: times, columns, moments: curve.at.length ? curve.at : times, words,
      lines: [{ colour: "good", width: 1.75, fill: "good-soft" }, { colour: "muted", width: 1, dash: [4, 4] }],
      label: `Workers training: ${said(0)} at ${clock(times[0])}, ${said(times.length - 1)} at ${clock(times.at(-1))}`,
    }, "No worker yet.");
  }

  #choose(names) {
    show(this.chips, names.length > 1);
    const shown = new Set(this.#names({ names }));
    const toggle = (name) => () => {
      const now = this.#names({ names: this.#answers.get(this.#known.job.uid)?.names ?? [] });
      const chosen = now.includes(name) ? now.filter((other) => other !== name) : [...now, name];
      this.#chosen = chosen.length ? chosen : [name];
      remember({ m: this.#chosen });
      this.#askSoon(0);
      this.#draw();
    };
    keyed(this.chips, names, (name) => name,
      (name) => el("button", { type: "button", onclick: toggle(name) }, name),
      (chip, name) => chip.setAttribute("aria-pressed", String(shown.has(name))));
  }

  /** What runs are compared, and in which words of their commands they differ; what is missing, and why. */
  #tell(job, own, compared) {
    const rows = compared.length ? [job, ...compared] : [];
    show(this.runs, rows.length > 0);
    const words = rows.map((run) => (this.#answers.get(run.uid)?.command ?? "").split(/\s+/).filter(Boolean));
    const common = new Set(words[0]?.filter((word) => words.every((others) => others.includes(word))));
    const key = (run) => `${run.namespace}/${run.name}`;
    const drop = (run) => this.#set({ vs: route().settings.getAll("vs").filter((name) => name !== key(run)) }, true);
    const against = compared.find((run) => key(run) === route().settings.get("diff")) ?? null;
    const turn = (run) => this.#set({ diff: route().settings.get("diff") === key(run) ? null : key(run) });
    keyed(this.runs, rows.map((run, i) => ({ run, i })), ({ run }) => run.uid, ({ run, i }) => el("li", {},
      el("span", { class: "swatch", "aria-hidden": "true" }),
      i ? el("a", { href: href(run) }, run.name) : el("b", {}, run.name),
      el("span", { class: "muted" }), el("code"),
      i ? el("button", { type: "button", class: "copy", "aria-label": `How ${run.name} differs`, onclick: () => turn(run) }, "differences") : "",
      i ? el("button", { type: "button", class: "copy", "aria-label": `Take ${run.name} out`, onclick: () => drop(run) }, "remove") : ""),
    ({ children: [swatch, , phase, code, opens] }, { run, i }) => {
      swatch.dataset.run = i;
      opens?.setAttribute("aria-expanded", String(run.uid === against?.uid));
      say(phase, run.phase);
      const differs = (word) => word !== undefined && !common.has(word);
      say(code, words[i].filter((word, at) => differs(word) || (word.startsWith("-") && differs(words[i][at + 1]))).join(" "));
    });
    this.differences.update(job, against);
    const missing = own && !own.stored && own.names.length ? (own.trouble || "the job has no storage, or is older than this version.") : "";
    show(this.note, Boolean(missing));
    say(this.note, missing ? UNKEPT + missing : "");
    this.csv.href = tablePath(job);
    this.#offer(job);
  }

  /** Other jobs, the newest first. */
  #offer(job) {
    const chosen = new Set(route().settings.getAll("vs"));
    const names = this.others().filter((other) => other.uid !== job.uid).map((other) => `${other.namespace}/${other.name}`)
      .filter((name) => !chosen.has(name)).slice(0, 200);
    const { compare } = this.tools;
    if (document.activeElement !== compare) {
      keyed(compare, ["", ...names], (name) => name, (name) => el("option", { value: name }, name || "Another run …"), () => {});
    }
    show(compare.parentElement, names.length > 0 && chosen.size < MAX_COMPARED);
  }

  #fillValues(runs, names) {
    const rows = names.flatMap((name) => runs.flatMap(({ job, told }) => {
      const found = told.series[name];
      if (!found) return [];
      const end = found.lostNow ? lostWords(found) : number(found.last);
      return [[job.name, name, end, number(found.min), number(found.max)]];
    }));
    show(this.details, rows.length > 0);
    this.values.fill(rows);
  }

  /** All charts below each other, with their titles, as a file. */
  #picture() {
    const charts = this.#drawnCharts();
    const unit = devicePixelRatio;
    const head = 24 * unit;
    const width = Math.max(...charts.map(({ canvas }) => canvas.width));
    const height = charts.reduce((sum, { canvas }) => sum + canvas.height + head, 0);
    const page = Object.assign(document.createElement("canvas"), { width, height });
    const pen = page.getContext("2d");
    pen.fillStyle = colour("surface");
    pen.fillRect(0, 0, width, height);
    pen.font = `${13 * unit}px system-ui, sans-serif`;
    let top = 0;
    for (const chart of charts) {
      const { canvas } = chart;
      let left = 8 * unit;
      for (const [words, name] of this.#head(chart)) {
        pen.fillStyle = colour(name);
        pen.fillText(words, left, top + 16 * unit);
        left += pen.measureText(words).width + 12 * unit;
      }
      pen.drawImage(canvas, 0, top + head);
      top += canvas.height + head;
    }
    page.toBlob((blob) => this.#save(blob, "png"));
  }

  /** The same with lines and words that stay such. */
  #drawing() {
    const drawings = this.#drawnCharts().map((chart) => ({ ...chart.drawing, head: this.#head(chart) }));
    this.#save(new Blob([sheet(drawings)], { type: "image/svg+xml" }), "svg");
  }

  #drawnCharts() {
    return [...this.#shownCharts(), this.step, this.workers].filter(({ canvas, node }) => canvas && !node.hidden);
  }

  /** What stands above a chart in a file: [words, colour], with all runs that are in it. */
  #head(chart) {
    const { job } = this.#known;
    const compared = chart === this.step || chart === this.workers ? [] : this.#compared;
    const runs = compared.map((run, i) => [run.name, `run-${i + 1}`]);
    return [[`${job.name}: ${chart.title}`, runs.length ? "accent" : "text"], ...runs];
  }

  #save(blob, extension) {
    const link = el("a", { href: URL.createObjectURL(blob), download: `${this.#known.job.name}.${extension}` });
    link.click();
    URL.revokeObjectURL(link.href);
  }
}

function choice(label, options, onChange) {
  const select = el("select", { onchange: onChange }, ...Object.entries(options).map(([value, words]) => el("option", { value }, words)));
  el("label", {}, el("span", {}, label), select);
  return select;
}

/** From the first x of any metric of any run to the last: the same for all of them. */
function extent(series) {
  const some = series.filter(([found]) => found?.x.length);
  const low = Math.min(...some.map(([{ x }, shift]) => x[0] - shift));
  const high = Math.max(...some.map(([{ x }, shift]) => x.at(-1) - shift));
  return some.length ? [low, Math.max(high, low + 1)] : [0, 1];
}

const place = (over, x) => ({ time: clock, elapsed: span, step: (step) => `step ${count(Math.round(step))}`, samples: (samples) => plural(Math.round(samples), "sample") })[over](x);
const lostWords = ({ lostNow: [step, word] }) => `${word} since step ${count(step)}`;
const lostAt = ({ lost }, x) => lost.findLast(([at]) => at <= x)?.[1] ?? null;

function inWords(name, run, [x, line], over) {
  const begin = Math.max(0, line.findIndex((value) => value !== null));
  const end = x.length - 1;
  const ending = run.lostNow ? lostWords(run) : number(line[end] ?? null);
  return `${name}: ${number(line[begin])} at ${place(over, x[begin])}, ${ending} at ${place(over, x[end])}`;
}
