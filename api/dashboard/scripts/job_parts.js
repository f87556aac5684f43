// The static parts of the job page: heading, placement, failure, files.

import { download } from "./api.js";
import { withCode } from "./coverage.js";
import { h } from "./dom.js";
import { age, between, bytes, clock, jobName, modelName, number, several, sourceName, unitOf } from "./format.js";
import { partOf, shareOf } from "./pieces.js";
import { ENDED, statePill } from "./progress.js";

const WHO = {
  usage: "The job cannot be run as it is; change the document and submit it again.",
  transient: "The cause may be temporary; submit the job again.",
  fatal: "The operator of the service must act.",
};

export function heading(job, stop) {
  const task = job.document?.task?.type;
  const facts = [
    job.name && modelName(job) ? ["Model", modelName(job)] : null,
    partOf(job),
    shareOf(job) ?? ["Analysis", job.kinds.join(" + ")],
    ["Data", sourceName(job.document?.data)],
    task ? ["Task", task.replaceAll("_", " ")] : null,
    ["Submitted", h("time", { datetime: job.created_at, title: clock(job.created_at) }, age(job.created_at))],
    job.finished_at ? ["Duration", between(job.started_at ?? job.created_at, job.finished_at)] : null,
    // a divided job makes an attempt for each round, all of which may be well
    job.pieces?.length ? null : job.attempt > 1 ? ["Attempt", number(job.attempt)] : null,
    job.pieces?.length && job.failures ? ["Failed attempts", number(job.failures)] : null,
    ["Id", h("span", { class: "mono id" }, job.id)],
  ].filter(Boolean);
  const labels = Object.entries(job.labels ?? {});
  return h(
    "header",
    { class: "stack tight" },
    h(
      "div",
      { class: "row apart" },
      h("div", { class: "row title" }, h("h1", {}, jobName(job)), statePill(job)),
      ENDED.has(job.state)
        ? h("a", { class: "button", href: `#/new/${encodeURIComponent(job.parent ?? job.id)}` }, job.parent ? "Run whole job again" : "Run again")
        : h("button", { type: "button", class: "danger", onclick: stop, disabled: job.state === "cancelling" }, job.state === "cancelling" ? "Cancelling…" : job.parent ? "Cancel whole job" : "Cancel job"),
    ),
    h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    labels.length ? h("div", { class: "row" }, labels.map(([name, value]) => h("span", { class: "tag" }, `${name}: ${value}`))) : null,
  );
}

const UNPLACED = {
  no_device: "No device can hold this job",
  no_worker: "No worker can take this job up",
  reserved: "A device is reserved for this job",
  waiting: "Why this job waits",
};

/** The reason why a queued job has not begun. */
export function placementCard(job) {
  const { placement } = job;
  if (job.state !== "queued" || !placement || !UNPLACED[placement.status]) return null;
  const blocked = ["no_device", "no_worker"].includes(placement.status);
  return h(
    "section",
    { class: blocked ? "notice warn" : "notice", role: "status", "aria-label": "Placement" },
    h("strong", {}, UNPLACED[placement.status]),
    h("p", {}, ...withCode(`${placement.message.charAt(0).toUpperCase()}${placement.message.slice(1)}.`)),
    blocked ? h("p", { class: "small" }, "It stays in the queue until a worker can take it up.") : null,
  );
}

/** What an ended job has left, and how to go on. */
function keptLine(job, rows) {
  const all = job.progress?.layers_total;
  const none = rows === 0 ? "No layer had been measured; the log is kept." : "What it had measured is kept.";
  const kept = rows ? `Kept: ${number(rows)}${all >= rows ? ` of ${number(all)}` : ""} rows of the layer table, the files and the log.` : job.started_at ? none : "It had not begun.";
  return h("p", { class: "small" }, `${kept} `, h("em", {}, "Run again"), " opens its document as a new job, and ", h("code", {}, `kronoscope rerun ${job.id.slice(-12)}`), " submits it; both begin from the start.");
}

/** Who ended a job, and when; the number of its rows is null until they are counted. */
export function cancelledCard(job, rows) {
  if (!["cancelled", "cancelling"].includes(job.state)) return null;
  const by = job.cancel_requested_by ? h("span", {}, "with the API key ", h("code", {}, job.cancel_requested_by)) : job.parent ? "with its whole job" : null;
  return h(
    "section",
    { class: "notice", role: "status", "aria-label": "Cancellation" },
    h("strong", {}, job.state === "cancelled" ? "The job was cancelled" : "The job is being cancelled"),
    job.cancel_requested_at ? h("p", {}, "Asked for ", by, by ? ", " : null, h("time", { datetime: job.cancel_requested_at }, clock(job.cancel_requested_at)), job.finished_at ? `; it ended ${clock(job.finished_at)}.` : "; it stops before its next batch or layer.") : null,
    job.finished_at && !job.parent ? keptLine(job, rows) : null,
  );
}

export function failureCard(job, rows) {
  const { failure } = job;
  const where = [failure.layer ? ["Layer", failure.layer] : null, failure.pointer ? ["Field", failure.pointer] : null].filter(Boolean);
  return h(
    "section",
    { class: "notice bad", role: "alert", "aria-label": "Failure" },
    h("strong", {}, job.state === "failed" ? "The job failed" : "An attempt failed"),
    h("p", {}, ...withCode(failure.message)),
    failure.trace?.length
      ? h(
          "details",
          { open: true },
          h("summary", {}, "Calls in the factory's own code, the innermost last"),
          h("ol", { class: "trace" }, failure.trace.map((call) => h("li", {}, h("code", {}, `${call.module}:${call.line}`), " in ", h("code", {}, call.function)))),
        )
      : null,
    job.finished_at ? h("p", { class: "small" }, `In attempt ${number(job.attempt)}, `, h("time", { datetime: job.finished_at }, clock(job.finished_at)), ".") : null,
    where.length ? h("p", {}, where.flatMap(([name, value]) => [`${name} `, h("code", {}, value), " "])) : null,
    h("p", { class: "small" }, WHO[failure.category] ?? "", " ", h("code", {}, failure.code)),
    job.state === "failed" && !job.parent ? keptLine(job, rows) : null,
  );
}

function fileLine(path, name, note) {
  return h(
    "li",
    {},
    h("button", { type: "button", class: "file mono", onclick: (event) => save(event.currentTarget, path, name, note) }, name),
    h("span", { class: "muted small" }, note),
  );
}

async function save(button, path, name, note) {
  const said = button.nextElementSibling;
  try {
    await download(path, name.split("/").pop());
    said.textContent = note;
  } catch (error) {
    said.textContent = error.message;
  }
}

export function filesCard(job, base, results) {
  const artifacts = results.artifacts ?? [];
  // a piece measures no layer: what it has summed its job merges
  const fixed = job.parent
    ? []
    : [
        ["log.jsonl", `${base}/log`, `reproducibility record of every ${unitOf(job.kinds[0])}`],
        ["layers.csv", `${base}/layers.csv`, `the ${unitOf(job.kinds[0])} table for a spreadsheet`],
        ["results.json", `${base}/results`, "summary and manifest"],
      ];
  const merged = job.parent && !artifacts.length ? "The results are on the page of the whole job. What a piece has summed is kept until the job has merged it." : null;
  const all = h("ul", { class: "files" });
  // of a deep model there are thousands: they are listed once they are asked for
  const list = () => all.childElementCount || all.append(...artifacts.map((file) => fileLine(`${base}/artifacts/${file.name.split("/").map(encodeURIComponent).join("/")}?direct=false`, file.name, bytes(file.size_bytes))));
  const total = artifacts.reduce((sum, file) => sum + file.size_bytes, 0);
  return h(
    "section",
    { class: "card stack tight", "aria-label": "Files" },
    h("h2", {}, "Files"),
    fixed.length ? h("ul", { class: "files" }, fixed.map(([name, path, note]) => fileLine(path, name, note))) : null,
    merged ? h("p", { class: "muted small" }, merged) : null,
    artifacts.length ? h("details", { ontoggle: list }, h("summary", {}, `${several(artifacts.length, "artifact")}, ${bytes(total)}`), all) : null,
    h("details", {}, h("summary", {}, "Job document"), h("pre", { tabindex: 0, "aria-label": "Job document" }, JSON.stringify(job.document, null, 2))),
  );
}
