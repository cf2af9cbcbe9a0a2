// Who is logged in, where many share a dashboard. The token goes to the server once, and is kept nowhere here.

import { byId, say, show } from "./dom.js";

/**
 * Must somebody log in here? Then they are asked to, and true. `known`: somebody was: the page begins anew, so that
 * nothing of theirs stays.
 */
export async function asksForLogin(known) {
  let answer;
  try {
    answer = await fetch("session", { redirect: "manual" });
  } catch {
    return false;
  }
  const elsewhere = answer.type === "opaqueredirect"; // the proxy in front sends us to its own login
  if (!elsewhere && answer.status !== 401) return false;
  if (known || elsewhere) {
    location.reload();
    return true;
  }
  const { error, asks } = await answer.json().catch(() => ({ error: "", asks: "proxy" }));
  ask(error, asks === "token");
  return true;
}

function ask(why, byToken) {
  const token = byId("login-token");
  show(byId("login-by-token"), byToken);
  token.disabled = !byToken;
  say(byId("login-error"), why);
  say(byId("login-yes"), byToken ? "Log in" : "Try again");
  byId("login").oncancel = (event) => event.preventDefault();
  byId("login-form").onsubmit = async (event) => {
    event.preventDefault();
    say(byId("login-error"), "");
    byId("login-yes").disabled = true;
    const refused = byToken ? await logIn(token.value) : "";
    token.value = "";
    if (!refused) {
      location.reload();
      return;
    }
    say(byId("login-error"), refused);
    byId("login-yes").disabled = false;
    token.focus();
  };
  byId("login").showModal();
}

/** One line that says why not, or "". */
async function logIn(token) {
  try {
    const headers = { "Content-Type": "application/json" };
    const answer = await fetch("login", { method: "POST", headers, body: JSON.stringify({ token }) });
    return answer.ok ? "" : (await answer.json()).error;
  } catch {
    return "The dashboard does not answer.";
  }
}

/** Say who is logged in, let them out, and let them choose a namespace; `hello` is what the server told first. */
export function showPerson(hello) {
  for (const id of ["who", "log-out", "scope"]) show(byId(id), Boolean(hello.user));
  show(byId("place"), !hello.user);
  say(byId("who"), hello.user);
  show(byId("limits"), !hello.storages);
  document.body.classList.toggle("looking", !hello.changes);
  if (document.activeElement !== byId("scope-name")) byId("scope-name").value = hello.namespace ?? "";
  byId("scope").onsubmit = (event) => {
    event.preventDefault();
    const name = byId("scope-name").value.trim();
    location.assign(`${hello.namespace === null ? "./" : "../../"}${name && `in/${encodeURIComponent(name)}/`}`);
  };
  byId("log-out").onclick = async () => {
    const { next } = await (await fetch("logout", { method: "POST" })).json();
    if (next) location.assign(next);
    else location.reload();
  };
}
