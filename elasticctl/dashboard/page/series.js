// From what the server tells of a job's course to columns over time.

/** Several step functions of [moment, value] as columns over the moments at which any of them changes. */
export function together(...functions) {
  const times = [...new Set(functions.flat().map(([at]) => at))].sort((one, other) => one - other);
  const columns = functions.map((steps) => {
    let position = 0;
    let value = null;
    return times.map((at) => {
      while (position < steps.length && steps[position][0] <= at) value = steps[position++][1];
      return value;
    });
  });
  return { times, columns };
}

/** From the first thing known to the end, or to now: the same for all charts of a job. */
export function range(known, now) {
  const moments = [...known.curve.at, ...known.wanted.map(([at]) => at)];
  const begin = Math.min(...moments, known.job.startedAt ?? now);
  const end = Math.max(known.job.endedAt ?? now, ...known.curve.at);
  return [begin, Math.max(end, begin + 1)];
}

/** What is drawn through all charts, at moments. */
export function marks(known) {
  return [
    ...known.scalings.map(({ at }) => ({ x: at, kind: "scaling" })),
    ...known.interruptions.map(({ at }) => ({ x: at, kind: "interruption" })),
  ].filter(({ x }) => x !== null);
}

/** A column that follows `weight` of what was before it, without the pull of its first value; gaps stay gaps. */
export function smoothed(column, weight) {
  let sum = 0;
  let seen = 0;
  return column.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    seen = weight * seen + (1 - weight);
    return sum / seen;
  });
}

/** Does a curve span so much that only a logarithmic axis shows it? Losses do. */
export const spansDecades = (name, runs) =>
  /loss|perplexity|ppl/i.test(name) && runs.every(({ min }) => min > 0) && runs.some(({ min, max }) => max / min >= 100);
