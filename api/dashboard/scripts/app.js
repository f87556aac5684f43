// The router between the views, and the header with service status and API key.

import { rememberKey, storedKey } from "./api.js";
import { showComparison } from "./compare.js";
import { showDevices } from "./devices.js";
import { h, replace } from "./dom.js";
import { showJob } from "./job.js";
import { showJobs } from "./jobs.js";
import { showSubmission } from "./submission.js";

// without an answer for this long the service counts as not ready
const TIMEOUT_MS = 20_000;
const main = document.getElementById("main");
const dialog = document.getElementById("key-dialog");
const input = document.getElementById("key-input");
const keyButton = document.getElementById("key-button");
let leaving = new AbortController();

function route() {
  const [view, id] = location.hash.replace(/^#\/?/, "").split("/");
  if (view === "new") return { view: "new", show: (signal) => showSubmission(main, signal, id && decodeURIComponent(id)) };
  if (view === "devices") return { view: "devices", show: (signal) => showDevices(main, signal) };
  if (view === "jobs" && id) return { view: "job", show: (signal) => showJob(main, decodeURIComponent(id), signal) };
  if (view === "compare" && id) return { view: "compare", show: (signal) => showComparison(main, id.split(",").map(decodeURIComponent), signal) };
  return { view: "jobs", show: (signal) => showJobs(main, signal) };
}

async function show(moved) {
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  const { view, show: open } = route();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  replace(main);
  if (moved) {
    window.scrollTo(0, 0);
    main.focus({ preventScroll: true });
  }
  try {
    await open(signal);
  } catch (error) {
    if (signal.aborted) return;
    const again = h("button", { type: "button", onclick: () => show(false) }, "Try again");
    replace(main, h("div", { class: "empty", role: "alert" }, h("h1", {}, "The page cannot be shown"), h("p", {}, error.message), again));
  }
}

function askForKey(message) {
  keyButton.hidden = false;
  document.getElementById("key-problem").textContent = storedKey() ? message : "";
  if (!dialog.open) dialog.showModal();
  input.focus();
}

document.getElementById("key-form").addEventListener("submit", (event) => {
  const key = input.value.trim();
  if (!/^[!-~]*$/.test(key)) {
    event.preventDefault(); // no header can carry it: the browser would send no request
    document.getElementById("key-problem").textContent = "An API key has visible ASCII characters only.";
    return;
  }
  rememberKey(key);
  input.value = "";
  show(false);
});
document.getElementById("key-forget").addEventListener("click", () => {
  rememberKey(null);
  dialog.close();
  show(false);
});
keyButton.addEventListener("click", () => askForKey(""));
window.addEventListener("kronoscope:key", (event) => askForKey(event.detail));
window.addEventListener("hashchange", () => show(true));

async function watchService() {
  const badge = document.getElementById("service");
  let status = "away";
  const request = new AbortController();
  const timeout = setTimeout(() => request.abort(), TIMEOUT_MS);
  try {
    const answer = await fetch("/readyz", { cache: "no-store", signal: request.signal });
    if (answer.ok) status = (await answer.json()).status;
  } catch {
    // shown as away
  }
  clearTimeout(timeout);
  const text = { ready: "Service ready", degraded: "Service degraded", away: "Service not ready" }[status];
  if (badge.dataset.status !== status) {
    badge.dataset.status = status;
    badge.textContent = text;
    badge.title = text;
  }
  setTimeout(watchService, document.hidden ? 60_000 : 15_000);
}

keyButton.hidden = !storedKey();
show(false);
watchService();
