// The coverage bar: the share of the trainable parameters that the results cover, and the reasons for the rest.

import { h } from "./dom.js";
import { number, percent, portion, several, words } from "./format.js";

const REASONS = {
  no_gradient: "the loss has no gradient in them",
  zero_curvature: "the loss has no curvature in them",
  unsupported: "their layer type is not supported",
  gradient_identity: "their rows do not give the gradient of each example",
  examples_mix: "the model mixes the examples of a batch",
  gradient_not_followed: "their gradient passes an operation that is not supported",
};

// One line: the largest error of the gradient identity on these data.
function identityLine(coverage) {
  const difference = coverage.gradient_identity;
  if (difference === null || difference === undefined) return h("p", { class: "muted small" }, "Gradient identity: not checked.");
  const shown = difference === 0 ? "exactly" : `to ${difference.toExponential(1)}`;
  const examples = coverage.examples_checked;
  const against = examples ? `in ${several(examples, "example")} or more` : "as a sum, since the model draws random numbers";
  return h("p", { class: "muted small" }, `Gradient identity: the rows of every covered layer give the gradient of each example ${shown} (${against}).`);
}

/** "of the 37.2 % that was measured", where a part of the model is missing; else null. */
export function partSentence(coverage) {
  return coverage?.message ? `of the ${portion(coverage.measured_share)} that was measured` : null;
}

// A sentence of the service, with what stands between backticks as code.
function withCode(sentence) {
  return sentence.split("`").map((part, index) => (index % 2 ? h("code", {}, part) : part));
}

/** What was not measured and what would cover it; a warning, unless the document accepts the part. */
export function partialCard(coverage) {
  if (!coverage?.message) return null;
  const partial = coverage.status === "partial";
  return h(
    "section",
    { class: partial ? "notice warn" : "notice", role: "status", "aria-label": "Part of the model" },
    h("strong", {}, `Only ${portion(coverage.measured_share)} of the model was measured`),
    h("p", {}, `Every figure below is ${partSentence(coverage)}. The loss also depends on:`),
    h(
      "ul",
      {},
      coverage.not_measured.map((each) =>
        h("li", {}, `${number(each.parameters)} parameters (${portion(each.share)}), ${words(each.reason)}. `, each.remedy ? ["To cover them: ", ...withCode(each.remedy), "."] : null),
      ),
    ),
    partial ? h("p", { class: "small" }, "To accept the part, name it in the document: ", h("code", {}, `collection.min_coverage: ${Math.floor(coverage.measured_share * 1000) / 1000}`), ".") : null,
  );
}

/** The analyses that were refused while the others were done, each with the sentence that it was refused with. */
export function refusedCard(job, titles) {
  if (!job.refused?.length) return null;
  return h(
    "section",
    { class: "notice warn", role: "status", "aria-label": "Refused analyses" },
    h("strong", {}, `${several(job.refused.length, "analysis", "analyses")} of ${number(job.kinds.length)} ${job.refused.length === 1 ? "was" : "were"} refused`),
    h("p", {}, "The results of the others are complete without it:".replace("it", job.refused.length === 1 ? "it" : "them")),
    h(
      "ul",
      {},
      job.refused.map((each) =>
        h("li", {}, h("strong", {}, titles.get(each.kind) ?? each.kind), ": ", ...withCode(each.message), each.pointer ? [" (field ", h("code", {}, each.pointer), ")"] : null, "."),
      ),
    ),
  );
}

/** What of the model's folder or the data was read otherwise than it stands there. */
export function noticesCard(job) {
  if (!job.notices?.length) return null;
  return h(
    "section",
    { class: "notice warn", role: "status", "aria-label": "Notices of the inputs" },
    h("strong", {}, "Not everything was read as it stands"),
    h("ul", {}, job.notices.map((each) => h("li", {}, ...withCode(each), "."))),
  );
}

export function coverageCard(coverage) {
  const total = coverage.trainable_parameters || 1;
  const reasons = Object.entries(coverage.reasons ?? {}).sort((a, b) => b[1] - a[1]);
  const label = `${portion(coverage.covered_share)} of ${number(coverage.trainable_parameters)} trainable parameters are covered`;
  return h(
    "section",
    { class: "card stack tight", "aria-label": "Coverage" },
    h("div", { class: "row apart" }, h("h2", {}, "Coverage"), h("span", { class: "muted small" }, `${several(coverage.layers_covered, "layer")} covered, ${number(coverage.layers_declared)} not covered`)),
    h(
      "div",
      { class: "coverage", role: "img", "aria-label": label },
      h("span", { class: "covered", share: coverage.covered_parameters / total }),
      reasons.map(([, count], index) => h("span", { class: "declared", "data-order": index % 3, share: count / total })),
    ),
    h(
      "ul",
      { class: "coverage-key" },
      h("li", {}, h("i", { class: "covered" }), h("strong", {}, portion(coverage.covered_share)), ` covered: ${number(coverage.covered_parameters)} of ${number(coverage.trainable_parameters)} trainable parameters`),
      reasons.map(([reason, count], index) =>
        h("li", {}, h("i", { class: "declared", "data-order": index % 3 }), h("strong", {}, percent(count / total)), ` not covered, ${REASONS[reason] ?? words(reason)}: ${number(count)} `, h("code", {}, reason)),
      ),
    ),
    identityLine(coverage),
  );
}
