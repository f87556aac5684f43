// The state of a job as a pill, and its progress as a bar with a sentence.

import { h } from "./dom.js";
import { hundredths, number, remaining, several, words } from "./format.js";

export const ENDED = new Set(["succeeded", "failed", "cancelled"]);

const SAID = {
  queued: "Queued",
  running: "Running",
  waiting: "In pieces",
  cancelling: "Cancelling",
  succeeded: "Succeeded",
  failed: "Failed",
  cancelled: "Cancelled",
};

/** Of a job that ended well, what it did in part: of the model, which its document does not accept, or of its analyses. */
export function partsDone(job, measured = "") {
  if (job.state !== "succeeded") return [];
  const share = job.coverage?.status === "partial" ? `${hundredths(job.coverage.measured_percent)}${measured}` : null;
  const refused = job.refused?.length ? `${job.refused.length} of ${job.kinds.length} refused` : null;
  return [share, refused].filter(Boolean);
}

export function isPartial(job) {
  return partsDone(job).length > 0;
}

/** Of a job that ended well, the share of its model that has a diagonal or a sketch in place of a full block. */
function formsKept(job) {
  if (job.state !== "succeeded") return [];
  return (job.coverage?.parts ?? []).filter(({ kind }) => kind === "diagonal" || kind === "sketched").map((part) => `${hundredths(part.percent)} ${part.kind}`);
}

export function statePill(job) {
  const forms = [...(job.imported ? ["imported"] : []), ...formsKept(job)];
  if (isPartial(job)) {
    const said = [job.coverage?.status === "partial" ? job.coverage.message : null, ...(job.refused ?? []).map((each) => `${each.kind}: ${each.message}`)];
    return h("span", { class: "pill", "data-state": "partial", title: said.filter(Boolean).join("\n") }, `Partial, ${[...partsDone(job), ...forms].join(", ")}`);
  }
  return h("span", { class: "pill", "data-state": formsKept(job).length ? "lesser" : job.state }, [job.state === "waiting" && job.document?.series ? "In series" : SAID[job.state] ?? job.state, ...forms].join(", "));
}

export function shareDone(job) {
  if (job.state === "succeeded") return 1;
  const value = job.progress?.percent;
  return typeof value === "number" ? Math.min(1, Math.max(0, value / 100)) : 0;
}

export function stageSentence(job) {
  const progress = job.progress;
  const after = job.failures ? `, after ${several(job.failures, "failed attempt")}` : "";
  if (job.state === "queued") {
    const wanted = job.pieces?.length ? "Its pieces are done; waiting for a worker to go on with them" : job.placement?.status === "waiting" ? "Waiting for its turn" : "Waiting for a worker";
    return `${wanted}${after}`;
  }
  if (!progress?.stage) return job.state === "running" ? `Starting${after && " again"}${after}` : "";
  const stage = { model: "Loading the model", data: "Reading the data", collection: "Collecting curvature", correction: "Correcting eigenvalues", cross_check: "Computing the exact curvature", products: "Multiplying by the exact curvature", decomposition: "Decomposing", score: "Scoring queries", training: "Training", fewshot_training: "Testing" }[progress.stage];
  const counted = progress.done ? `${number(progress.done)} ${progress.unit}` : "";
  const done = progress.total ? `${number(progress.done)} of ${number(progress.total)} ${progress.unit}` : counted;
  if (progress.stage === "series") return `Measuring and comparing checkpoints · ${done}`;
  if (job.state === "waiting") return [`${stage ?? words(progress.stage)} in pieces`, done].filter(Boolean).join(" · ");
  return [stage ?? `Measuring ${words(progress.stage)}`, done].filter(Boolean).join(" · ");
}

/** Whether a job runs through data of unknown length, so that no share of it can be told. */
export function isOpenEnded(job) {
  return job.state === "running" && Boolean(job.progress?.stage) && job.progress.percent === null;
}

/** How long the job will still take, as the service estimates it; empty where it cannot. */
export function timeLeft(job) {
  const left = job.progress?.eta_seconds;
  return job.state === "running" && typeof left === "number" ? `about ${remaining(left)} left` : "";
}

/** A progress bar, with its value for assistive technology. */
export function bar(share, label, options = {}) {
  const value = options.openEnded ? null : Math.round(share * 100);
  return h(
    "div",
    {
      class: `progress${options.large ? " large" : ""}${options.thin ? " thin" : ""}${options.openEnded ? " open-ended" : ""}`,
      role: "progressbar",
      "aria-label": label,
      "aria-valuemin": 0,
      "aria-valuemax": 100,
      "aria-valuenow": value,
      "data-state": options.state,
    },
    h("span", { share }),
  );
}
