// Charts as SVG, for papers and slides: what uPlot has drawn, with words that stay words.

import { colour } from "./charts.js";

const HEAD_PX = 24;
const NS = "http://www.w3.org/2000/svg";

function node(tag, attributes, ...children) {
  const made = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Charts below each other as the text of an SVG file; `drawings` are `Chart.drawing`, each with its `head`: [words, colour]. */
export function sheet(drawings) {
  const width = Math.max(...drawings.map(({ plot }) => plot.width));
  const height = drawings.reduce((sum, { plot }) => sum + HEAD_PX + plot.height, 0);
  let top = 0;
  const charts = drawings.map((drawing) => {
    const made = node("g", { transform: `translate(0 ${top})` }, ...chart(drawing));
    top += HEAD_PX + drawing.plot.height;
    return made;
  });
  const ground = node("rect", { width, height, fill: colour("surface") });
  const font = { "font-family": "system-ui, sans-serif", "font-size": 12 };
  return new XMLSerializer().serializeToString(node("svg", { viewBox: `0 0 ${width} ${height}`, width, height, ...font }, ground, ...charts));
}

function chart({ plot, drawn, stepped, head }) {
  const [left, top, width, height] = ["left", "top", "width", "height"].map((side) => plot.bbox[side] / devicePixelRatio);
  const spans = head.map(([words, name], i) => node("tspan", { fill: colour(name), dx: i ? 12 : undefined }, words));
  const at = { x: left, y: top + HEAD_PX };
  return [
    node("text", { x: 8, y: 16, "font-size": 13 }, ...spans),
    node("g", { transform: `translate(${at.x} ${at.y})` }, ...axes(plot, width, height)),
    node("svg", { ...at, width, height }, ...bands(plot, drawn), ...lines(plot, drawn, stepped, height), ...marks(plot, drawn, height, width)),
  ];
}

/** The grid, and the words along it. */
function axes(plot, width, height) {
  return plot.axes.flatMap((axis, i) => (axis._splits ?? []).flatMap((split, place) => {
    const words = axis._values?.[place] ?? "";
    const at = round(plot.valToPos(split, i ? "y" : "x"));
    if (at < 0 || at > (i ? height : width) || (i && !words)) return [];
    const line = i ? { x1: 0, x2: width, y1: at, y2: at } : { x1: at, x2: at, y1: 0, y2: height };
    const where = i ? { x: -10, y: at + 4, "text-anchor": "end" } : { x: at, y: height + 15, "text-anchor": "middle" };
    return [node("line", { ...line, stroke: colour("grid") }), ...(words ? [node("text", { ...where, fill: colour("muted") }, words)] : [])];
  }));
}

function bands(plot, { bands: pairs = [] }) {
  return pairs.flatMap(({ high, low, fill }) => runs(plot, plot.data[high], plot.data[low]).map((run) => {
    const edge = [...run.map(([x, top]) => [x, top]), ...run.map(([x, , bottom]) => [x, bottom]).reverse()];
    return node("path", { d: `M${edge.join("L")}Z`, fill: colour(fill) });
  }));
}

function lines(plot, drawn, stepped, height) {
  return drawn.lines.flatMap((line, i) => runs(plot, plot.data[i + 1]).flatMap((run) => {
    const points = stepped ? run.flatMap(([x, y], place) => (place ? [[x, run[place - 1][1]], [x, y]] : [[x, y]])) : run;
    const d = `M${points.join("L")}`;
    const area = `${d}L${points.at(-1)[0]},${height}L${points[0][0]},${height}Z`;
    const stroke = { stroke: colour(line.colour), "stroke-width": line.width, "stroke-dasharray": line.dash?.join(" "), opacity: line.alpha };
    return [
      ...(line.fill ? [node("path", { d: area, fill: colour(line.fill) })] : []),
      ...(line.width ? [node("path", { d, fill: "none", ...stroke })] : []),
    ];
  }));
}

function marks(plot, drawn, height, width) {
  return drawn.marks.flatMap(({ x: value, kind, word }) => {
    const x = round(plot.valToPos(value, "x"));
    if (x < 0 || x > width) return [];
    const isFaint = kind === "scaling" || kind === "now";
    const shade = colour(isFaint ? "muted" : kind === "deadline" ? "text" : "bad");
    const isLeft = x > width / 2;
    return [
      node("line", { x1: x, x2: x, y1: 0, y2: height, stroke: shade, "stroke-dasharray": isFaint ? "3 3" : undefined }),
      ...(word ? [node("text", { x: x + (isLeft ? -5 : 5), y: 12, fill: shade, "font-weight": 600, "text-anchor": isLeft ? "end" : "start" }, word)] : []),
      ...(kind === "interruption" ? [node("path", { d: `M${x - 4},0L${x + 4},0L${x},6Z`, fill: shade })] : []),
    ];
  });
}

/** Columns as runs of points without a gap, where they are drawn; undefined is no point, null is a gap. */
function runs(plot, ...columns) {
  const found = [[]];
  plot.data[0].forEach((at, i) => {
    const values = columns.map((column) => column[i]);
    if (values.includes(undefined)) return;
    if (values.includes(null)) found.push([]);
    else found.at(-1).push([round(plot.valToPos(at, "x")), ...values.map((value) => round(plot.valToPos(value, "y")))]);
  });
  return found.filter((run) => run.length > 0);
}

const round = (pixels) => Math.round(100 * pixels) / 100;
