// Small helpers: elements without markup in strings, numbers for people.

export const $ = (id) => document.getElementById(id);

/** An element with properties (class, text, on…, data-…, aria-…) and children. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "class") node.className = value;
    else if (key === "text") node.textContent = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Sets the share (0..1) that a bar or a cell shows. */
export function share(node, value) {
  node.style.setProperty("--v", `${(Math.max(0, Math.min(1, value)) * 100).toFixed(1)}%`);
  return node;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const exact = new Intl.NumberFormat("en", { maximumFractionDigits: 3 });

export const number = (value) => (value === null || value === undefined ? "–" : whole.format(value));
export const precise = (value) => (value === null || value === undefined ? "–" : exact.format(value));
export const percent = (value) => (value === null || value === undefined || Number.isNaN(value) ? "–" : `${whole.format(value * 100)} %`);

export function milliseconds(value) {
  if (value === null || value === undefined) return "–";
  return value < 1000 ? `${whole.format(value)} ms` : `${(value / 1000).toFixed(2)} s`;
}

export function clock(ms) {
  const date = new Date(ms);
  const two = (part) => String(part).padStart(2, "0");
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}.${String(date.getMilliseconds()).padStart(3, "0")}`;
}

export const plural = (count, noun) => `${whole.format(count)} ${noun}${count === 1 ? "" : "s"}`;

/** Runs `act` at most every `ms`, the last call always. */
export function throttled(ms, act) {
  let last = -Infinity;
  let timer = null;
  return (...args) => {
    clearTimeout(timer);
    const wait = Math.max(0, last + ms - performance.now());
    timer = setTimeout(() => {
      last = performance.now();
      act(...args);
    }, wait);
  };
}
