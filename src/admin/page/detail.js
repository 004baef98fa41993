// One decision in full: its checks, the nearest flip, every pod with its cost.
import { $, clock, el, milliseconds, number, percent, plural, precise, share } from "/page/dom.js";
import * as api from "/page/api.js";
import { brief } from "/page/live.js";
import { KEYS, kind, meaning, settings, tag } from "/page/words.js";

let back = null;
let wanted = null;

export function start() {
  $("decision-close").addEventListener("click", () => $("decision").close());
  $("decision").addEventListener("close", () => {
    wanted = null;
    if (location.hash.startsWith("#/decision/")) history.replaceState(null, "", "#/now");
    back?.focus();
    back = null;
  });
}

export function close() {
  if ($("decision").open) $("decision").close();
}

export async function open(id) {
  const dialog = $("decision");
  if (!dialog.open) {
    back = document.activeElement;
    dialog.showModal();
  }
  wanted = id;
  $("decision-title").textContent = "Decision";
  $("decision-body").replaceChildren(el("p", { class: "note", text: "Loading" }));
  $("decision-title").focus();
  try {
    const [record, candidates] = await Promise.all([
      api.get(`/v1/decisions/${encodeURIComponent(id)}`),
      api.get(`/v1/decisions/${encodeURIComponent(id)}/candidates`).catch(() => null),
    ]);
    if (wanted === id) show(record, candidates);
  } catch (error) {
    const known = brief(id);
    const parts = [el("p", { class: "note", text: `${error.message}; newer ones have taken its place.` })];
    if (known) parts.unshift(el("p", {}, tag(known), " ", el("code", { text: known.because }), " ", meaning(known.because)), flow(known));
    if (wanted === id) $("decision-body").replaceChildren(...parts);
  }
}

function show(record, candidates) {
  const title = { bypass: "Bypass: prefilled where it is decoded", local: "Local", remote: "Remote prefill" }[kind(record)];
  $("decision-title").textContent = title;
  const parts = [
    el("p", {}, tag(record), " ", el("code", { text: record.because }), " ", meaning(record.because)),
    flow(record), checks(record), shadow(record), facts(record), candidates ? table(candidates) : considered(record),
  ];
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
  const pods = other.prefill ? `${other.prefill} prefills, ${other.decode} decodes` : other.decode ? `${other.decode} does both` : "";
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

function table({ pods, left_out: leftOut }) {
  const most = Math.max(1e-9, ...pods.flatMap((pod) => [pod.local, pod.prefill, pod.decode]).map((offer) => offer.cost?.total ?? 0));
  const head = ["Pod", "KV events", "Cached blocks", "Requests", "Prefill tokens", "Decode blocks", "Cost: prefill and decode", "Cost: prefill", "Cost: decode"];
  const rows = pods.map((pod) => el("tr", { class: pod.chosen ? "chosen" : "" },
    el("th", { scope: "row" }, pod.pod, el("small", { text: ` ${pod.role}` }), pod.chosen ? el("span", { class: "yes", text: ` ${pod.chosen}s` }) : ""),
    el("td", { text: pod.kv_source }),
    el("td", { class: "number", text: `${number(pod.cached_device)}${pod.cached_host + pod.cached_disk ? ` + ${number(pod.cached_host)} host + ${number(pod.cached_disk)} disk` : ""}` }),
    el("td", { class: "number", text: number(pod.requests) }), el("td", { class: "number", text: number(pod.prefill_tokens) }), el("td", { class: "number", text: number(pod.decode_blocks) }),
    offerCell(pod.local, most), offerCell(pod.prefill, most), offerCell(pod.decode, most)));
  return el("section", {}, el("h3", { text: "Every pod, as it was seen" }),
    el("p", { class: "note", text: `Costs are in KV blocks; the cheapest pod of a column is chosen for it.${leftOut ? ` ${plural(leftOut, "pod")} of higher cost not shown.` : ""}` }),
    el("p", { class: "legend", "aria-hidden": "true" }, ...TERMS.map((term) => el("span", { class: `t-${term}`, text: term }))),
    el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Every pod, as it was seen" },
      el("table", { class: "pods" }, el("caption", { class: "visually-hidden", text: "Pods with their costs" }),
        el("thead", {}, el("tr", {}, ...head.map((text, index) => el("th", { scope: "col", class: index > 1 && index < 6 ? "number" : "", text })))), el("tbody", {}, ...rows))));
}

/** The three selections alone, for a decision whose pods are no longer remembered. */
function considered(record) {
  const names = { local: "to prefill and decode", prefill: "to prefill", decode: "to decode" };
  const rows = Object.entries(names).filter(([key]) => record.considered[key]).map(([key, text]) => {
    const pick = record.considered[key];
    return el("tr", {}, el("th", { scope: "row", text }), el("td", { text: pick.endpoint }), el("td", { class: "number", text: number(pick.cached_tokens) }),
      ...[...TERMS, "total"].map((term) => el("td", { class: "number", text: precise(pick.cost[term]) })));
  });
  return el("section", {}, el("h3", { text: "The pods considered last" }), el("p", { class: "note", text: "What the others cost is no longer remembered." }),
    el("table", {}, el("thead", {}, el("tr", {}, ...["Best pod", "Endpoint", "Cached tokens", ...TERMS, "total"].map((text) => el("th", { scope: "col", text })))), el("tbody", {}, ...rows)));
}
