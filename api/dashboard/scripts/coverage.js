// The coverage bar: the trainable parameters by the form in which their curvature is kept, and the reasons for the rest.

import { h } from "./dom.js";
import { hundredths, number, several, words } from "./format.js";

const REASONS = {
  no_gradient: "the loss has no gradient in them",
  zero_curvature: "the loss has no curvature in them",
  unsupported: "their layer type is not supported",
  gradient_identity: "their rows do not give the gradient of each example",
  correction_differs: "the passes of EK-FAC saw other gradients",
  examples_mix: "the model mixes the examples of a batch",
  not_repeatable: "the same batch gives other numbers each time",
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

const FORMS = {
  block: "full block",
  diagonal: "diagonal alone",
  sketched: "diagonal and sketch",
  covered: "covered",
};

// Parameters by name, each with the operation that keeps them from more, or the class of their module.
function namedParameters(part) {
  const names = part.named.map((each) => `${each.names.join(", ")} (${each.why ?? each.module})`);
  const more = part.layers - part.named.length;
  return names.length ? [...names, ...(more > 0 ? [`and ${number(more)} more`] : [])].join("; ") : null;
}

/** "of the 37.2% that was measured", where a part of the model is missing; else null. */
export function partSentence(coverage) {
  return coverage?.message ? `of the ${hundredths(coverage.measured_percent)} that was measured` : null;
}

/** A sentence of the service, with what stands between backticks as code. */
export function withCode(sentence) {
  return sentence.split("`").map((part, index) => (index % 2 ? h("code", {}, part) : part));
}

/** What was not measured and what would cover it; a warning, unless the document accepts the part. */
export function partialCard(coverage) {
  if (!coverage?.message) return null;
  const partial = coverage.status === "partial";
  return h(
    "section",
    { class: partial ? "notice warn" : "notice", role: "status", "aria-label": "Part of the model" },
    h("strong", {}, `Only ${hundredths(coverage.measured_percent)} of the model was measured`),
    h("p", {}, `Every figure below is ${partSentence(coverage)}. The loss also depends on:`),
    h(
      "ul",
      {},
      coverage.not_measured.map((each) => {
        const part = coverage.parts.find(({ reason }) => reason === each.reason);
        const named = namedParameters(part);
        return h(
          "li",
          {},
          `${number(each.parameters)} parameters (${hundredths(part.percent)}), ${words(each.reason)}`,
          named ? [": ", ...withCode(named)] : null,
          ". ",
          each.remedy ? ["To cover them: ", ...withCode(each.remedy), "."] : null,
        );
      }),
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
    h("strong", {}, job.imported ? "Imported" : "Not everything was read as it stands"),
    h("ul", {}, job.notices.map((each) => h("li", {}, ...withCode(each), "."))),
  );
}

/** Whether a job that reproduces another is equal to it, or where they differ. */
export function reproductionCard(reproduction) {
  if (!reproduction) return null;
  return h(
    "section",
    { class: reproduction.equal ? "notice" : "notice warn", role: "status", "aria-label": "Reproduction" },
    h("strong", {}, reproduction.equal ? "The same numbers again" : "Other numbers than before"),
    h("ul", {}, reproduction.sentences.map((each) => h("li", {}, ...withCode(each)))),
    h("p", { class: "small" }, h("a", { href: `#/jobs/${reproduction.of}` }, "The job that was reproduced")),
  );
}

/** What is known of the parameters: a bar of the forms, and a line for each with its share; the shares add up to 100. */
export function coverageCard(counts, coverage) {
  const forms = coverage.parts.filter((part) => part.kind !== "not_covered");
  const missing = coverage.parts.filter((part) => part.kind === "not_covered");
  const kinds = forms.map((part) => `${hundredths(part.percent)} ${FORMS[part.kind]}`).join(", ");
  const label = `${hundredths(coverage.measured_percent)} of ${number(coverage.trainable_parameters)} trainable parameters are covered: ${kinds}`;
  const line = (part, said, look) => {
    const named = namedParameters(part);
    return h(
      "li",
      {},
      h("i", look),
      h("strong", {}, hundredths(part.percent)),
      ` ${said}: ${number(part.parameters)}${part.kind === "not_covered" ? " " : ` of ${number(coverage.trainable_parameters)} trainable parameters`}`,
      part.reason ? h("code", {}, part.reason) : null,
      named ? h("span", { class: "under" }, ...withCode(named)) : null,
    );
  };
  return h(
    "section",
    { class: "card stack tight", "aria-label": "Coverage" },
    h("div", { class: "row apart" }, h("h2", {}, "Coverage"), h("span", { class: "muted small" }, `${several(counts.layers_covered, "layer")} covered, ${number(counts.layers_declared)} not covered`)),
    h(
      "div",
      { class: "coverage", role: "img", "aria-label": label },
      forms.map((part) => h("span", { class: part.kind, share: part.share })),
      missing.map((part, index) => h("span", { class: "declared", "data-order": index % 3, share: part.share })),
    ),
    h(
      "ul",
      { class: "coverage-key" },
      forms.map((part) => line(part, FORMS[part.kind], { class: part.kind })),
      missing.map((part, index) => line(part, `not covered, ${REASONS[part.reason] ?? words(part.reason)}`, { class: "declared", "data-order": index % 3 })),
    ),
    identityLine(counts),
  );
}

/** What the experts of a model were sent: a line on all, a table of the most starved ones, the names of those not reached. */
export function expertsCard(experts) {
  if (!experts) return null;
  const heads = ["Layer", "Tokens", "Rank at most", "Data for full rank"];
  const rows = experts.most_starved.map((each) => [
    h("code", {}, each.layer),
    number(each.tokens),
    `${number(each.rank_bound)} of ${number(each.columns)} (${each.factor})`,
    `${number(each.times_more)} ×`,
  ]);
  const more = experts.starved - rows.length;
  const unnamed = experts.unreached - experts.unreached_layers.length;
  const others = [more > 0 ? `${number(more)} more ${more === 1 ? "is" : "are"} starved.` : null, experts.unreached ? ["No token reached ", ...withCode(experts.unreached_layers.map((name) => `\`${name}\``).join(", ")), unnamed ? ` and ${number(unnamed)} more.` : "."] : null];
  return h(
    "section",
    { class: "card stack tight", "aria-label": "Experts" },
    h("div", { class: "row apart" }, h("h2", {}, "Experts"), h("span", { class: "muted small" }, `${several(experts.layers, "layer")}, ${number(experts.starved)} starved, ${number(experts.unreached)} not reached`)),
    h("p", {}, `Each layer of an expert was sent ${number(experts.fewest)} to ${number(experts.most)} tokens.`),
    rows.length
      ? [
          h("p", { class: "muted small" }, "A factor that fewer rows entered than it has columns is singular by count:"),
          h("div", { class: "scroll", role: "region", tabindex: 0, "aria-label": "Starved experts" }, h("table", {}, h("thead", {}, h("tr", {}, heads.map((head, index) => h("th", { scope: "col", class: index ? "numeric" : null }, head)))), h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell, index) => h("td", { class: index ? "numeric" : null }, cell))))))),
        ]
      : null,
    others.filter(Boolean).map((each) => h("p", {}, each)),
  );
}
