// The policy in force, and what each generation changed.
import { $, el } from "/page/dom.js";
import * as api from "/page/api.js";

const when = (ms) => (ms ? new Date(ms).toLocaleString() : "the start");

function diff(changes) {
  if (!changes.length) return el("p", { class: "note", text: "Nothing that decides." });
  return el("table", {},
    el("caption", { class: "visually-hidden", text: "Settings that changed" }),
    el("thead", {}, el("tr", {}, ...["Setting", "Before", "After"].map((text) => el("th", { scope: "col", text })))),
    el("tbody", {}, ...changes.map((change) => el("tr", {},
      el("td", {}, el("code", { text: change.key })),
      el("td", {}, change.from === null ? "–" : el("span", { class: "diff-from", text: change.from })),
      el("td", {}, change.to === null ? "removed" : el("span", { class: "diff-to", text: change.to }))))));
}

function generation(entry, first) {
  return [el("h3", { text: `Generation ${entry.generation} (${entry.name || "unnamed"}), since ${when(entry.since_ms)}` }),
    first ? el("p", { class: "note", text: "The first that is remembered." }) : diff(entry.changes)];
}

/** How the policy stands, and what is tried in its shadow. */
function standing(policy) {
  const lines = (policy.conditions ?? []).map((one) => el("li", {},
    el("span", { class: one.status === "True" ? "yes" : "no", text: `${one.type}: ${one.status}` }), ` ${one.message || one.reason}`));
  const shadow = policy.shadow ?? { state: "off" };
  if (shadow.state === "unresolved") lines.push(el("li", {}, el("span", { class: "no", text: "Shadow: " }), `${shadow.name} cannot be had`));
  if (shadow.state === "evaluated") lines.push(el("li", {}, `Shadow: ${shadow.name || "unnamed"}, generation ${shadow.generation}. ${shadow.rules.map((rule) => rule.says).join(" ")}`));
  return lines;
}

export async function load() {
  const policy = await api.get("/v1/policy");
  $("policy-lead").textContent = `${policy.name || "unnamed"}, generation ${policy.generation}, in force since ${when(policy.since_ms)}`;
  $("rules").replaceChildren(...policy.rules.map((rule) => el("li", {},
    el("p", { class: "concerns", text: `For ${rule.concerns}:` }), el("p", { text: rule.says }),
    el("p", { class: "concerns", text: rule.onNoPrefill === "Fail" ? "Without a prefill pod the request is refused." : "Without a prefill pod the decode pod does both." }))));
  $("settings").tBodies[0].replaceChildren(...policy.settings.map((setting) => el("tr", {},
    el("td", {}, el("code", { text: setting.key })), el("td", { text: setting.value }))));
  $("standing").replaceChildren(...standing(policy));
  const all = [policy, ...policy.history];
  $("changes").replaceChildren(...all.flatMap((entry, index) => generation(entry, index === all.length - 1)));
}
