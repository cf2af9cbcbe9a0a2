// The page: what the server tells goes in here, and what is shown comes out.

import { ask } from "./dialogs.js";
import { byId, say, show } from "./dom.js";
import { change, details, follow } from "./feed.js";
import { JobView } from "./job.js";
import { List, ended, sorted } from "./list.js";
import { plural } from "./words.js";

const LOOK_EVERY_MS = 5000;
const TICK_MS = 1000;
const WIDE = matchMedia("(min-width: 900px)");

const jobs = new Map();
const list = new List();
const view = new JobView(byId("job"), doIt);
let hello = null;
let loaded = false;
let trouble = "";
let skewS = 0;
let known = null;
let asking = false;
let askAgain = false;

const now = () => Date.now() / 1000 + skewS;

/** Does the address name a job? */
const named = () => location.hash.split("/").length > 2;

/** The job that the address names; on a wide page, without a name, the first. */
function open() {
  const [, namespace, name] = location.hash.split("/").map(decodeURIComponent);
  if (!name) return WIDE.matches ? (sorted(jobs.values())[0] ?? null) : null;
  return [...jobs.values()].find((job) => job.namespace === namespace && job.name === name) ?? null;
}

function draw() {
  document.body.dataset.view = named() || !jobs.size ? "job" : "list";
  const job = open();
  list.update(sorted(jobs.values()), { open: job?.uid ?? null, now: now(), everywhere: hello?.namespace === null });
  drawTop();
  if (job === null) known = null;
  if (job !== null && known?.job.uid === job.uid) view.update({ ...known, job }, now());
  else if (job !== null) look();
  else drawNothing();
  document.title = job ? `${job.name} ${job.phase} · elasticctl` : "elasticctl";
}

function drawTop() {
  const counts = { running: 0, waiting: 0, suspended: 0, ended: 0 };
  let gpus = 0;
  for (const job of jobs.values()) {
    if (ended(job)) counts.ended += 1;
    else if (job.phase === "Running") counts.running += 1;
    else if (job.phase === "Suspended") counts.suspended += 1;
    else counts.waiting += 1;
    gpus += ended(job) ? 0 : job.active * job.gpusPerWorker;
  }
  const parts = Object.entries(counts).filter(([, number]) => number).map(([kind, number]) => `${number} ${kind}`);
  if (gpus) parts.push(plural(gpus, "GPU"));
  say(byId("summary"), loaded ? parts.join(" · ") : "");
}

function drawNothing() {
  if (trouble) view.clear("No answer from the cluster", trouble);
  else if (!loaded) view.clear("Loading", "Asking the cluster for its jobs.");
  else if (named()) view.clear("This job is gone", "It has been deleted, or was never here.");
  else if (!jobs.size) view.clear("No jobs yet", "They appear here as soon as there are any. To start one, type:", "elasticctl submit train.py");
  else view.clear("No job chosen", "Choose one from the list.");
}

/** Ask for everything about the open job; once at a time. */
async function look() {
  const job = open();
  if (job === null) return;
  askAgain = asking;
  if (asking) return;
  asking = true;
  try {
    const found = await details(job);
    if (found && open()?.uid === found.job.uid) {
      known = found;
      view.update(known, now());
    }
  } catch (error) {
    if (known?.job.uid !== job.uid) view.clear("It cannot be shown", error.message);
  } finally {
    asking = false;
    if (askAgain) look();
  }
}

function doIt(verb) {
  const job = open();
  if (job === null) return;
  ask(verb, job, async (workers) => {
    await change(job, verb, workers, hello.token);
    say(byId("said"), `${job.name}: ${verb === "scale" ? `${plural(workers, "worker")} asked for` : `${verb} asked for`}`);
    setTimeout(() => say(byId("said"), ""), 6000);
  });
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
    trouble = ""; // it is told again, if it still is
    say(byId("place"), news.namespace === null ? `${news.context}, all namespaces` : `${news.context} / ${news.namespace}`);
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
  trouble(news) {
    trouble = news.message;
    connection("stale", "Waiting for the cluster");
    banner(jobs.size ? `${trouble} What is shown is from before.` : "");
    draw();
  },
  well() {
    trouble = "";
    connection("live", "Live");
    banner("");
    draw();
  },
  lost() {
    connection("lost", "Reconnecting");
    banner("The dashboard does not answer. Trying again; if it has ended, type elasticctl dashboard.");
  },
  ended() {
    connection("lost", "Ended");
    banner("This dashboard has ended, or too many pages watch it. To open another: elasticctl dashboard");
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
