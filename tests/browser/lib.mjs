// What the scenarios share: a browser, waiting, screenshots, accessibility.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import fs from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";
import { chromium } from "playwright-core";

const require = createRequire(import.meta.url);
export const AXE = fs.readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"];

/** The Chromium to drive. */
function executable() {
  if (process.env.CHROMIUM) return process.env.CHROMIUM;
  for (const name of ["chromium", "chromium-browser", "google-chrome"]) {
    try {
      return execFileSync("which", [name], { encoding: "utf8" }).trim();
    } catch {
      // The next one.
    }
  }
  throw new Error("no Chromium: install Debian's chromium, or set CHROMIUM to one");
}

/** Waits until `test` holds. */
export async function until(what, test, patience = 30000) {
  const deadline = performance.now() + patience;
  for (;;) {
    if (await test()) return;
    if (deadline < performance.now()) assert.fail(`not within ${patience} ms: ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

/** Opens the page; `done` closes it and fails on anything that the console complained about. */
export async function open(url, { expected = /$^/ } = {}) {
  const browser = await chromium.launch({ executablePath: executable(), args: ["--no-sandbox", "--enable-precise-memory-info"] });
  const context = await browser.newContext({ viewport: { width: 1440, height: 1000 }, colorScheme: "light" });
  const page = await context.newPage();
  const complaints = [];
  const requests = [];
  page.on("console", (message) => {
    if (["error", "warning"].includes(message.type()) && !expected.test(message.text())) complaints.push(message.text());
  });
  page.on("pageerror", (error) => {
    console.error(error);
    complaints.push(error.message);
  });
  page.on("request", (request) => {
    requests.push(request.url());
    if (!request.url().startsWith(url)) complaints.push(`asks another place: ${request.url()}`);
  });
  // For work on the page: its files from the sources, without a build.
  if (process.env.PAGE_FILES) await page.route(/\/(page\/.*)?$/, fromSources);
  const answer = await page.goto(`${url}/`);
  assert.equal(answer.status(), 200);
  assert.match(answer.headers()["content-security-policy"], /default-src 'self'/);
  const done = async () => {
    await browser.close();
    assert.deepEqual(complaints, [], "the console is clean");
  };
  return { page, done, requests: () => requests };
}

const TYPES = { ".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml" };

async function fromSources(route) {
  const name = new URL(route.request().url()).pathname.replace(/^\/(page\/)?/, "") || "index.html";
  const response = await route.fetch();
  const body = fs.readFileSync(path.join(process.env.PAGE_FILES, name));
  await route.fulfill({ response, body, headers: { ...response.headers(), "content-type": TYPES[path.extname(name)] } });
}

/** Keeps a screenshot. */
export async function shot(page, name) {
  await page.screenshot({ path: path.join(process.env.ARTEFACTS ?? ".", `${name}.png`) });
}

/** No violation of WCAG 2.2 A and AA that axe-core can see. */
export async function axe(page, where) {
  // Injected as the test, not as the page: its policy allows no foreign script.
  await page.evaluate(AXE);
  const { violations } = await page.evaluate((rules) => window.axe.run(document, { runOnly: rules }), RULES);
  const told = violations.map(({ id, nodes }) => `${id}: ${nodes.slice(0, 3).map((node) => node.html.slice(0, 160)).join(" | ")}`);
  assert.deepEqual(told, [], `axe-core on ${where}`);
}
