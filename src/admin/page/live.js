// The live list of decisions, the reasons behind them, and the figures at the top.
//
// At hundreds of decisions a second the list is written at most once per frame, from a ring of ROWS; only
// those at its top while nobody scrolls, and none while it cannot be seen. While somebody is in it, it stands
// still, and the picker is asked to remember what its decisions were made from.
import { $, clock, el, milliseconds, number, percent, plural, share, throttled } from "/page/dom.js";
import * as api from "/page/api.js";
import { kind, meaning, settings, tag } from "/page/words.js";

const ROWS = 500;
/** Rows that are written while the list moves and its top is in view: more than fit there. */
const TOP = 40;
/** Decisions kept for filters and figures. */
const KEPT = 2000;
/** Decisions that the reasons are counted over. */
const COUNTED = 500;
/** Seconds that the rate is taken over. */
const RATE_SECONDS = 10;

let kept = [];
let waiting = [];
/** Of those that wait, how many have left the ring already. */
let passed = 0;
let shown = [];
const byId = new Map();
const rows = new Map();
let dirty = new Set();
const arrivals = [];
/** When the list began: before, nothing was counted. */
let began = null;
/** Why the list stands still: "pause", "focus", "mouse", "dialog" before it, another "view". */
const holds = new Set();
/** After this many milliseconds without a move, the mouse is forgotten in the list, not in use. */
const MOUSE_RESTS = 15000;
let remembered = null;
let scheduled = false;
let missed = 0;
const filter = { route: "", because: "", pod: "", model: "" };

function matches(one) {
  if (filter.route === "bypass" ? !one.bypass : filter.route && one.route !== filter.route) return false;
  if (filter.because && one.because !== filter.because) return false;
  if (filter.pod && ![one.decode_pod, one.prefill_pod].some((pod) => pod?.toLowerCase().includes(filter.pod))) return false;
  return !filter.model || (one.model ?? "").toLowerCase().includes(filter.model);
}

export function decisions({ missed: skipped, records }) {
  const now = performance.now();
  missed += skipped;
  let fresh = records.filter((one) => !byId.has(one.id));
  began ??= now;
  if (kept.length || skipped) arrivals.push([now, fresh.length + skipped]);
  for (const one of fresh) byId.set(one.id, one);
  const first = !kept.length && fresh.length;
  kept.push(...fresh);
  if (first) figures();
  if (kept.length > KEPT) for (const one of kept.splice(0, kept.length - KEPT)) byId.delete(one.id);
  fresh = fresh.filter(matches);
  waiting.push(...fresh);
  // What would leave the ring before it is ever shown need not be kept.
  if (waiting.length > ROWS) passed += waiting.splice(0, waiting.length - ROWS).length;
  schedule();
}

export function outcomes(list) {
  for (const outcome of list) {
    const one = byId.get(outcome.id);
    if (!one) continue;
    Object.assign(one, outcome);
    if (rows.has(outcome.id)) dirty.add(outcome.id);
  }
  schedule();
}

/** What the list knows of a decision. */
export const brief = (id) => byId.get(id) ?? shown.find((one) => one.id === id);

const unseen = () => holds.has("dialog") || holds.has("view");
const still = () => holds.has("pause") || holds.has("focus") || holds.has("mouse");
const standing = () => still() || holds.has("dialog");

/** Makes the list stand still because of `why`, or no longer because of it. */
export function hold(why, on) {
  if (holds.has(why) === on) return;
  const stood = standing();
  if (on) holds.add(why);
  else holds.delete(why);
  if (!stood && standing()) remember();
  if (!unseen()) figures();
  schedule();
}

/** Has the picker remember what the decisions in the list were made from, instead of what it was to before. */
const remember = throttled(300, async () => {
  if (!standing()) return;
  const instead = remembered === null ? "" : `?instead=${remembered}`;
  // When it does not, older decisions say themselves that they are forgotten.
  remembered = await api.post(`/v1/decisions/hold${instead}`).then((answer) => answer.hold, () => null);
});

function schedule() {
  if (scheduled || unseen()) return;
  scheduled = true;
  requestAnimationFrame(() => {
    scheduled = false;
    write();
  });
}

function outcomeCells(one, row) {
  row.className = one.end === "aborted" || one.status >= 400 ? "aborted" : "";
  row.cells[7].textContent = milliseconds(one.ttft_ms);
  row.cells[8].textContent = one.end ? `${one.end === "completed" ? "" : `${one.end} `}${one.status ?? ""}`.trim() || one.end : "running";
}

/** Names that are too long lose their beginning: pods of one deployment differ at the end. */
function podsCell(one) {
  const name = (text) => el("span", { class: "tail" }, el("bdi", { text }));
  const names = one.prefill_pod ? [name(one.prefill_pod), el("span", { text: " → " }), name(one.decode_pod)] : [name(one.decode_pod)];
  return el("td", { title: names.map((part) => part.textContent).join("") }, el("div", { class: "pod-names" }, ...names));
}

function rowOf(one) {
  const cell = (text, name) => el("td", { class: name, text });
  const row = el("tr", {},
    el("td", {}, el("a", { class: "open", href: `#/decision/${one.id}`, text: clock(one.time_ms) })),
    el("td", {}, tag(one)),
    cell(one.because), podsCell(one), cell(one.model ?? "–"),
    cell(number(one.prompt_tokens), "number"), cell(number(one.net_new_tokens), "number"),
    cell("", "number"), cell(""));
  row.cells[2].title = meaning(one.because);
  outcomeCells(one, row);
  row.decision = one.id;
  rows.set(one.id, row);
  return row;
}

function write() {
  for (const id of dirty) {
    const [one, row] = [byId.get(id), rows.get(id)];
    if (one && row) outcomeCells(one, row);
  }
  dirty = new Set();
  note();
  if (unseen()) return;
  if (still() || !waiting.length) extend();
  else put();
}

/** How many rows are to be there: all for who scrolls, reads a list that stands still, or moves through it. */
const depth = () => ($("live-scroll").scrollTop > 0 || holds.has("pause") || holds.has("focus") ? ROWS : TOP);

/** Writes the rows that are missing at the end. */
function extend() {
  const missing = shown.slice(rows.size, depth());
  if (missing.length) $("live-table").tBodies[0].append(...missing.map(rowOf));
}

/** Writes what waits on top of the list. */
function put() {
  const body = $("live-table").tBodies[0];
  const scroll = $("live-scroll");
  const before = scroll.scrollTop;
  const height = before > 0 ? body.offsetHeight : 0;
  const deep = depth();
  const fresh = waiting.reverse();
  waiting = [];
  passed = 0;
  shown = [...fresh, ...shown].slice(0, ROWS);
  body.prepend(...fresh.slice(0, deep).map(rowOf));
  for (const row of [...body.rows].slice(deep)) {
    rows.delete(row.decision);
    row.remove();
  }
  extend();
  // Who has scrolled down stays with the rows in view.
  if (before > 0) scroll.scrollTop = before + body.offsetHeight - height;
}

function note() {
  const parts = [];
  const behind = plural(waiting.length + passed, "decision");
  if (holds.has("pause")) parts.push(`Paused; ${behind} waiting.`);
  else if (still()) parts.push(`Held while you are in the list; ${behind} waiting.`);
  if (missed) parts.push(`${plural(missed, "decision")} came too fast to be listed.`);
  if (!parts.length && !kept.length) parts.push("No decision yet.");
  const text = parts.join(" ");
  if ($("live-note").textContent !== text) $("live-note").textContent = text;
}

function refill() {
  for (const row of rows.values()) row.remove();
  rows.clear();
  shown = [];
  waiting = kept.filter(matches).slice(-ROWS);
  const count = waiting.length;
  put();
  note();
  say(`${plural(count, "decision")} match`);
}

const say = throttled(1000, (text) => {
  $("live-said").textContent = text;
});

const median = (values) => {
  const sorted = values.sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor(sorted.length / 2)] : null;
};

function figure(title, value, more) {
  return el("div", {}, el("dt", { text: title }), el("dd", {}, value, more ? el("small", { text: ` ${more}` }) : ""));
}

function figures() {
  const now = performance.now();
  while (arrivals.length && arrivals[0][0] < now - RATE_SECONDS * 1000) arrivals.shift();
  if (unseen()) return;
  const seconds = Math.min(RATE_SECONDS, Math.max(1, (now - began) / 1000));
  const rate = arrivals.reduce((sum, [, count]) => sum + count, 0) / seconds;
  const last = kept.slice(-COUNTED);
  const judged = last.filter((one) => one.because !== "not_generation");
  const of = (test) => judged.filter(test).length / judged.length;
  const ttft = (route) => median(judged.filter((one) => one.route === route && one.ttft_ms != null).map((one) => one.ttft_ms));
  $("figures").replaceChildren(
    figure("Decisions", rate < 10 ? rate.toFixed(1) : number(rate), "per second"),
    figure("Bypass", percent(of((one) => one.bypass)), `of the last ${number(judged.length)}`),
    figure("Remote prefill", percent(of((one) => one.route === "remote"))),
    figure("TTFT, local", milliseconds(ttft("local")), "median"),
    figure("TTFT, remote", milliseconds(ttft("remote")), "median"));
  reasons(last);
}

function reasons(last) {
  const counts = new Map();
  for (const one of last) {
    const entry = counts.get(one.because) ?? { one, count: 0 };
    entry.count += 1;
    counts.set(one.because, entry);
  }
  $("why-note").textContent = last.length ? `Over the last ${plural(last.length, "decision")}` : "No decision yet";
  const sorted = [...counts.values()].sort((a, b) => b.count - a.count || a.one.because.localeCompare(b.one.because));
  $("reasons").replaceChildren(...sorted.map(({ one, count }) => el("li", {},
    el("div", { class: "reason-head" }, tag(one), el("code", { text: one.because }), el("span", { class: "share", text: percent(count / last.length) })),
    el("div", { class: "bar", "aria-hidden": "true" }, share(el("span", { class: kind(one) === "local" ? "" : kind(one) }), count / last.length)),
    el("p", { class: "reason-meaning", text: meaning(one.because) }))));
}

export function start() {
  const form = $("filters");
  form.because.append(...Object.keys(settings.reasons).map((word) => el("option", { value: word, text: word })));
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", throttled(150, () => {
    for (const key of Object.keys(filter)) filter[key] = form[key].value.trim().toLowerCase();
    refill();
  }));
  $("pause").addEventListener("click", () => {
    hold("pause", !holds.has("pause"));
    $("pause").setAttribute("aria-pressed", String(holds.has("pause")));
    note();
  });
  const body = $("live-table").tBodies[0];
  body.addEventListener("focusin", () => hold("focus", true));
  body.addEventListener("focusout", () => hold("focus", false));
  // Rows that move away under the mouse cannot be pressed.
  let rests = null;
  const leave = () => hold("mouse", false);
  body.addEventListener("pointermove", (event) => {
    if (event.pointerType !== "mouse") return;
    hold("mouse", true);
    clearTimeout(rests);
    rests = setTimeout(leave, MOUSE_RESTS);
  });
  body.addEventListener("pointerleave", leave);
  $("live-scroll").addEventListener("scroll", schedule);
  figures();
  setInterval(figures, 1000);
}
