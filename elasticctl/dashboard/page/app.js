// The page: what the server tells goes in here, and what is shown comes out.

import { route } from "./route.js";
import { ask } from "./dialogs.js";
import { byId, say, show } from "./dom.js";
import { change, details, follow, stacks } from "./feed.js";
import { JobView } from "./job.js";
import { List, ended, sorted } from "./list.js";
import { asksForLogin, showPerson } from "./login.js";
import { ProjectsView, waiting, waits } from "./projects.js";
import { TeamView } from "./team.js";
import { plural } from "./format.js";

const LOOK_EVERY_MS = 5000;
const TICK_MS = 1000;
const SLOW_MS = 200; // until then what was shown stays, lest the page flickers
const SAID_MS = 8000;
const WIDE = matchMedia("(min-width: 900px)");

const jobs = new Map();
const list = new List();
const view = new JobView(byId("job"), doIt, () => sorted(jobs.values()), (job) => stacks(job, hello.token));
const projectsView = new ProjectsView(byId("job"), (namespace, name) => find(namespace, name) !== null);
const teamView = new TeamView(byId("job"));
let hello = null;
let loaded = false;
let projects = null;
let trouble = "";
let skewS = 0;
let first = null;
let known = null;
let chosen = { uid: null, atMs: 0, failed: false };
let asked = null;
let askAgain = false;
let hush = 0;
let stoodAt = null;

/** The server's time; while nothing is heard of it, nothing is known to go on. */
const now = () => stoodAt ?? Date.now() / 1000 + skewS;

function stand() {
  stoodAt = now();
}

/** Does the address name a job, or all projects? */
const named = () => route().parts.length > 1;
const onProjects = () => route().parts.length === 1 && route().parts[0] === "projects";
const onTeam = () => route().parts.length === 1 && route().parts[0] === "overview";

const find = (namespace, name) => [...jobs.values()].find((job) => job.namespace === namespace && job.name === name) ?? null;

/** The job that the address names; on a wide page, without a name, the first, and then that one for as long as it is there. */
function open() {
  if (onProjects() || onTeam() || (!named() && !WIDE.matches)) return null;
  if (!named()) {
    if (!jobs.has(first)) first = sorted(jobs.values())[0]?.uid ?? null;
    return jobs.get(first) ?? null;
  }
  return find(...route().parts);
}

function draw() {
  document.body.dataset.view = named() || onProjects() || onTeam() || !jobs.size ? "job" : "list";
  const job = open();
  list.update(sorted(jobs.values()), { open: job?.uid ?? null, now: now(), everywhere: hello?.namespace === null });
  drawTop();
  if (onProjects() || onTeam()) drawAll();
  else drawJob(job);
  const whole = onProjects() ? "Projects" : onTeam() ? "Overview" : "";
  const title = job ? `${job.name} ${job.phase}` : whole;
  document.title = title ? `${title} · elasticctl` : "elasticctl";
  byId("job").setAttribute("aria-label", whole || "Job");
  say(byId("skip"), `Skip to the ${(whole || "job").toLowerCase()}`);
}

function drawJob(job) {
  projectsView.hide();
  teamView.hide();
  if (job === null) {
    known = null;
    drawNothing();
  } else if (known?.job.uid === job.uid) view.update({ ...known, job }, now());
  else {
    drawSoon(job);
    look();
  }
}

/** Another job is asked for: what is shown of the last one goes, unless the answer comes at once. */
function drawSoon(job) {
  if (chosen.uid !== job.uid) {
    chosen = { uid: job.uid, atMs: performance.now(), failed: false };
    setTimeout(draw, SLOW_MS);
  } else if (performance.now() - chosen.atMs >= SLOW_MS && !chosen.failed) {
    view.clear("Loading", `Asking the cluster about ${job.name}.`);
  }
}

/** What is of all jobs, not of one. */
function drawAll() {
  view.hide();
  if (onTeam()) {
    projectsView.hide();
    teamView.update(sorted(jobs.values()), now(), projects);
    return;
  }
  teamView.hide();
  projectsView.update(projects, trouble || "Asking the cluster who holds what.");
}

function drawTop() {
  const counts = { running: 0, waiting: 0, suspended: 0, ended: 0 };
  let gpus = 0;
  for (const job of jobs.values()) {
    if (ended(job)) counts.ended += 1;
    else if (job.phase === "Running") counts.running += 1;
    else if (job.phase === "Suspended") counts.suspended += 1;
    else counts.waiting += 1;
    gpus += ended(job) ? 0 : job.placed * job.gpusPerWorker;
  }
  const parts = Object.entries(counts).filter(([, number]) => number).map(([kind, number]) => `${number} ${kind}`);
  if (gpus) parts.push(plural(gpus, "GPU"));
  say(byId("summary"), loaded ? parts.join(" · ") : "");
  const link = byId("to-projects");
  show(link, onProjects() || Boolean(projects?.pools.length));
  say(link, projects && waiting(projects) ? `Projects · ${waits(waiting(projects))}` : "Projects");
  for (const [node, here] of [[link, onProjects()], [byId("to-team"), onTeam()]]) {
    if (here) node.setAttribute("aria-current", "page");
    else node.removeAttribute("aria-current");
  }
}

function drawNothing() {
  const narrower = hello?.user && hello.namespace === null ? " Or name a namespace at the top." : "";
  if (trouble) view.clear("No answer from the cluster", trouble + narrower);
  else if (!loaded) view.clear("Loading", "Asking the cluster for its jobs.");
  else if (named()) view.clear("This job is gone", "It has been deleted, or was never here.");
  else if (!jobs.size) view.clear("No jobs yet", "They appear here as soon as there are any. To start one, type:", "elasticctl submit train.py");
  else view.clear("No job chosen", "Choose one from the list.");
}

/** Ask for everything about the open job; once at a time, and no longer for one that is not open any more. */
async function look() {
  const job = open();
  if (job === null) return;
  if (asked?.uid === job.uid) {
    askAgain = true;
    return;
  }
  asked?.calling.abort();
  const mine = { uid: job.uid, calling: new AbortController() };
  asked = mine;
  askAgain = false;
  try {
    const found = await details(job, mine.calling.signal);
    if (found && open()?.uid === found.job.uid) {
      known = found;
      view.update(known, now());
    }
  } catch (error) {
    if (asked === mine && known?.job.uid !== job.uid) {
      chosen.failed = true;
      view.clear("It cannot be shown", error.message);
    }
  } finally {
    if (asked === mine) {
      asked = null;
      if (askAgain) look();
    }
  }
}

/** To the job whose buttons are seen, which may not be the chosen one yet. */
function doIt(verb) {
  const job = jobs.get(view.shown);
  if (!job) return;
  const carryOut = async (workers) => {
    await change(job, verb, workers, hello.token);
    tell(`${job.name}: ${verb === "scale" ? `${plural(workers, "worker")} asked for` : `${verb} asked for`}`);
  };
  ask(verb, job, carryOut, (refused) => tell(`${job.name}: no ${verb}: ${refused}`));
}

/** Say something for a moment. */
function tell(text) {
  clearTimeout(hush);
  say(byId("said"), text);
  hush = setTimeout(() => say(byId("said"), ""), SAID_MS);
}

function connection(state, text) {
  byId("connection").dataset.state = state;
  say(byId("connection"), text);
}

function banner(text) {
  say(byId("banner"), text);
  show(byId("banner"), Boolean(text));
}

follow({
  hello(news) {
    hello = news;
    stoodAt = null;
    trouble = ""; // it is told again, if it still is
    say(byId("place"), news.namespace === null ? `${news.context}, all namespaces` : `${news.context} / ${news.namespace}`);
    showPerson(news);
    connection("live", "Live");
    banner("");
  },
  jobs(news) {
    loaded = true;
    skewS = news.now - Date.now() / 1000;
    if (news.whole) jobs.clear();
    for (const job of news.rows) jobs.set(job.uid, job);
    for (const uid of news.gone) jobs.delete(uid);
    const job = open();
    draw();
    if (job && news.rows.some((row) => row.uid === job.uid)) look();
  },
  projects(news) {
    projects = news;
    draw();
  },
  trouble(news) {
    trouble = news.message;
    stand();
    connection("stale", "Waiting for the cluster");
    banner(jobs.size ? `${trouble} What is shown may be out of date.` : "");
    draw();
  },
  well() {
    trouble = "";
    stoodAt = null;
    connection("live", "Live");
    banner("");
    draw();
  },
  lost() {
    stand();
    connection("lost", "Reconnecting");
    banner("The dashboard does not answer. Trying again; if it has ended, type elasticctl dashboard.");
  },
  async ended() {
    stand();
    if (await asksForLogin(Boolean(hello?.user))) return true;
    connection("lost", "Ended");
    banner("This dashboard has ended, or too many pages watch it. To open another: elasticctl dashboard");
    return false;
  },
});

addEventListener("hashchange", () => {
  draw();
  if (!WIDE.matches && document.body.dataset.view === "job") byId("job").focus();
});
WIDE.addEventListener("change", draw);
byId("skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("job").focus();
});
setInterval(() => loaded && !document.hidden && draw(), TICK_MS);
setInterval(() => !document.hidden && look(), LOOK_EVERY_MS);
draw();
