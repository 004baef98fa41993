// One decision in full: its checks, the nearest flip, every pod with its cost.
//
// The record is shown as soon as it is there, the pods when they are; a large table is written over
// several frames, what a reader looks at first before the rest.
import { $, clock, el, milliseconds, number, percent, plural, precise, share, throttled } from "/page/dom.js";
import * as api from "/page/api.js";
import { brief, hold } from "/page/live.js";
import { nameOf } from "/page/pods.js";
import { KEYS, kind, meaning, settings, tag } from "/page/words.js";

/** Rows of the table of pods that are written at once. */
const AT_ONCE = 25;
/** Rows per frame after these. */
const PER_FRAME = 75;
/** Rows of the table: of a large fleet, the rest can be found by name. */
const ROWS = 100;

let back = null;
let wanted = null;

export function start() {
  $("decision-close").addEventListener("click", () => $("decision").close());
  $("decision").addEventListener("close", () => {
    wanted = null;
    // A large table behind a closed dialog would be laid out with every change of the page.
    $("decision-body").replaceChildren();
    if (location.hash.startsWith("#/decision/")) history.replaceState(null, "", "#/now");
    // Before the list goes on: it stays as it was for who came from it.
    back?.focus();
    back = null;
    hold("dialog", false);
  });
}

export function close() {
  if ($("decision").open) $("decision").close();
}

export async function open(id) {
  // First, because a dialog is laid out as it opens.
  const path = `/v1/decisions/${encodeURIComponent(id)}`;
  const asked = [api.get(path), api.get(`${path}/candidates`).catch(() => null)];
  const dialog = $("decision");
  if (!dialog.open) {
    back = document.activeElement;
    hold("dialog", true);
    dialog.showModal();
  }
  wanted = id;
  $("decision-title").textContent = "Decision";
  const known = brief(id);
  $("decision-body").replaceChildren(...(known ? [reason(known), flow(known)] : []), el("p", { class: "note", text: "Loading" }));
  $("decision-title").focus();
  try {
    const record = await asked[0];
    if (wanted !== id) return;
    const place = el("section", { "aria-busy": "true" }, el("div", { class: "panel-head" }, el("h3", { text: "Every pod, as it was seen" })), el("p", { class: "note", text: "Loading" }));
    show(record, place);
    const candidates = await asked[1];
    if (wanted === id) place.replaceWith(candidates ? table(candidates, id) : considered(record));
  } catch (error) {
    const parts = [el("p", { class: "note", text: `${error.message}; newer ones have taken its place.` })];
    if (known) parts.unshift(reason(known), flow(known));
    if (wanted === id) $("decision-body").replaceChildren(...parts);
  }
}

const reason = (decision) => el("p", {}, tag(decision), " ", el("code", { text: decision.because }), " ", meaning(decision.because));

function show(record, pods) {
  const title = { bypass: "Bypass: prefilled where it is decoded", local: "Local", remote: "Remote prefill" }[kind(record)];
  $("decision-title").textContent = title;
  const parts = [reason(record), flow(record), checks(record), shadow(record), facts(record), pods];
  $("decision-body").replaceChildren(...parts.filter((part) => part !== null));
}

function flow(record) {
  const text = record.prefill_pod
    ? `${record.prefill_pod} prefills ${number(record.prompt_tokens)} tokens, ${record.decode_pod} decodes.`
    : `${record.decode_pod} prefills and decodes: ${number(record.net_new_tokens)} of ${number(record.prompt_tokens)} tokens are new to it.`;
  return el("p", { class: "flow", text });
}

function checks(record) {
  const part = el("section", {}, el("h3", { text: "What was compared" }));
  if (!record.checks.length) part.append(el("p", { class: "note", text: "Nothing: the outcome was clear before any threshold." }));
  part.append(el("ul", { class: "checks" }, ...record.checks.map((check) => el("li", {},
    el("span", { class: check.allows_bypass ? "yes" : "no", "aria-hidden": "true", text: check.allows_bypass ? "✓" : "✗" }),
    el("code", { text: check.line.replace(/: (yes|no)$/, "") }),
    el("span", { class: "note", text: `${check.allows_bypass ? "speaks for a bypass" : "speaks against a bypass"} (${KEYS[check.what] ?? check.what})` })))));
  part.append(el("p", {}, el("strong", { text: "Nearest flip: " }), record.flip ? `it ${record.flip}.` : "no single threshold would have sent it the other way."));
  return part;
}

function shadow(record) {
  const other = record.shadow;
  if (!other) return null;
  const pods = other.prefill ? `${nameOf(other.prefill)} prefills, ${nameOf(other.decode)} decodes.` : other.decode ? `${nameOf(other.decode)} does both.` : "";
  return el("section", {}, el("h3", { text: `In the shadow: ${other.policy || "unnamed"}, generation ${other.generation}` }),
    el("p", {}, el("span", { class: other.agrees ? "yes" : "no", text: other.agrees ? "agrees" : "disagrees" }), ": ", tag(other), " ",
      el("code", { text: other.because }), ` ${meaning(other.because)} ${pods}`));
}

function facts(record) {
  const usage = record.usage ?? {};
  const list = [
    ["Time", clock(record.time_ms)],
    ["Model", record.model ?? "–"],
    ["Prompt", `${plural(record.prompt_tokens, "token")} (${record.counted.replaceAll("_", " ")})`],
    ["Cached on the best local pod", `${number(record.cached_tokens)} tokens, ${percent(record.cached_tokens / Math.max(1, record.prompt_tokens))}`],
    ["Cached, as the engine said", usage.cached_tokens == null ? "–" : `${number(usage.cached_tokens)} tokens`],
    ["Policy", `${record.policy || "–"}, generation ${record.generation}, rule ${record.rule}`],
    ["Session", record.session],
    ["Answer", record.end ? `${record.end}, status ${record.status ?? "–"}` : "running"],
    ["TTFT", milliseconds(record.ttft_ms)],
    ["Time to decide", `${number(record.parse_us)} + ${number(record.encode_us)} + ${number(record.decide_us)} µs (parse, encode, decide)`],
    ["Pods looked at", number(record.candidates)],
    ["Id", record.id],
  ];
  const nodes = list.map(([name, text]) => el("div", {}, el("dt", { text: name }), el("dd", { text })));
  if (record.trace_id) {
    const href = settings.trace_link?.replaceAll("{trace_id}", encodeURIComponent(record.trace_id));
    const trace = href ? el("a", { href, target: "_blank", rel: "noreferrer", text: record.trace_id }) : record.trace_id;
    nodes.push(el("div", {}, el("dt", { text: "Trace" }), el("dd", {}, trace)));
  }
  return el("dl", { class: "facts" }, ...nodes);
}

const TERMS = ["prefill", "decode", "requests"];

function offerCell(offer, most) {
  if (offer.not) return el("td", { class: "offer" }, el("span", { class: "why-not", text: offer.not.replaceAll("_", " "), title: meaning(offer.not) }));
  const cost = offer.cost;
  const terms = TERMS.map((term) => `${term} ${precise(cost[term])}`).join(", ");
  return el("td", { class: "offer", title: `${terms}, credit ${precise(cost.credit)}` }, precise(cost.total),
    el("span", { class: "visually-hidden", text: ` (${terms}, credit ${precise(cost.credit)})` }),
    el("div", { class: "bar", "aria-hidden": "true" }, ...TERMS.map((term) => share(el("span", { class: `t-${term}` }), cost[term] / most))));
}

const HEAD = ["Pod", "KV events", "Cached blocks", "Requests", "Prefill tokens", "Decode blocks", "Cost: prefill and decode", "Cost: prefill", "Cost: decode"];

function podRow(pod, most) {
  const cached = `${number(pod.cached_device)}${pod.cached_host + pod.cached_disk ? ` + ${number(pod.cached_host)} host + ${number(pod.cached_disk)} disk` : ""}`;
  const figure = (text) => el("td", { class: "number", text });
  return el("tr", { class: pod.chosen ? "chosen" : "" },
    el("th", { scope: "row" }, pod.pod, el("small", { text: ` ${pod.role}` }), pod.chosen ? el("span", { class: "yes", text: ` ${pod.chosen}s` }) : ""),
    el("td", { text: pod.kv_source === "absent" ? "none" : pod.kv_source }),
    figure(cached), figure(number(pod.requests)), figure(number(pod.prefill_tokens)), figure(number(pod.decode_blocks)),
    offerCell(pod.local, most), offerCell(pod.prefill, most), offerCell(pod.decode, most));
}

/** Writes the rows into `body`, those that come first at once. */
function fill(body, pods) {
  const most = Math.max(1e-9, ...pods.flatMap((pod) => [pod.local, pod.prefill, pod.decode]).map((offer) => offer.cost?.total ?? 0));
  const rows = pods.slice(0, ROWS).map((pod) => podRow(pod, most));
  const write = (count) => {
    body.append(...rows.splice(0, count));
    if (rows.length) requestAnimationFrame(() => body.isConnected && write(PER_FRAME));
  };
  write(AT_ONCE);
}

function table({ pods, left_out: leftOut }, id) {
  const all = pods.length + leftOut;
  const heads = HEAD.map((text, index) => el("th", { scope: "col", class: index > 1 && index < 6 ? "number" : "", text }));
  const found = el("p", { class: "note", role: "status" });
  const grid = el("table", { class: "pods seen" }, el("caption", { class: "visually-hidden", text: "Pods with their costs" }),
    el("thead", {}, el("tr", {}, ...heads)));
  const put = (some) => {
    const body = el("tbody");
    grid.querySelector("tbody")?.remove();
    grid.append(body);
    fill(body, some);
  };
  const count = (text) => {
    found.textContent = text;
  };
  put(pods);
  if (ROWS < all) count(first(all));
  return el("section", {},
    el("div", { class: "panel-head" }, el("h3", { text: "Every pod, as it was seen" }), ROWS < all ? find(id, { pods, all }, put, count) : null),
    ROWS < all ? found : null,
    el("p", { class: "legend" }, ...TERMS.map((term) => el("span", { class: `t-${term}`, text: term })),
      el("span", { class: "plain", text: "Costs are in KV blocks; the cheapest pod of a column is chosen for it." })),
    el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Every pod, as it was seen" }, grid));
}

const first = (all) => `${ROWS} of ${plural(all, "pod")}: the chosen ones, then those of least cost.`;

/** A field that finds pods by name among all of a large fleet; they are asked for when it is used. */
function find(id, { pods, all }, put, count) {
  const input = el("input", { type: "search", autocomplete: "off", spellcheck: "false" });
  let every = null;
  const look = async () => {
    every ??= api.get(`/v1/decisions/${encodeURIComponent(id)}/candidates?most=${all}`);
    try {
      const { pods: known } = await every;
      const text = input.value.trim().toLowerCase();
      const some = text ? known.filter((pod) => pod.pod.toLowerCase().includes(text)) : pods;
      if (!input.isConnected) return;
      put(some);
      const matches = some.length ? `${plural(some.length, "pod")} with “${text}”` : `No pod with “${text}”`;
      count(text ? `${ROWS < some.length ? `${ROWS} of ` : ""}${matches}` : first(all));
    } catch (error) {
      every = null;
      count(`${error.message}: only these ${ROWS} pods are known.`);
    }
  };
  input.addEventListener("input", throttled(150, look));
  return el("label", {}, "Find ", input);
}

/** The three selections alone, for a decision whose pods are no longer remembered. */
function considered(record) {
  const names = { local: "to prefill and decode", prefill: "to prefill", decode: "to decode" };
  const rows = Object.entries(names).filter(([key]) => record.considered[key]).map(([key, text]) => {
    const pick = record.considered[key];
    return el("tr", {}, el("th", { scope: "row", text }), el("td", { text: nameOf(pick.endpoint) }), el("td", { class: "number", text: number(pick.cached_tokens) }),
      ...[...TERMS, "total"].map((term) => el("td", { class: "number", text: precise(pick.cost[term]) })));
  });
  return el("section", {}, el("h3", { text: "The pods considered last" }), el("p", { class: "note", text: "What the others cost is no longer remembered." }),
    el("table", {}, el("thead", {}, el("tr", {}, ...["Best pod", "Pod", "Cached tokens", ...TERMS, "total"].map((text) => el("th", { scope: "col", text })))), el("tbody", {}, ...rows)));
}
