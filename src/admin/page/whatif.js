// "What if": edited thresholds, and the last decisions decided again under them.
import { $, clock, el, number, plural, share, throttled } from "/page/dom.js";
import * as api from "/page/api.js";
import { meaning, tag } from "/page/words.js";

/** The thresholds that each type looks at. */
const ISL = ["effectiveIslThreshold", "effectiveIslRatioThreshold", "coldBypassBelow"];
const READS = {
  Never: [],
  Always: ["decodeBusyThreshold"],
  IslBounding: [...ISL, "decodeBusyThreshold"],
  PrefillLoad: ["prefillBusyThreshold", "decodeBusyThreshold"],
  IslOrLoad: [...ISL, "prefillBusyThreshold", "decodeBusyThreshold"],
};
const DEFAULTS = { effectiveIslThreshold: 2048, effectiveIslRatioThreshold: 0.7, coldBypassBelow: 0, prefillBusyThreshold: 1, decodeBusyThreshold: "" };

let policy = null;
let turn = null;

const inputs = () => [...$("what-if").querySelectorAll("input[data-key]")];
const faultOf = (input) => $(`${input.id}-fault`);

function rule() {
  return $("wi-rule").value === "all" ? 0 : Number($("wi-rule").value);
}

function fill() {
  const bypass = policy.rules[rule()]?.bypass ?? { type: "Never" };
  $("wi-type").value = bypass.type;
  for (const input of inputs()) input.value = bypass[input.dataset.key] ?? DEFAULTS[input.dataset.key];
  if (bypass.type !== "Never" && bypass.decodeBusyThreshold === undefined) $("wi-decode").value = "";
  enable();
}

function enable() {
  for (const input of inputs()) input.disabled = !READS[$("wi-type").value].includes(input.dataset.key);
}

/** What stands in a field: a number if it is one, else the text, for the picker to say what is wrong. */
function value(input) {
  const text = input.value.trim();
  return text !== "" && Number.isFinite(Number(text)) ? Number(text) : text;
}

function asked() {
  const bypass = { type: $("wi-type").value };
  for (const input of inputs()) {
    if (!input.disabled && input.value.trim() !== "") bypass[input.dataset.key] = value(input);
  }
  const inForce = policy.rules[rule()]?.bypass ?? {};
  if (READS[bypass.type].includes("effectiveIslThreshold") && inForce.tierCredit) bypass.tierCredit = inForce.tierCredit;
  if (bypass.decodeBusyThreshold !== undefined && inForce.trustCapacity) bypass.trustCapacity = inForce.trustCapacity;
  return $("wi-rule").value === "all" ? { bypass } : { bypass, rule: rule() };
}

function faults(list) {
  const rest = [];
  for (const input of [...inputs(), $("wi-type")]) {
    const own = list.filter((fault) => fault.path === `bypass.${input.dataset.key}`);
    const place = faultOf(input);
    place.hidden = !own.length;
    place.textContent = own.map((fault) => fault.message).join("; ");
    if (own.length) input.setAttribute("aria-invalid", "true");
    else input.removeAttribute("aria-invalid");
  }
  const known = new Set([...inputs(), $("wi-type")].map((input) => `bypass.${input.dataset.key}`));
  for (const fault of list) if (!known.has(fault.path)) rest.push(`${fault.path}: ${fault.message}`);
  $("wi-fault").hidden = !rest.length;
  $("wi-fault").textContent = rest.join("; ");
}

async function decideAgain() {
  turn?.abort();
  turn = new AbortController();
  try {
    show(await api.post("/v1/what-if", asked(), turn.signal));
    faults([]);
  } catch (error) {
    if (error.name === "AbortError") return;
    faults(error.faults?.length ? error.faults : [{ path: "request", message: error.message }]);
    $("wi-note").textContent = "Not decided: see the fields marked.";
  }
}

function bar(tally, total) {
  const parts = [["bypass", tally.bypass], ["local", tally.local], ["remote", tally.remote], ["refused", tally.refused]];
  return el("div", { class: "bar", "aria-hidden": "true" }, ...parts.map(([name, count]) => share(el("span", { class: name === "local" ? "" : name }), count / total)));
}

function words(tally) {
  const refused = tally.refused ? `, ${number(tally.refused)} refused` : "";
  return `${number(tally.bypass)} bypass, ${number(tally.local)} other local, ${number(tally.remote)} remote${refused}; ` +
    `${number(tally.prefill_tokens_remote)} tokens prefilled remotely, ${number(tally.prefill_tokens_local)} locally`;
}

const pods = (verdict) => (verdict.prefill_pod ? `${verdict.prefill_pod} → ${verdict.decode_pod}` : verdict.decode_pod ?? "");

function verdictCell(verdict) {
  return el("td", { title: meaning(verdict.because) }, tag(verdict), " ", el("code", { text: verdict.because }), " ", pods(verdict));
}

function show(answer) {
  const total = Math.max(1, answer.considered);
  $("wi-note").textContent = answer.considered
    ? `${number(answer.changed)} of the last ${plural(answer.considered, "decision")} would have come out otherwise.`
    : "No decision is remembered yet.";
  $("wi-bars").replaceChildren(
    el("p", { class: "legend", "aria-hidden": "true" }, el("span", { class: "bypass", text: "bypass" }), el("span", { text: "other local" }), el("span", { class: "remote", text: "remote prefill" }), el("span", { class: "refused", text: "refused" })),
    el("div", { class: "compare" },
      el("span", { text: "as it was" }), bar(answer.before, total), el("p", { class: "tally", text: words(answer.before) }),
      el("span", { text: "would be" }), bar(answer.after, total), el("p", { class: "tally", text: words(answer.after) })));
  const rows = answer.decisions.filter((one) => one.changed).slice(0, 100).map((one) => el("tr", {},
    el("td", {}, el("a", { class: "open", href: `#/decision/${one.id}`, text: clock(one.time_ms) })),
    el("td", { class: "number", text: number(one.prompt_tokens) }), verdictCell(one.before), verdictCell(one.after)));
  $("wi-table").tBodies[0].replaceChildren(...rows);
  $("wi-table").hidden = !rows.length;
}

export async function load() {
  const before = policy?.generation;
  policy = await api.get("/v1/policy");
  if (before !== policy.generation) {
    const option = (value, text) => el("option", { value, text });
    $("wi-rule").replaceChildren(...policy.rules.map((one, index) => option(String(index), `rule ${index}: ${one.concerns}`)), option("all", "every rule"));
    fill();
  }
  await decideAgain();
}

export function start() {
  const soon = throttled(300, decideAgain);
  $("what-if").addEventListener("submit", (event) => {
    event.preventDefault();
    decideAgain();
  });
  $("what-if").addEventListener("input", () => {
    enable();
    soon();
  });
  $("wi-rule").addEventListener("change", () => {
    fill();
    soon();
  });
  $("wi-reset").addEventListener("click", () => {
    fill();
    decideAgain();
  });
}
