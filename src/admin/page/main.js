// The page put together: views, polling, the stream, the token.
import { $ } from "/page/dom.js";
import * as api from "/page/api.js";
import { startTheme } from "/page/theme.js";
import { settings } from "/page/words.js";
import * as pods from "/page/pods.js";
import * as live from "/page/live.js";
import * as detail from "/page/detail.js";
import * as policy from "/page/policy.js";
import * as whatIf from "/page/whatif.js";

const VIEWS = ["now", "what-if", "policy"];
const TITLES = { now: "decisions", "what-if": "what if", policy: "policy" };

function trouble(error) {
  $("trouble").hidden = !error;
  if (error) $("trouble").textContent = error.message;
}

function state(name, error) {
  $("link-state").dataset.state = name;
  $("link-state").textContent = name === "live" ? "live" : "no connection";
  if (name === "live") trouble(null);
  else if (error?.status && error.status !== 401) trouble(error);
}

/** The view that the address names, and the decision, if it names one (`#/decision/ID`). */
function route(moved) {
  const [, name, id] = location.hash.split("/");
  if (name === "decision" && id) {
    detail.open(decodeURIComponent(id));
    return;
  }
  detail.close();
  const view = VIEWS.includes(name) ? name : "now";
  for (const other of VIEWS) $(`view-${other}`).hidden = other !== view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  live.hold("view", view !== "now");
  if (view === "now") pods.redraw();
  document.title = `sidestep: ${TITLES[view]}`;
  if (moved) $("main").focus({ preventScroll: true });
  if (view === "policy") policy.load().catch(trouble);
  if (view === "what-if") whatIf.load().catch(trouble);
}

async function poll() {
  let wait = 1000;
  try {
    if (document.visibilityState === "visible") {
      const found = await api.get("/v1/pods");
      pods.show(found, !$("view-now").hidden && !$("decision").open);
      // A large fleet is a large answer.
      wait = found.length > 200 ? 2000 : 1000;
    }
  } catch (error) {
    if (error.status === 401) return;
    pods.unknown();
    if (error.status) trouble(error);
  }
  setTimeout(poll, wait);
}

async function start() {
  Object.assign(settings, await api.get("/v1/settings"));
  live.start();
  poll();
  api.follow({ state, decisions: live.decisions, outcomes: live.outcomes });
  route(false);
}

api.onTokenNeeded((wrong) => {
  $("login-fault").hidden = !wrong;
  $("login-fault").textContent = "The picker does not know this token.";
  if (!$("login").open) $("login").showModal();
});
$("login").addEventListener("cancel", (event) => event.preventDefault());
$("login-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  api.setToken($("login-token").value.trim());
  try {
    await api.get("/v1/settings");
    $("login").close();
    await start();
  } catch (error) {
    if (error.status !== 401) trouble(error);
  }
});

startTheme(() => pods.redraw());
pods.start();
detail.start();
whatIf.start();
window.addEventListener("hashchange", () => route(true));
start().catch((error) => {
  if (error.status !== 401) trouble(error);
});
