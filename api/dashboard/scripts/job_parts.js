// The static parts of the job page: heading, placement, failure, files.

import { download } from "./api.js";
import { h } from "./dom.js";
import { age, between, bytes, clock, jobName, modelName, number, several, sourceName } from "./format.js";
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
    job.name ? ["Model", modelName(job)] : null,
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
        ? null
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
};

/** The reason why a queued job has not begun, where there is one besides its turn. */
export function placementCard(job) {
  const { placement } = job;
  if (job.state !== "queued" || !placement || !UNPLACED[placement.status]) return null;
  const blocked = placement.status !== "reserved";
  return h(
    "section",
    { class: blocked ? "notice warn" : "notice", role: "status", "aria-label": "Placement" },
    h("strong", {}, UNPLACED[placement.status]),
    h("p", {}, `${placement.message.charAt(0).toUpperCase()}${placement.message.slice(1)}.`),
    blocked ? h("p", { class: "small" }, "It stays in the queue until a worker can take it up.") : null,
  );
}

export function failureCard(job) {
  const { failure } = job;
  const where = [failure.layer ? ["Layer", failure.layer] : null, failure.pointer ? ["Field", failure.pointer] : null].filter(Boolean);
  return h(
    "section",
    { class: "notice bad", role: "alert", "aria-label": "Failure" },
    h("strong", {}, job.state === "failed" ? "The job failed" : "An attempt failed"),
    h("p", {}, failure.message),
    where.length ? h("p", {}, where.flatMap(([name, value]) => [`${name} `, h("code", {}, value), " "])) : null,
    h("p", { class: "small" }, WHO[failure.category] ?? "", " ", h("code", {}, failure.code)),
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
        ["log.jsonl", `${base}/log`, "reproducibility record of every layer"],
        ["layers.csv", `${base}/layers.csv`, "the layer table for a spreadsheet"],
        ["results.json", `${base}/results`, "summary and manifest"],
      ];
  const merged = job.parent && !artifacts.length ? "The results are on the page of the whole job. What a piece has summed is kept until the job has merged it." : null;
  const all = h(
    "ul",
    { class: "files" },
    artifacts.map((file) => fileLine(`${base}/artifacts/${file.name.split("/").map(encodeURIComponent).join("/")}?direct=false`, file.name, bytes(file.size_bytes))),
  );
  const total = artifacts.reduce((sum, file) => sum + file.size_bytes, 0);
  return h(
    "section",
    { class: "card stack tight", "aria-label": "Files" },
    h("h2", {}, "Files"),
    fixed.length ? h("ul", { class: "files" }, fixed.map(([name, path, note]) => fileLine(path, name, note))) : null,
    merged ? h("p", { class: "muted small" }, merged) : null,
    artifacts.length ? h("details", {}, h("summary", {}, `${several(artifacts.length, "artifact")}, ${bytes(total)}`), all) : null,
    h("details", {}, h("summary", {}, "Job document"), h("pre", { tabindex: 0, "aria-label": "Job document" }, JSON.stringify(job.document, null, 2))),
  );
}
