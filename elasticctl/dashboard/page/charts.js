// Curves over time, drawn by uPlot: one time axis for all, so that what happened can be read down the page.

import uPlot from "./vendor/uPlot.esm.js";
import { el, say, show } from "./dom.js";
import { clock, tick } from "./words.js";

const AXIS_PX = 54;
const FONT = "12px system-ui, sans-serif";
const SYNC = uPlot.sync("course");

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** One chart with a title and a reading: of the last point, or of the one under the cursor. */
export class Chart {
  #plot = null;
  #drawn = { times: [], columns: [], range: [0, 1], marks: [] };
  #reading = el("span", { class: "reading" });
  #title = el("span", { class: "title" });
  #box = el("div", { class: "plot", role: "img" });
  #none = el("p", { class: "nothing" });

  /** `kind`: colours of the lines, read(values) in words, and whether stepped, whole, fromZero, withTime. */
  constructor(kind) {
    this.kind = kind;
    this.node = el("figure", {}, el("figcaption", {}, this.#title, this.#reading), this.#box, this.#none);
    this.#box.classList.toggle("with-time", Boolean(kind.withTime));
    new ResizeObserver(() => this.#fit()).observe(this.#box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#make());
  }

  /** Draw `columns` over `times` (seconds since the epoch) in `range`, with `marks`; `none` is said where there is nothing. */
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
    const [first, last] = [begin, times.length - 1].map(
      (i) => `${this.kind.read(columns.map((column) => column[i]))} at ${clock(times[i])}`,
    );
    return `${title}: ${first}, ${last}`;
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
      cursor: { sync: { key: SYNC.key }, y: false, drag: { x: false, y: false }, points: { size: 7 } },
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

  /** Interruptions as lines under an arrowhead, scalings as broken lines: told apart without their colours. */
  #mark(plot) {
    const { ctx, bbox } = plot;
    const unit = devicePixelRatio;
    ctx.save();
    ctx.lineWidth = unit;
    for (const { at, kind } of this.#drawn.marks) {
      const x = Math.round(plot.valToPos(at, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = ctx.fillStyle = colour(kind === "interruption" ? "bad" : "muted");
      ctx.setLineDash(kind === "interruption" ? [] : [3 * unit, 3 * unit]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
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
    const { times, columns } = this.#drawn;
    const under = this.#plot?.cursor.idx ?? times.length;
    const hovered = under < times.length; // the cursor may stand where the last job's course was longer
    const at = hovered ? under : times.length - 1;
    const values = columns.map((column) => column[at]);
    const when = hovered ? `${clock(times[at])}  ` : "";
    say(this.#reading, values[0] === null || values[0] === undefined ? "" : when + this.kind.read(values));
  }
}

const WHOLE = Array.from({ length: 16 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();

function ticks(_, moments, axis, space, apartS) {
  return moments.map((at) => tick(at, apartS));
}
