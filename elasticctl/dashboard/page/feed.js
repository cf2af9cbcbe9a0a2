// What the server tells, and what it is asked. The browser itself comes back after a break, and says what it has seen.

const AGAIN_MS = 5000;
const QUIET_MS = 45_000; // three signs of life that did not come

/**
 * Follow the stream of news. `on` has hello, jobs, projects, trouble, well, lost (a break), ended (nobody there who
 * knows us; true: it is no use to come back). A connection that is silent for long is none: a laptop has slept, or a tunnel has died without a word.
 */
export function follow(on) {
  const source = new EventSource("events");
  let heardAt = Date.now();
  const hear = () => {
    heardAt = Date.now();
  };
  for (const name of ["hello", "jobs", "projects", "trouble", "well"]) {
    source.addEventListener(name, (event) => {
      hear();
      on[name](JSON.parse(event.data));
    });
  }
  source.addEventListener("alive", hear);
  const watch = setInterval(() => {
    if (Date.now() - heardAt < QUIET_MS) return;
    clearInterval(watch);
    source.close();
    on.lost();
    follow(on);
  }, AGAIN_MS);
  source.addEventListener("error", () => {
    hear(); // the browser knows of the break, and comes back by itself
    if (source.readyState !== EventSource.CLOSED) {
      on.lost();
      return;
    }
    clearInterval(watch);
    comeBack(on); // it was refused: full, nobody logged in, or another dashboard by now
  });
}

async function comeBack(on) {
  if (!(await on.ended())) setTimeout(() => follow(on), AGAIN_MS);
}

/** Metrics of a job: `names` of them over time or step, `part` of it or all, in about so many points; null: it is gone. */
export async function curves(job, { over, names, part, points }, signal) {
  const asked = new URLSearchParams({ x: over, points, ...(part && { from: part[0], to: part[1] }) });
  for (const name of names) asked.append("m", name);
  const answer = await fetch(`${path(job)}/metrics?${asked}`, { signal });
  if (answer.status === 404) return null;
  if (!answer.ok) throw new Error(await reason(answer));
  return answer.json();
}

/** How `other` differs from a job: { rows, code, lines, more, troubles }; throws an Error with one line that says why not. */
export async function compare(job, other) {
  const answer = await fetch(`${path(job)}/compare?${new URLSearchParams({ with: `${other.namespace}/${other.name}` })}`);
  if (!answer.ok) throw new Error(await reason(answer));
  return answer.json();
}

/** Lines of a job's log: { lines, more }; null: it is gone. */
export async function logs(job, query) {
  const answer = await fetch(`${path(job)}/logs?${new URLSearchParams(query)}`);
  if (answer.status === 404) return null;
  if (!answer.ok) throw new Error(await reason(answer));
  return answer.json();
}

/** Where all ranks of a job are: { lines, more, troubles }; throws an Error with one line that says why not. */
export async function stacks(job, token) {
  const answer = await fetch(`${path(job)}/stacks`, { method: "POST", headers: { "X-Elasticctl-Token": token } });
  if (!answer.ok) throw new Error(await reason(answer));
  return answer.json();
}

/** Where all values of a job's metrics are. */
export const tablePath = (job) => `${path(job)}/metrics.csv`;

const path = (job) => `jobs/${encodeURIComponent(job.namespace)}/${encodeURIComponent(job.name)}`;

/** Everything about a job; null when it is gone. `signal` calls it off. */
export async function details(job, signal) {
  const answer = await fetch(path(job), { signal });
  if (answer.status === 404) return null;
  if (!answer.ok) throw new Error(await reason(answer));
  return answer.json();
}

/** Have something done to this very job; throws an Error with one line that says why not. */
export async function change(job, verb, workers, token) {
  const body = JSON.stringify(verb === "scale" ? { uid: job.uid, workers } : { uid: job.uid });
  const headers = { "Content-Type": "application/json", "X-Elasticctl-Token": token };
  let answer;
  try {
    answer = await fetch(`${path(job)}/${verb}`, { method: "POST", headers, body });
  } catch {
    throw new Error("The dashboard does not answer: nothing may have been done.");
  }
  if (!answer.ok) throw new Error(await reason(answer));
}

async function reason(answer) {
  try {
    return (await answer.json()).error;
  } catch {
    return `refused (${answer.status})`;
  }
}
