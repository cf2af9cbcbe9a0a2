// How numbers, times and money are said: short, and the same way as on the command line.

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const money = new Intl.NumberFormat("en", { style: "currency", currency: "USD" });

export const count = (number) => plain.format(number);
export const short = (number) => (Math.abs(number) < 10_000 ? plain.format(number) : compact.format(number));
export const dollars = (amount) => money.format(amount);
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

/** 0.4s, 12s, 3m40s, 2h05m, 3d4h. */
export function span(seconds) {
  if (seconds < 10) return `${Math.max(seconds, 0).toFixed(1)}s`;
  const whole = Math.round(seconds);
  const two = (number) => String(number).padStart(2, "0");
  if (whole < 60) return `${whole}s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}m${two(whole % 60)}s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)}h${two(Math.floor((whole % 3600) / 60))}m`;
  return `${Math.floor(whole / 86400)}d${Math.floor((whole % 86400) / 3600)}h`;
}

/** An age, in whole seconds: tenths would flicker. */
export function ago(seconds) {
  if (seconds < 1) return "just now";
  return `${seconds < 60 ? `${Math.floor(seconds)}s` : span(seconds)} ago`;
}

/** "120 of 560". */
export const of = (part, whole) => (whole ? `${count(part)} of ${count(whole)}` : count(part));

/** A metric, in as many digits as say something; null: there is none. */
export function number(value) {
  if (value === null) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

/** The ticks of an axis of metrics: short enough for its width, and as many digits as tell them apart. */
export function marksOf(values) {
  const far = Math.max(...values.map(Math.abs));
  if (far < 1e6 && (far === 0 || far >= 0.001)) return values.map(number);
  const written = (digits) => values.map((value) => (value === 0 ? "0" : value.toExponential(digits).replace("e+", "e")));
  return [0, 1, 2].map(written).find((ticks) => new Set(ticks).size === ticks.length) ?? written(2);
}

export function bytes(size) {
  if (size < 1024) return `${size} B`;
  const units = ["KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(Math.floor(Math.log2(size) / 10), units.length);
  return `${Number((size / 1024 ** power).toPrecision(3))} ${units[power - 1]}`;
}

const day = new Intl.DateTimeFormat("en", { day: "numeric", month: "short" });
const minute = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const second = new Intl.DateTimeFormat("en", {
  hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23",
});

/** The time of day; with the date, when it was not today. */
export function clock(at) {
  const moment = new Date(1000 * at);
  const today = moment.toDateString() === new Date().toDateString();
  return today ? second.format(moment) : `${day.format(moment)} ${minute.format(moment)}`;
}

/** A tick of a time axis whose ticks are so far apart. */
export function tick(at, apartS) {
  const moment = new Date(1000 * at);
  if (apartS < 60) return second.format(moment);
  return apartS < 86400 ? minute.format(moment) : day.format(moment);
}
