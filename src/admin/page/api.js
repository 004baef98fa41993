// Talks to the picker: JSON, and the live stream (read with fetch, because EventSource sends no token).

const KEY = "sidestep-admin-token";
let askForToken = () => {};

export function onTokenNeeded(act) {
  askForToken = act;
}

export function setToken(token) {
  sessionStorage.setItem(KEY, token);
}

function headers(more = {}) {
  const token = sessionStorage.getItem(KEY);
  return token ? { ...more, authorization: `Bearer ${token}` } : more;
}

export class ApiError extends Error {
  constructor(status, body) {
    super(body?.error?.message ?? `the picker answered ${status}`);
    this.status = status;
    this.faults = body?.error?.faults ?? [];
  }
}

async function checked(response) {
  if (response.ok) return response;
  if (response.status === 401) askForToken(sessionStorage.getItem(KEY) !== null);
  const body = await response.json().catch(() => null);
  throw new ApiError(response.status, body);
}

export async function get(path) {
  return (await checked(await fetch(path, { headers: headers() }))).json();
}

export async function post(path, body, signal) {
  const options = { method: "POST", headers: headers({ "content-type": "application/json" }), body: JSON.stringify(body ?? {}), signal };
  return (await checked(await fetch(path, options))).json();
}

/** Follows the live stream for as long as the page is open; `on` has `decisions`, `outcomes`, `state`. */
export async function follow(on) {
  for (let attempt = 0; ; attempt += 1) {
    try {
      const response = await checked(await fetch("/v1/decisions/stream", { headers: headers() }));
      attempt = 0;
      on.state("live");
      await events(response.body, on);
      on.state("lost");
    } catch (error) {
      on.state("lost", error);
      if (error.status === 401) return;
    }
    await new Promise((resolve) => setTimeout(resolve, Math.min(5000, 500 * 2 ** attempt)));
  }
}

async function events(body, on) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    let end;
    while ((end = text.indexOf("\n\n")) >= 0) {
      event(text.slice(0, end), on);
      text = text.slice(end + 2);
    }
  }
}

function event(block, on) {
  let name = "";
  let data = "";
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    else if (line.startsWith("data: ")) data += line.slice(6);
  }
  if (name && data && on[name]) on[name](JSON.parse(data));
}
