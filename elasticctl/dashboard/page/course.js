// From what the server tells of a job's course to columns over time.

/** Columns that began later are shorter: fill them up in front. */
export function padded(column, length) {
  return [...Array(Math.max(0, length - column.length)).fill(null), ...column.slice(-length)];
}

/** The moments from which on a column has no value though it had begun: the numbers were not finite. */
export function gaps(column, times) {
  const begin = times.length - column.length;
  return column.flatMap((value, i) => (value === null && (i === 0 || column[i - 1] !== null) ? [times[begin + i]] : []));
}

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

/** What is drawn through all charts. */
export function marks(known) {
  return [
    ...known.scalings.map(({ at }) => ({ at, kind: "scaling" })),
    ...known.interruptions.map(({ at }) => ({ at, kind: "interruption" })),
  ].filter(({ at }) => at !== null);
}
