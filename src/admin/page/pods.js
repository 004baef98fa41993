// The pods: what is wrong in one sentence, a map of a large fleet, a table with those in trouble first.
import { $, el, number, percent, plural, share, throttled } from "/page/dom.js";

/** Up to this many pods, the table alone is the map. */
const SMALL = 48;
/** Rows of the table. */
const ROWS = 60;
const TILE = 15;
const GAP = 3;

const AVAILABILITY = {
  ready: ["good", "✓ ready"],
  not_ready: ["bad", "◌ not ready"],
  draining: ["warn", "↓ draining"],
  unreachable: ["bad", "✕ unreachable"],
};
const FEED = {
  live: ["good", "live"],
  syncing: ["warn", "◌ syncing"],
  lost: ["bad", "✕ lost"],
  absent: ["none", "none"],
};

let pods = [];
let told = "";
const say = throttled(3000, (state, mark, lines) => {
  $("health").dataset.state = state;
  $("health-mark").textContent = mark;
  const [first, ...more] = lines;
  $("health-text").replaceChildren(el("p", { class: "health-line", text: first }), ...more.map((text) => el("p", { class: "health-more", text })));
});

/** 0 is bad, 1 is worth a look, 2 is well. */
function rank(pod) {
  const levels = [AVAILABILITY[pod.availability]?.[0], FEED[pod.kv_source]?.[0]];
  return levels.includes("bad") ? 0 : levels.includes("warn") ? 1 : 2;
}

const names = (some) => some.slice(0, 4).map((pod) => pod.name).join(", ") + (some.length > 4 ? ` and ${some.length - 4} more` : "");

/** What is wrong, worst first. */
function diagnosis() {
  const down = pods.filter((pod) => pod.availability !== "ready");
  const ready = pods.filter((pod) => pod.availability === "ready");
  const decodes = ready.filter((pod) => pod.role !== "prefill");
  const prefills = ready.filter((pod) => pod.role !== "decode");
  const lost = ready.filter((pod) => pod.kv_source === "lost");
  const syncing = ready.filter((pod) => pod.kv_source === "syncing");
  const more = [];
  if (pods.length === 0) return ["bad", "✕", ["No pods are known."]];
  if (decodes.length === 0) return ["bad", "✕", ["No decode pod can take requests: every request is refused.", `Not ready: ${names(down)}.`]];
  for (const [word, text] of [["unreachable", "Unreachable"], ["not_ready", "Not ready"], ["draining", "Draining"]]) {
    const some = down.filter((pod) => pod.availability === word);
    if (some.length) more.push(`${text}: ${names(some)}.`);
  }
  if (lost.length) more.push(`KV events lost: ${names(lost)}. What they hold is not known, so nothing bypasses there by it.`);
  if (syncing.length) more.push(`KV events catching up: ${names(syncing)}.`);
  if (prefills.length === 0) return ["bad", "✕", ["No prefill pod can take requests: decode pods prefill everything.", ...more]];
  if (down.length) {
    const draining = down.every((pod) => pod.availability === "draining");
    return [draining ? "warn" : "bad", draining ? "!" : "✕", [`${down.length} of ${plural(pods.length, "pod")} cannot take requests.`, ...more]];
  }
  if (lost.length) return ["bad", "!", [`All ${plural(pods.length, "pod")} take requests; ${lost.length} without KV events.`, ...more]];
  if (syncing.length) return ["warn", "!", [`All ${plural(pods.length, "pod")} take requests.`, ...more]];
  return ["good", "✓", [`All ${plural(pods.length, "pod")} can take requests: ${prefills.length} to prefill, ${decodes.length} to decode.`]];
}

function health() {
  const [state, mark, lines] = diagnosis();
  const key = state + lines.join();
  // Said again only when it changed, so that a screen reader is not talked over.
  if (key !== told) {
    told = key;
    say(state, mark, lines);
  }
}

/** What the busiest pod has, per metric: the full width of a cell, the full colour of a square. */
function scales() {
  const most = (read) => pods.reduce((sofar, pod) => Math.max(sofar, read(pod)), 1);
  return {
    requests: most((pod) => pod.requests),
    prefill_tokens: most((pod) => Math.max(pod.prefill_tokens, pod.prefill_capacity_tokens ?? 0)),
    decode_blocks: most((pod) => pod.decode_blocks),
    kv_usage: 1,
  };
}

const measure = (pod, metric) => (metric === "kv_usage" ? usage(pod) : pod[metric]);

/** The engine's own figure, or else what was promised to it. */
function usage(pod) {
  if (pod.kv_usage !== null) return pod.kv_usage;
  return pod.kv_capacity_blocks ? pod.decode_blocks / pod.kv_capacity_blocks : null;
}

const METRICS = ["requests", "prefill_tokens", "decode_blocks", "kv_usage"];

function row(pod, scale) {
  const [level, text] = AVAILABILITY[pod.availability] ?? ["none", pod.availability];
  const [feedLevel, feedText] = FEED[pod.kv_source] ?? ["none", pod.kv_source];
  const cells = METRICS.map((metric) => {
    const value = measure(pod, metric);
    const cell = el("td", { class: "number cell", text: metric === "kv_usage" ? percent(value) : number(value) });
    return share(cell, (value ?? 0) / scale[metric]);
  });
  return el("tr", { class: ["bad", "warn", ""][rank(pod)] },
    el("th", { scope: "row" }, pod.name, el("small", { text: pod.role })),
    el("td", {}, el("span", { class: `state state-${level}`, text })),
    el("td", {}, el("span", { class: `state state-${feedLevel}`, text: feedText })),
    ...cells);
}

function table(scale) {
  const wanted = $("pods-find").value.trim().toLowerCase();
  const metric = $("pods-metric").value;
  const found = pods.filter((pod) => pod.name.toLowerCase().includes(wanted) || pod.endpoint.includes(wanted));
  const large = pods.length > SMALL;
  // A small fleet keeps its order, so that a pod stays where the eye left it.
  if (large) found.sort((a, b) => rank(a) - rank(b) || (measure(b, metric) ?? 0) - (measure(a, metric) ?? 0) || a.name.localeCompare(b.name));
  else found.sort((a, b) => rank(a) - rank(b) || b.role.localeCompare(a.role) || a.name.localeCompare(b.name, "en", { numeric: true }));
  $("pods-table").tBodies[0].replaceChildren(...found.slice(0, ROWS).map((pod) => row(pod, scale)));
  const shown = Math.min(found.length, ROWS);
  $("pods-note").textContent = found.length < pods.length || shown < found.length
    ? `${number(shown)} of ${plural(pods.length, "pod")}, those in trouble first` : "";
}

/** A colour of the style sheet as a canvas understands it. */
function colour(name) {
  const probe = $("pods-map");
  probe.style.color = `var(${name})`;
  const value = getComputedStyle(probe).color;
  probe.style.color = "";
  return value;
}

function map(scale) {
  const holder = $("pods-map");
  $("pods-by").hidden = pods.length <= SMALL;
  if (pods.length <= SMALL) {
    holder.replaceChildren();
    return;
  }
  const metric = $("pods-metric").value;
  if (!holder.firstChild) holder.append(el("p", { class: "map-tip note", text: "Each square is a pod; brighter is busier." }));
  const paint = { cold: colour("--raised"), hot: colour("--heat-hot"), bad: colour("--bad"), warn: colour("--warn"), back: colour("--surface") };
  for (const role of ["prefill", "both", "decode"]) {
    const some = pods.filter((pod) => pod.role === role);
    let group = holder.querySelector(`[data-role="${role}"]`);
    if (!some.length) {
      group?.remove();
      continue;
    }
    if (!group) {
      const canvas = el("canvas", { role: "img" });
      canvas.addEventListener("mousemove", (event) => tip(canvas, event));
      canvas.addEventListener("click", (event) => pick(canvas, event));
      group = el("div", { class: "map-group", "data-role": role }, el("h3", {}), canvas);
      holder.append(group);
    }
    const broken = some.filter((pod) => rank(pod) === 0).length;
    group.querySelector("h3").textContent = `${role}: ${plural(some.length, "pod")}${broken ? `, ${broken} in trouble` : ""}`;
    const canvas = group.querySelector("canvas");
    canvas.setAttribute("aria-label", `${plural(some.length, `${role} pod`)}, ${broken} in trouble; the table below lists them`);
    draw(canvas, some, paint, (pod) => (measure(pod, metric) ?? 0) / scale[metric]);
  }
}

function draw(canvas, some, paint, heat) {
  const width = canvas.clientWidth || 600;
  const across = Math.max(1, Math.floor((width + GAP) / (TILE + GAP)));
  const down = Math.ceil(some.length / across);
  const ratio = window.devicePixelRatio || 1;
  const height = down * (TILE + GAP);
  canvas.style.height = `${height}px`;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.pods = some;
  canvas.across = across;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  some.forEach((pod, index) => {
    const x = (index % across) * (TILE + GAP);
    const y = Math.floor(index / across) * (TILE + GAP);
    const level = rank(pod);
    pen.fillStyle = paint.cold;
    pen.fillRect(x, y, TILE, TILE);
    if (level === 0) {
      pen.fillStyle = paint.bad;
      pen.fillRect(x, y, TILE, TILE);
      pen.strokeStyle = paint.back;
      pen.lineWidth = 2;
      pen.beginPath();
      pen.moveTo(x + 4, y + 4);
      pen.lineTo(x + TILE - 4, y + TILE - 4);
      pen.moveTo(x + TILE - 4, y + 4);
      pen.lineTo(x + 4, y + TILE - 4);
      pen.stroke();
      return;
    }
    pen.globalAlpha = Math.min(1, heat(pod));
    pen.fillStyle = paint.hot;
    pen.fillRect(x, y, TILE, TILE);
    pen.globalAlpha = 1;
    if (level === 1) {
      pen.strokeStyle = paint.warn;
      pen.lineWidth = 2;
      pen.strokeRect(x + 1, y + 1, TILE - 2, TILE - 2);
    }
  });
}

function at(canvas, event) {
  const box = canvas.getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left) / (TILE + GAP));
  const line = Math.floor((event.clientY - box.top) / (TILE + GAP));
  return column < canvas.across ? canvas.pods?.[line * canvas.across + column] : undefined;
}

function tip(canvas, event) {
  const pod = at(canvas, event);
  if (!pod) return;
  $("pods-map").querySelector(".map-tip").textContent =
    `${pod.name}: ${pod.availability}, KV events ${pod.kv_source}, ${plural(pod.requests, "request")}, ${number(pod.prefill_tokens)} prefill tokens, ${number(pod.decode_blocks)} decode blocks`;
}

function pick(canvas, event) {
  const pod = at(canvas, event);
  if (!pod) return;
  $("pods-find").value = pod.name;
  redraw();
}

export function redraw() {
  if (!pods.length) return;
  const scale = scales();
  map(scale);
  table(scale);
}

/** Takes what was found; draws it when it can be seen. */
export function show(found, seen) {
  pods = found;
  health();
  if (seen) redraw();
}

/** The name of the pod that listens at `endpoint`, while it is known. */
export const nameOf = (endpoint) => pods.find((pod) => pod.endpoint === endpoint)?.name ?? endpoint;

export function unknown() {
  told = "";
  say("bad", "?", ["The picker does not answer: what follows is the last that was known."]);
}

export function start() {
  $("pods-find").addEventListener("input", redraw);
  $("pods-metric").addEventListener("change", redraw);
  window.addEventListener("resize", throttled(200, redraw));
}
