// One chart, drawn by uPlot: lines with bands, marks through them, a cursor that all charts share, zoom and pan.

import uPlot from "./vendor/uPlot.esm.js";
import { el, say, show } from "./dom.js";
import { marksOf, short, span, tick } from "./format.js";

const AXIS_PX = 64;
/** Half of the longest label below a chart: the last one may stand at its right edge. */
const HALF_LABEL_PX = 28;
const FONT = "12px system-ui, sans-serif";
const ZOOM = 1.6;
const PAN = 0.25;

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** How the values of x are written along the axis. */
const ALONG = {
  time: (_, moments, axis, space, apartS) => moments.map((at) => tick(at, apartS)),
  elapsed: (_, ages) => ages.map((age) => (age < 0 ? "" : span(age))),
  step: wholes,
  samples: wholes,
};

function wholes(_, numbers) {
  return numbers.map((number) => (Number.isInteger(number) ? short(number) : ""));
}

/** A chart with a title and a reading: of its end, or of what is under the cursor. */
export class Chart {
  #plot = null;
  #made = "";
  #drawn = null;
  #reading = el("span", { class: "reading", "aria-live": "off" });
  #title = el("span", { class: "title" });
  #box = el("div", { class: "plot", role: "img", tabindex: "0" });
  #none = el("p", { class: "nothing" });

  /**
   * `kind`: stepped, whole, fromZero. `on`: zoom([low, high] or null), pick(x), of somebody who asks for another
   * part, or points at a moment.
   */
  constructor(kind, on) {
    this.kind = kind;
    this.on = on;
    this.node = el("figure", {}, el("figcaption", {}, this.#title, this.#reading), this.#box, this.#none);
    this.#box.addEventListener("keydown", (event) => this.#key(event));
    this.#box.addEventListener("blur", () => this.point(null));
    this.#box.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    this.#box.addEventListener("dblclick", () => on.zoom(null));
    new ResizeObserver(() => this.#fit()).observe(this.#box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#make());
  }

  get canvas() {
    return this.#box.querySelector("canvas");
  }

  get title() {
    return this.#title.textContent;
  }

  /** What is drawn, and where. */
  get drawing() {
    return { plot: this.#plot, drawn: this.#drawn, stepped: Boolean(this.kind.stepped) };
  }

  /**
   * Draw `columns` over `x` in `range`, `over` time, elapsed, step or samples, with an `axis` below or without; `lines` says how each column looks, `bands` which two
   * columns enclose a ground. `moments` are where the cursor stops, `words(x)` what is read there (null: at the end),
   * `label` the whole in words. `none` is said where there is nothing.
   */
  update(title, drawn, none) {
    const some = drawn !== null && drawn.x.length > 0;
    say(this.#title, title);
    show(this.#box, some);
    show(this.#none, !some);
    say(this.#none, none ?? "");
    this.#drawn = some ? drawn : null;
    if (!some) {
      say(this.#reading, "");
      return;
    }
    this.#box.classList.toggle("with-axis", Boolean(drawn.axis));
    if (this.#plot && this.#made === shape(drawn)) this.#plot.setData([drawn.x, ...drawn.columns]);
    else this.#make();
    this.#read();
    this.#box.setAttribute("aria-label", drawn.label);
  }

  /** The arrow keys go from point to point; with shift they pan. Plus and minus zoom, 0 shows all, Enter picks. */
  #key(event) {
    if (!this.#drawn || event.ctrlKey || event.metaKey || event.altKey) return;
    const { moments } = this.#drawn;
    const now = this.#moment();
    const at = now === null ? moments.length : nearest(moments, now);
    const go = {
      ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: moments.length - 1, Escape: null,
    }[event.key];
    const pan = { ArrowLeft: -PAN, ArrowRight: PAN }[event.key];
    const zoom = { "+": 1 / ZOOM, "=": 1 / ZOOM, "-": ZOOM }[event.key];
    if (event.shiftKey && pan) this.pan(pan);
    else if (zoom) this.zoom(zoom, now);
    else if (event.key === "0") this.on.zoom(null);
    else if (event.key === "Enter" && now !== null) this.on.pick(now);
    else if (go !== undefined) this.point(go === null ? null : moments[Math.min(Math.max(go, 0), moments.length - 1)]);
    else return;
    event.preventDefault();
  }

  /** Show so many times as much, around `x` or the middle. */
  zoom(times, x = null) {
    if (!this.#drawn) return;
    const [low, high] = this.#drawn.range;
    const around = x ?? (low + high) / 2;
    this.on.zoom([around - (around - low) * times, around + (high - around) * times]);
  }

  /** Show what is beside, by a part of what is seen. */
  pan(part) {
    if (!this.#drawn) return;
    const [low, high] = this.#drawn.range;
    this.on.zoom([low + part * (high - low), high + part * (high - low)]);
  }

  /** Sideways pans; with Ctrl, as on maps, it zooms. Everything else scrolls the page. */
  #wheel(event) {
    if (!this.#plot || !this.#drawn) return;
    const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
    if (event.ctrlKey) {
      const over = this.#plot.over.getBoundingClientRect();
      this.zoom(ZOOM ** Math.sign(event.deltaY), this.#plot.posToVal(event.clientX - over.left, "x"));
    } else if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) this.pan(sideways / 1000);
    else return;
    event.preventDefault();
  }

  /** Put the cursor of all charts at an x (null: nowhere), as the mouse would, and have it read out. */
  point(x) {
    this.#reading.setAttribute("aria-live", x === null ? "off" : "polite");
    this.#plot?.setCursor(x === null ? { left: -10, top: -10 } : { left: this.#plot.valToPos(x, "x"), top: 0 }, true, true);
  }

  #make() {
    if (!this.#drawn) return;
    this.#plot?.destroy();
    this.#made = shape(this.#drawn);
    this.#plot = new uPlot(this.#options(), [this.#drawn.x, ...this.#drawn.columns], this.#box);
    let downAt = null;
    this.#plot.over.addEventListener("mousedown", (event) => { downAt = event.clientX; });
    this.#plot.over.addEventListener("click", (event) => {
      const moment = this.#moment();
      if (downAt !== null && Math.abs(event.clientX - downAt) < 3 && moment !== null) this.on.pick(moment);
    });
  }

  #fit() {
    if (!this.#plot) this.#make();
    const { clientWidth: width, clientHeight: height } = this.#box;
    if (this.#plot && width) this.#plot.setSize({ width, height });
  }

  #options() {
    const { kind } = this;
    const { over, log, lines, bands = [], axis: withAxis } = this.#drawn;
    const axis = { stroke: colour("muted"), font: FONT, grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false } };
    const along = { ...axis, size: withAxis ? 26 : 0, incrs: APART[over], values: withAxis ? ALONG[over] : () => [], space: 90 };
    const paths = kind.stepped ? uPlot.paths.stepped({ align: 1 }) : uPlot.paths.linear();
    const grid = log ? { ...axis.grid, filter: (_, splits) => splits.map((split) => (isPower(split) ? split : null)) } : axis.grid;
    const up = { ...axis, grid, size: AXIS_PX, space: 24, incrs: kind.whole ? WHOLE : undefined, values: kind.whole ? whole : log ? powers : marked };
    return {
      width: this.#box.clientWidth || 300,
      height: this.#box.clientHeight,
      padding: [8, HALF_LABEL_PX, withAxis ? 0 : 4, 0],
      legend: { show: false },
      cursor: {
        sync: { key: over }, y: false, drag: { x: true, y: false, setScale: false },
        points: kind.stepped ? { show: false } : { size: 7, show: (_, i) => (lines[i - 1].width ? el("div") : false) },
      },
      scales: {
        x: { time: over === "time", range: () => this.#drawn.range },
        y: { distr: log ? 3 : 1, range: (_, low, high) => this.#limits(low, high) },
      },
      axes: [along, up],
      series: [{}, ...lines.map((line) => ({
        stroke: line.width ? colour(line.colour) : undefined,
        width: line.width,
        alpha: line.alpha ?? 1,
        dash: line.dash,
        fill: line.fill ? colour(line.fill) : undefined,
        points: { show: false },
        paths: line.width || line.fill ? paths : uPlot.paths.linear(),
      }))],
      bands: bands.map(({ high, low, fill }) => ({ series: [high, low], fill: colour(fill) })),
      hooks: {
        drawAxes: [(plot) => this.#mark(plot)],
        setCursor: [() => this.#read()],
        setSelect: [(plot) => this.#select(plot)],
      },
    };
  }

  #select(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.on.zoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
  }

  #limits(low, high) {
    if (low === null || high === null) return this.#drawn.log ? [0.1, 1] : [0, 1];
    if (this.#drawn.log) return [low / 1.25, high * 1.25];
    if (this.kind.fromZero) return [0, Math.max(1, high) * 1.12];
    const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
    return [low - room, high + room];
  }

  /** Interruptions as lines under an arrowhead, scalings as broken lines, others by a word: told apart without colours. */
  #mark(plot) {
    const { ctx, bbox } = plot;
    const unit = devicePixelRatio;
    ctx.save();
    ctx.lineWidth = unit;
    for (const { x: value, kind, word } of this.#drawn.marks) {
      const isFaint = kind === "scaling" || kind === "now";
      const x = Math.round(plot.valToPos(value, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = ctx.fillStyle = colour(isFaint ? "muted" : kind === "deadline" ? "text" : "bad");
      ctx.setLineDash(isFaint ? [3 * unit, 3 * unit] : []);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      if (word) {
        const left = x > bbox.left + bbox.width / 2;
        ctx.font = `600 ${12 * unit}px system-ui, sans-serif`;
        ctx.textAlign = left ? "right" : "left";
        ctx.textBaseline = "top";
        ctx.fillText(word, x + (left ? -5 : 5) * unit, bbox.top + 2 * unit);
      }
      if (kind !== "interruption") continue;
      ctx.beginPath();
      ctx.moveTo(x - 4 * unit, bbox.top);
      ctx.lineTo(x + 4 * unit, bbox.top);
      ctx.lineTo(x, bbox.top + 6 * unit);
      ctx.fill();
    }
    ctx.restore();
  }

  #read() {
    if (this.#drawn) say(this.#reading, this.#drawn.words(this.#moment()));
  }

  /** What is under the cursor, or null: the nearest of the moments, the same in all charts. */
  #moment() {
    const left = this.#plot?.cursor.left ?? -1;
    if (left < 0 || !this.#drawn) return null;
    const { moments } = this.#drawn;
    const under = this.#plot.posToVal(left, "x");
    return moments.length ? moments[nearest(moments, under)] : under;
  }
}

/** What a plot has to be made anew for. */
const shape = ({ over, log, axis, lines }) => JSON.stringify([over, log, axis, lines]);

const isPower = (value) => Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-9;

/** The last of the rising `numbers` that is not beyond `x`; -1: all are. */
export function last(numbers, x) {
  let [low, high] = [0, numbers.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] <= x) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

export function nearest(numbers, x) {
  const before = last(numbers, x);
  if (before < 0) return 0;
  return before + 1 < numbers.length && numbers[before + 1] - x < x - numbers[before] ? before + 1 : before;
}

const WHOLE = Array.from({ length: 16 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();
const MINUTES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800];
const HOURS = [1, 2, 3, 6, 12, 24, 48, 96, 240, 480, 960].map((hours) => hours * 3600);
const APART = { elapsed: [...MINUTES, ...HOURS], step: WHOLE, samples: WHOLE };
const whole = (_, splits) => splits.map(short);

/** On a logarithmic axis powers of ten are told, or all where there are fewer than two of them. */
function powers(plot, splits) {
  const told = splits.map((split) => (split !== null && isPower(split) ? split : null));
  return marked(plot, told.filter((split) => split !== null).length < 2 ? splits : told);
}

function marked(_, splits) {
  const words = marksOf(splits.filter((split) => split !== null));
  return splits.map((split) => (split === null ? "" : words.shift()));
}
