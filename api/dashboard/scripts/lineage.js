// A job among others: its labels and note, whose factors it used, which jobs used its own, its states, and its log.

import { annotate, eventsAfter, get } from "./api.js";
import { h, replace } from "./dom.js";
import { between, clock, number, several, words } from "./format.js";
import { ENDED } from "./progress.js";

const LOGGED = new Set(["log", "state", "started", "crash", "digest_differs"]);
const MOST_LINES = 2_000;
const FOLLOW_MS = 2_000;
// what a job did with another's factors, and what another did with its own
const RELATIONS = new Map([
  ["factors", ["began from", "began from them"]],
  ["extends", ["added to those of", "added to them"]],
  ["cache", ["took from the cache those of", "took them from the cache"]],
]);
const COMPARED = ["compared with those of", "compared with them"];

/** A text in which nothing turns the direction of writing, breaks the line or is invisible. */
function printable(text) {
  return String(text).replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu, "\ufffd");
}

function relative(each, used) {
  const [of, by] = RELATIONS.get(each.relation) ?? (each.relation.endsWith(".against") ? COMPARED : [words(each.relation), words(each.relation)]);
  if (!each.state) return h("li", {}, `${of} `, h("span", { class: "mono" }, each.id), h("span", { class: "muted" }, " (there is no such job now)"));
  const name = each.name ?? `job ${each.id.slice(-8)}`;
  return h("li", {}, used ? `${of} ` : null, h("a", { href: `#/jobs/${encodeURIComponent(each.id)}` }, name), h("span", { class: "muted small" }, ` ${each.kinds.join(" + ")}, ${each.state}${used ? "" : `; ${by}`}`));
}

/** Rows of the states: since when, for how long, what it was and why. */
function history(events, ended) {
  const states = events.filter(({ type }) => type === "state");
  const devices = new Map(events.filter(({ type }) => type === "started").map(({ data }) => [data.attempt, data.environment?.device_name ?? data.environment?.device]));
  let attempt = 0;
  return states.map(({ at, data }, index) => {
    attempt = data.attempt ?? attempt;
    const next = states[index + 1]?.at;
    const why = data.state === "running" ? devices.get(attempt) : [data.reason, data.code, data.category].filter((each) => typeof each === "string").join(", ");
    const lasted = next ? between(at, next) : ended ? "–" : "until now";
    return h("tr", {}, h("td", {}, h("time", { datetime: at }, clock(at))), h("td", {}, words(data.state)), h("td", { class: "numeric" }, attempt ? number(attempt) : "–"), h("td", { class: "numeric" }, lasted), h("td", {}, why ? printable(words(why)) : "–"));
  });
}

/** Shows the lineage of a job in `place`. */
export async function showLineage(place, base, ended, signal) {
  const found = await get(`${base}/lineage`, signal);
  const list = (title, items, used) => [h("h3", { class: "label" }, title), items.length ? h("ul", {}, items.map((each) => relative(each, used))) : h("p", { class: "muted" }, "None.")];
  const heads = ["Since", "State", "Attempt", "For", "Device or reason"];
  const rows = history(found.history, ended);
  const table = h("table", { class: "history" }, h("caption", { class: "hidden-label" }, "States of the job, in order"), h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col", class: ["Attempt", "For"].includes(head) ? "numeric" : null }, head)))), h("tbody", {}, rows));
  const parts = [list("Used the factors of", found.sources, true), list("Its factors were used by", found.users, false)];
  replace(
    place,
    h(
      "section",
      { class: "card stack tight", "aria-label": "Lineage" },
      h("h2", {}, "Lineage"),
      h("div", { class: "lineage" }, parts.map((part) => h("div", { class: "stack tight" }, part))),
      h("details", { open: place.querySelector("details")?.open ?? false }, h("summary", {}, `History: ${several(rows.length, "state")}`), h("div", { class: "scroll", role: "region", tabindex: 0, "aria-label": "States of the job" }, table)),
    ),
  );
}

function line(event) {
  const said = Object.entries(event.data).filter(([name, value]) => !["level", "message", event.type].includes(name) && ["string", "number"].includes(typeof value));
  const text = event.data.message ?? [event.data[event.type], ...said.map(([name, value]) => `${name} ${value}`)].filter(Boolean).join(", ");
  const level = event.data.level ?? event.type;
  return h("li", { "data-level": level }, h("time", { datetime: event.at }, event.at.slice(11, 19)), ` ${printable(level)} `, h("bdi", {}, printable(text)));
}

/** The log of a job, read once it is opened, and followed while it is open and the job runs. */
export function logCard(base, hasEnded, signal) {
  const lines = h("ol", { class: "log mono", tabindex: 0, "aria-label": "Log lines" });
  const said = h("p", { class: "muted small", role: "status" });
  let [after, timer] = [0, 0];
  async function follow(details) {
    clearTimeout(timer);
    const ended = hasEnded();
    try {
      for (let more = true; more && !signal.aborted; ) {
        const page = await eventsAfter(base, after, signal);
        const atEnd = lines.scrollTop + lines.clientHeight >= lines.scrollHeight - 4;
        lines.append(...page.items.filter(({ type }) => LOGGED.has(type)).map(line));
        while (lines.childElementCount > MOST_LINES) lines.firstElementChild.remove();
        if (atEnd) lines.scrollTop = lines.scrollHeight;
        [after, more] = [page.through, page.more && page.through > after];
      }
      said.textContent = lines.childElementCount ? (ended ? "" : "The log is followed.") : "There are no lines.";
    } catch (error) {
      if (signal.aborted) return;
      said.textContent = error.message;
    }
    if (!ended && details.open && !signal.aborted) timer = setTimeout(follow, FOLLOW_MS, details);
  }
  signal.addEventListener("abort", () => clearTimeout(timer));
  return h("section", { class: "card", "aria-label": "Log" }, h("details", { ontoggle: (event) => event.target.open && follow(event.target) }, h("summary", {}, "Log"), lines, said));
}

/** Labels and note, to be edited; `saved(job)` is called with the job afterwards. */
export function annotationsCard(first, saved) {
  let job = first;
  const note = h("textarea", { id: "note", rows: 3, maxlength: 2000 });
  const labels = h("textarea", { id: "labels", rows: 3, spellcheck: "false", "aria-describedby": "labels-help" });
  const problem = h("p", { class: "problem-text", role: "alert" });
  const shown = h("p", { class: "note" });
  const details = h("details", {});
  const fill = () => {
    note.value = job.note ?? "";
    labels.value = Object.entries(job.labels).map(([name, value]) => `${name}=${value}`).join("\n");
    shown.textContent = job.note ?? "";
    shown.hidden = !job.note;
    problem.textContent = "";
  };
  async function save(event) {
    event.preventDefault();
    const pairs = labels.value.split("\n").filter((each) => each.trim()).map((each) => [each.split("=")[0].trim(), each.includes("=") ? each.slice(each.indexOf("=") + 1).trim() : null]);
    const bad = pairs.find(([name, value]) => !name || value === null);
    problem.textContent = bad ? `A label is name=value, and “${bad[0]}” is not.` : "";
    if (bad) return;
    try {
      job = await annotate(job.id, { labels: Object.fromEntries(pairs), note: note.value.replaceAll("\r", "") });
      fill();
      details.open = false;
      saved(job);
    } catch (error) {
      problem.textContent = error.errors?.map((each) => each.detail ?? each.message).filter(Boolean).join("; ") || error.message;
    }
  }
  const form = h("form", { class: "stack tight annotate", onsubmit: save }, h("label", { for: "note" }, "Note"), note, h("label", { for: "labels" }, "Labels"), labels, h("p", { class: "muted small", id: "labels-help" }, "One to a line, as name=value."), problem, h("div", { class: "row end" }, h("button", { type: "submit", class: "primary" }, "Save")));
  details.append(h("summary", {}, "Edit note and labels"), form);
  fill();
  return h("section", { class: "stack tight annotations", "aria-label": "Note and labels" }, shown, details);
}

/** Whether what the lineage shows of the job itself has changed. */
export function versionOf(job) {
  return `${job.state} ${job.attempt} ${ENDED.has(job.state)}`;
}
