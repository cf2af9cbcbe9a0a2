// Nothing is changed without being asked: the dialog before scale, suspend, resume and cancel.

import { byId, say, show } from "./dom.js";
import { plural } from "./format.js";

const QUESTIONS = {
  scale: (job) => ({
    title: `Scale ${job.name}`,
    text: `It has ${plural(job.desired, "worker")} now. Training goes on from a committed step.`,
    yes: "Scale",
    no: "Leave it",
  }),
  suspend: (job) => ({
    title: `Suspend ${job.name}?`,
    text: "Its workers commit a last step and stop. Resume goes on from there.",
    yes: "Suspend",
    no: "Let it run",
  }),
  resume: (job) => ({
    title: `Resume ${job.name}?`,
    text: `${plural(job.desired, "worker")} will start and go on from the last checkpoint.`,
    yes: "Resume",
    no: "Leave it suspended",
  }),
  cancel: (job) => ({
    title: `Cancel ${job.name} for good?`,
    text: "Its workers stop and the job cannot be resumed. Its status, logs and checkpoints stay.",
    yes: "Cancel the job",
    no: "Let it run",
    danger: true,
  }),
};

let asked = 0;

/**
 * Ask, and then do it: `carryOut(workers)` is awaited while the dialog is open, and what it throws is shown there, or
 * told to `late(message)` when it is closed by then or asks something else.
 */
export function ask(verb, job, carryOut, late) {
  const dialog = byId("ask");
  asked += 1;
  const mine = asked;
  const question = QUESTIONS[verb](job);
  const workers = byId("ask-workers");
  say(byId("ask-title"), question.title);
  say(byId("ask-text"), question.text);
  say(byId("ask-yes"), question.yes);
  say(byId("ask-no"), question.no);
  say(byId("ask-error"), "");
  byId("ask-yes").classList.toggle("danger", Boolean(question.danger));
  show(byId("ask-number"), verb === "scale");
  workers.disabled = verb !== "scale";
  workers.min = Math.max(1, job.min);
  workers.max = job.max === null ? "" : Math.max(job.max, 1);
  workers.value = job.desired;
  say(byId("ask-bounds"), workers.max ? `from ${workers.min} to ${workers.max}` : `${workers.min} or more`);
  byId("ask-no").onclick = () => dialog.close();
  byId("ask-form").onsubmit = async (event) => {
    event.preventDefault();
    byId("ask-yes").disabled = true;
    let refused = null;
    try {
      await carryOut(verb === "scale" ? Number(workers.value) : null);
    } catch (error) {
      refused = error.message;
    }
    if (mine !== asked || !dialog.open) {
      if (refused !== null) late(refused);
      return;
    }
    byId("ask-yes").disabled = false;
    if (refused === null) dialog.close();
    else say(byId("ask-error"), refused);
  };
  byId("ask-yes").disabled = false;
  dialog.showModal();
  (verb === "scale" ? workers : byId("ask-no")).focus();
}
