// Curves over time, drawn by uPlot: one time axis for all, so that what happened can be read down the page.

import uPlot from "./vendor/uPlot.esm.js";
import { el, say, show } from "./dom.js";
import { clock, tick } from "./words.js";

const AXIS_PX = 64;
const FONT = "12px system-ui, sans-serif";
const SYNC = uPlot.sync("course");

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** One chart with a title and a reading: of the last point, or of the one under the cursor. */
export class Chart {
  #plot = null;
  #drawn = { times: [], columns: [], range: [0, 1], marks: [] };
  #reading = el("span", { class: "reading", "aria-live": "off" });
  #title = el("span", { class: "title" });
  #box = el("div", { class: "plot", role: "img", tabindex: "0" });
  #none = el("p", { class: "nothing" });

  /** `kind`: colours of the lines, read(values) in words, and whether stepped, whole, fromZero, withTime. */
  constructor(kind) {
    this.kind = kind;
    this.node = el("figure", {}, el("figcaption", {}, this.#title, this.#reading), this.#box, this.#none);
    this.#box.classList.toggle("with-time", Boolean(kind.withTime));
    this.#box.addEventListener("keydown", (event) => this.#step(event));
    this.#box.addEventListener("blur", () => this.#point(null));
    new ResizeObserver(() => this.#fit()).observe(this.#box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#make());
  }

  /**
   * Draw `columns` over `times` (seconds since the epoch) in `range`, with `marks`; `none` is said where there is nothing,
   * `gap` where the first column has no value from the point `begin` on.
   */
  update(title, drawn, none) {
    this.#drawn = drawn;
    const some = drawn.times.length > 0;
    say(this.#title, title);
    show(this.#box, some);
    show(this.#none, !some);
    say(this.#none, none);
    if (!some) {
      say(this.#reading, "");
      return;
    }
    if (this.#plot && this.#plot.series.length === drawn.columns.length + 1) {
      this.#plot.setData([drawn.times, ...drawn.columns]);
    } else this.#make();
    this.#read();
    this.#box.setAttribute("aria-label", this.#inWords(title));
  }

  #inWords(title) {
    const { times, columns } = this.#drawn;
    const begin = Math.max(0, columns[0].findIndex((value) => value !== null));
    const [first, last] = [begin, times.length - 1].map((i) => `${this.#words(i)} at ${clock(times[i])}`);
    return `${title}: ${first}, ${last}`;
  }

  /** The values of a point, or what there is instead of them. */
  #words(point) {
    const { columns, begin, gap } = this.#drawn;
    const values = columns.map((column) => column[point]);
    if (values[0] !== null && values[0] !== undefined) return this.kind.read(values);
    return gap !== undefined && point >= begin ? gap : "";
  }

  /** The arrow keys go from point to point, Home and End to the first and last, Escape leaves them. */
  #step(event) {
    const { times, moments = times } = this.#drawn;
    const known = moments.length ? moments : times;
    const now = this.#moment();
    const at = now === null ? known.length : nearest(known, now);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: known.length - 1, Escape: null }[event.key];
    if (to === undefined || !this.#plot) return;
    event.preventDefault();
    this.#point(to === null ? null : known[Math.min(Math.max(to, 0), known.length - 1)]);
  }

  /** Put the cursor of all charts at a moment (null: nowhere), as the mouse would, and have it read out. */
  #point(at) {
    this.#reading.setAttribute("aria-live", at === null ? "off" : "polite");
    this.#plot?.setCursor(at === null ? { left: -10, top: -10 } : { left: this.#plot.valToPos(at, "x"), top: 0 }, true, true);
  }

  #make() {
    if (!this.#drawn.times.length) return;
    this.#plot?.destroy();
    this.#plot = new uPlot(this.#options(), [this.#drawn.times, ...this.#drawn.columns], this.#box);
  }

  #fit() {
    if (!this.#plot) this.#make();
    const { clientWidth: width, clientHeight: height } = this.#box;
    if (this.#plot && width) this.#plot.setSize({ width, height });
  }

  #options() {
    const { kind } = this;
    const line = { stroke: colour("muted"), font: FONT, grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false } };
    const time = { ...line, size: kind.withTime ? 26 : 0, values: kind.withTime ? ticks : () => [], space: 90 };
    const paths = kind.stepped ? uPlot.paths.stepped({ align: 1 }) : uPlot.paths.linear();
    return {
      width: this.#box.clientWidth || 300,
      height: this.#box.clientHeight,
      padding: [8, 8, kind.withTime ? 0 : 4, 0],
      legend: { show: false },
      cursor: {
        sync: { key: SYNC.key }, y: false, drag: { x: false, y: false },
        points: kind.stepped ? { show: false } : { size: 7 },
      },
      scales: { x: { range: () => this.#drawn.range }, y: { range: (_, low, high) => this.#limits(low, high) } },
      axes: [time, { ...line, size: AXIS_PX, space: 24, incrs: kind.whole ? WHOLE : undefined, values: kind.axis }],
      series: [
        {},
        ...kind.colours.map((name, position) => ({
          stroke: colour(name),
          width: position ? 1 : 1.75,
          dash: position ? [4, 4] : undefined,
          fill: kind.stepped && !position ? colour(`${name}-soft`) : undefined,
          points: { show: false },
          paths,
        })),
      ],
      hooks: { drawAxes: [(plot) => this.#mark(plot)], setCursor: [() => this.#read()] },
    };
  }

  #limits(low, high) {
    if (low === null || high === null) return [0, 1];
    if (this.kind.fromZero) return [0, Math.max(1, high) * 1.12];
    const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
    return [low - room, high + room];
  }

  /** Interruptions as lines under an arrowhead, scalings as broken lines, lost values by a word: told apart without colours. */
  #mark(plot) {
    const { ctx, bbox } = plot;
    const unit = devicePixelRatio;
    ctx.save();
    ctx.lineWidth = unit;
    for (const { at, kind, word } of this.#drawn.marks) {
      const x = Math.round(plot.valToPos(at, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = ctx.fillStyle = colour(kind === "scaling" ? "muted" : "bad");
      ctx.setLineDash(kind === "scaling" ? [3 * unit, 3 * unit] : []);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      if (kind === "lost") {
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
    const { times } = this.#drawn;
    const at = this.#moment();
    if (at === null) {
      say(this.#reading, this.#words(times.length - 1));
      return;
    }
    const words = this.#words(this.kind.stepped ? last(times, at) : nearest(times, at));
    say(this.#reading, words && `${clock(at)}  ${words}`);
  }

  /** The moment under the cursor, or null: that of the nearest point of the curve, the same in all charts. */
  #moment() {
    const left = this.#plot?.cursor.left ?? -1;
    if (left < 0) return null;
    const { times, moments = times } = this.#drawn;
    const under = this.#plot.posToVal(left, "x");
    return moments.length ? moments[nearest(moments, under)] : under;
  }
}

/** The last of the rising `times` that is not after `at`; -1: all are. */
function last(times, at) {
  let [low, high] = [0, times.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] <= at) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

function nearest(times, at) {
  const before = last(times, at);
  if (before < 0) return 0;
  return before + 1 < times.length && times[before + 1] - at < at - times[before] ? before + 1 : before;
}

const WHOLE = Array.from({ length: 16 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();

function ticks(_, moments, axis, space, apartS) {
  return moments.map((at) => tick(at, apartS));
}
