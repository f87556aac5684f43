// Chooses the view that the address names, and keeps the header: service status and API key.

import { rememberKey, storedKey } from "./api.js";
import { h, replace } from "./dom.js";
import { showJob } from "./job.js";
import { showJobs } from "./jobs.js";
import { showSubmission } from "./submission.js";

// a service that says nothing for so long is not ready, whatever it said before
const SILENT_MS = 20_000;
const main = document.getElementById("main");
const dialog = document.getElementById("key-dialog");
const input = document.getElementById("key-input");
const keyButton = document.getElementById("key-button");
let leaving = new AbortController();

function route() {
  const [view, id] = location.hash.replace(/^#\/?/, "").split("/");
  if (view === "new") return { view: "new", show: (signal) => showSubmission(main, signal) };
  if (view === "jobs" && id) return { view: "job", show: (signal) => showJob(main, decodeURIComponent(id), signal) };
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
    replace(main, h("div", { class: "empty", role: "alert" }, h("h1", {}, "This did not work"), h("p", {}, error.message), again));
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
    event.preventDefault(); // no header can carry it: the browser would send nothing at all
    document.getElementById("key-problem").textContent = "This is no key of a service: it has visible ASCII characters only.";
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
  const silent = new AbortController();
  const patience = setTimeout(() => silent.abort(), SILENT_MS);
  try {
    const answer = await fetch("/readyz", { cache: "no-store", signal: silent.signal });
    if (answer.ok) status = (await answer.json()).status;
  } catch {
    // shown as away
  }
  clearTimeout(patience);
  const said = { ready: "Service ready", degraded: "Service degraded", away: "Service not ready" }[status];
  if (badge.dataset.status !== status) {
    badge.dataset.status = status;
    badge.textContent = said;
    badge.title = said;
  }
  setTimeout(watchService, document.hidden ? 60_000 : 15_000);
}

keyButton.hidden = !storedKey();
show(false);
watchService();
