// Requests to the REST API of the same origin; the key is kept in this tab's session storage.

const KEY = "kronoscope.key";
const PAGE = 100;

export class Problem extends Error {
  constructor(status, body) {
    super(body.detail || body.title || `The service answered ${status}.`);
    this.status = status;
    this.errors = body.errors ?? [];
    this.title = body.title ?? "";
  }
}

export function storedKey() {
  return sessionStorage.getItem(KEY);
}

export function rememberKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

function headers(more) {
  const key = storedKey();
  return key ? { ...more, Authorization: `Bearer ${key}` } : { ...more };
}

async function problemOf(response) {
  let body = {};
  try {
    body = await response.json();
  } catch {
    // not JSON: only the status is known
  }
  const problem = new Problem(response.status, body);
  if (response.status === 401) window.dispatchEvent(new CustomEvent("kronoscope:key", { detail: problem.message }));
  return problem;
}

export async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", ...options, headers: headers(options.headers) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, { detail: "The service does not answer. Is it running?" });
  }
  if (response.status === 304 || response.ok) return response;
  throw await problemOf(response);
}

async function read(response) {
  try {
    return await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, { detail: "The service's answer broke off." });
  }
}

export async function get(path, signal) {
  return read(await request(path, { signal }));
}

/** Returns the job once it differs from the one with `etag`; null where it has not changed within the wait. */
export async function watchJob(id, etag, signal) {
  const path = `/v1/jobs/${encodeURIComponent(id)}` + (etag ? "?wait=20" : "");
  const response = await request(path, { signal, headers: etag ? { "If-None-Match": etag } : {} });
  if (response.status === 304) return null;
  return { job: await read(response), etag: response.headers.get("ETag") };
}

/** The id of the job that an id, or the end of one, names; an id that is not found is returned as it is. */
export async function fullId(id, signal) {
  if (!/^[0-9a-f-]{8,35}$/.test(id)) return id;
  const { items } = await get(`/v1/jobs?limit=2&id=${id}`, signal);
  return items.length === 1 ? items[0].id : id;
}

export async function allPages(path, signal) {
  const items = [];
  let cursor = null;
  do {
    const query = `limit=${PAGE}` + (cursor ? `&after=${encodeURIComponent(cursor)}` : "");
    const page = await get(`${path}${path.includes("?") ? "&" : "?"}${query}`, signal);
    items.push(...page.items);
    cursor = page.next;
  } while (cursor);
  return items;
}

let unanswered = { text: null, key: null };

/** Submits a document; where the answer was lost, it keeps its idempotency key, so that no second job is made. */
export async function submit(text, validateOnly) {
  if (!validateOnly && unanswered.text !== text) unanswered = { text, key: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}` };
  try {
    const answer = await send(text, validateOnly);
    if (!validateOnly) unanswered = { text: null, key: null };
    return answer;
  } catch (error) {
    if (!validateOnly && error.status >= 400 && error.status < 500) unanswered = { text: null, key: null };
    throw error;
  }
}

async function send(text, validateOnly) {
  const response = await request(`/v1/jobs${validateOnly ? "?validate_only=true" : ""}`, {
    method: "POST",
    headers: {
      "Content-Type": "application/json",
      ...(validateOnly ? {} : { "Idempotency-Key": unanswered.key }),
    },
    body: text,
  });
  return read(response);
}

/** Plans a job without running it; waits until a worker has planned it. */
export async function estimate(text, signal) {
  let made = await read(await request("/v1/estimates", { method: "POST", headers: { "Content-Type": "application/json" }, body: text, signal }));
  while (made.state !== "succeeded" && made.state !== "cancelled") {
    const asked = Date.now();
    made = await get(`/v1/estimates/${encodeURIComponent(made.id)}?wait=20`, signal);
    // without room for another long poll the service answers at once
    if (made.state !== "succeeded") await new Promise((resolve) => setTimeout(resolve, asked + 1_000 - Date.now()));
  }
  return made;
}

export async function cancel(id) {
  return read(await request(`/v1/jobs/${encodeURIComponent(id)}:cancel`, { method: "POST" }));
}

/** Replaces labels and note of a job; returns the job. */
export async function annotate(id, given) {
  return read(await request(`/v1/jobs/${encodeURIComponent(id)}`, { method: "PATCH", headers: { "Content-Type": "application/json" }, body: JSON.stringify(given) }));
}

/** A page of the events of a job behind a number. */
export async function eventsAfter(base, after, signal) {
  return read(await request(`${base}/events?after=${after}`, { signal, headers: { Accept: "application/json" } }));
}

/** Saves a file of the API through a blob, since a link cannot carry the key. */
export async function download(path, name) {
  const response = await request(path);
  const url = URL.createObjectURL(await response.blob());
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
