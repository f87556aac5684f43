// The summary figures of an analysis, each with a sentence that explains it.

import { ANALYSES } from "./analyses.js";
import { h } from "./dom.js";
import { at, curvatureName, fill, number, percent, several, words } from "./format.js";

function comparisonFigures(summary) {
  const last = summary.overlaps?.findLast((each) => each.overlap != null);
  const apart = (summary.only_first?.length ?? 0) + (summary.only_against?.length ?? 0) + (summary.other_sizes?.length ?? 0);
  const differences = (summary.differences ?? []).map((each) => `${each.option} ${each.first} against ${each.against}`).join(", ");
  return [
    {
      name: "Overlap",
      value: last ? number(last.overlap) : "–",
      note: last ? `k = ${last.k}, mean over ${several(last.layers, "layer")}` : "no eigenspace is determined",
      text: "Of the spans of the leading eigenvectors of G ⊗ A in both sets: 1 where they are equal, 0 where they are orthogonal.",
    },
    {
      name: "Distance",
      value: summary.relative_distance == null ? "–" : number(summary.relative_distance),
      note: summary.farthest ? `largest in ${summary.farthest}` : "relative, by Frobenius norm",
      text: "‖F₁ − F₂‖ / ‖F₂‖ of the block-diagonal matrices of all compared layers, by Frobenius norm.",
    },
    {
      name: "Divergence",
      value: summary.divergence == null ? "–" : number(summary.divergence),
      note: `nats; ${summary.reverse_divergence == null ? "–" : number(summary.reverse_divergence)} the other way`,
      text: "Kullback-Leibler divergence of the Gaussians whose precisions are the two damped curvatures.",
    },
    {
      name: "Compared",
      value: several(summary.layers, "layer"),
      note: apart ? `${number(apart)} only in one set, or of another size` : "all layers of both sets",
      text: differences ? `The two were collected with ${differences}.` : "The two were collected with the same options.",
    },
  ];
}

const CURVATURES = {
  kfac: "Each layer's G ⊗ A: the approximation that the factors stand for.",
  ekfac: "K-FAC's eigenvectors with eigenvalues that were estimated anew.",
  ggn: "The generalised Gauss-Newton matrix itself, of all covered parameters together.",
  fisher: "The Fisher information of labels that were sampled from the model.",
  empirical: "The Fisher of the data's own labels.",
  hessian: "The Hessian of the loss, which may curve downwards too.",
};

/** The outermost eigenvalues, trace and negative part of one curvature. */
function curvatureFigure(each) {
  const [top, bottom] = [each.largest?.[0], each.smallest?.[0]];
  const least = (found) => (found && found.bound !== null && !found.converged ? "≈ " : "");
  const interval = each.trace_low == null ? "" : ` (95%: ${number(each.trace_low)} to ${number(each.trace_high)})`;
  const parts = [
    bottom && top ? `smallest ${least(bottom)}${number(bottom.value)}` : null,
    each.trace == null ? null : `trace ${number(each.trace)}${interval}`,
    each.negative_share == null ? null : `${percent(each.negative_share)} negative`,
  ];
  const shown = top ?? bottom;
  return {
    name: `${curvatureName(each.of)}, ${top || !bottom ? "largest" : "smallest"} eigenvalue`,
    value: shown ? `${least(shown)}${number(shown.value)}` : "–",
    note: parts.filter(Boolean).join(", "),
    text: CURVATURES[each.of] ?? "",
  };
}

/** The catalog's figure of an analysis, or of each element of a list. */
function stated(figure, summary) {
  const text = (texts, source) => (texts ? fill(texts, source, true) : "");
  const sources = figure.each ? (at(summary, figure.each) ?? []) : [summary];
  return sources.map((source) => ({
    name: text(figure.name, source),
    value: text(figure.value, source),
    note: text(figure.note, source),
    text: text(figure.text, source),
  }));
}

function figuresOf(kind, summary) {
  if (summary.curvatures) return summary.curvatures.map(curvatureFigure);
  if (summary.only_against) return comparisonFigures(summary);
  const figures = ANALYSES[kind]?.figures ?? [];
  return figures.length ? figures.flatMap((figure) => stated(figure, summary)) : generic(summary);
}

const PLAIN = new Set(["coverage"]);

function generic(summary) {
  return Object.entries(summary)
    .filter(([name, value]) => typeof value === "number" && !PLAIN.has(name))
    .map(([name, value]) => ({ name: words(name), value: number(value), note: "", text: "" }));
}

function besideExact(exact) {
  if (!exact) return null;
  const interval = exact.trace_low == null ? "" : ` (95%: ${number(exact.trace_low)} to ${number(exact.trace_high)})`;
  const trace = `The exact Gauss-Newton matrix has trace ${number(exact.trace)}${interval} where K-FAC has ${number(exact.kronecker_trace)}`;
  const most = exact.top_converged ? "" : "at least ";
  const top = exact.top_eigenvalue == null ? "" : `, and largest eigenvalue ${most}${number(exact.top_eigenvalue)} where K-FAC has ${number(exact.kronecker_spectral_norm)}`;
  return h("p", { class: "small" }, `${trace}${top}.`);
}

/** The training examples that lower and raise the loss of each listed query most. */
function queries(summary) {
  if (!summary.listed?.[0]?.lowering) return null;
  const example = (each) => h("li", {}, `${each.example} (${number(each.score)})`, each.text ? h("span", { class: "muted" }, ` ${each.text}`) : null);
  const row = (query) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, `${query.query}`, query.text ? h("span", { class: "muted small" }, ` ${query.text}`) : null, query.converged ? null : h("span", { class: "muted small" }, ` residual ${number(query.residual)}`)),
      [query.lowering, query.raising].map((list) => h("td", {}, h("ul", { class: "meanings small" }, list.map(example)))),
    );
  const heads = ["Query", "Lower its loss", "Raise its loss"].map((text) => h("th", { scope: "col" }, text));
  const rows = summary.listed.map(row);
  const more = summary.queries > rows.length ? `The first ${number(rows.length)} of ${number(summary.queries)} queries; the files hold all scores. ` : "";
  return h(
    "details",
    {},
    h("summary", {}, "Training examples of each query"),
    h("p", { class: "muted small" }, `${more}Places in the data, from 0, with their scores.`),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Training examples of each query" }, h("table", { class: "plain texts" }, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, rows))),
  );
}

function notes(summary) {
  if (!("logdet_damped" in summary)) return null;
  const parts = [
    `damping ${number(summary.damping)} (${[summary.damping_mode, summary.damping_split].filter(Boolean).join(", ")})`,
    summary.kappa_max ? `κ_max = ${number(summary.kappa_max)}` : "no clipping",
    `${summary.fisher} Fisher`,
    summary.sharing,
    `log det ${number(summary.logdet_damped)} (damped)`,
    several(summary.eigendecompositions, "eigendecomposition"),
  ];
  const flat = summary.identity_layers?.length
    ? h("p", { class: "notice warn small" }, `The damping exceeds every eigenvalue of ${summary.identity_layers.join(", ")}: a preconditioner would be the identity there.`)
    : null;
  return [h("p", { class: "muted small" }, parts.join(" · ")), besideExact(summary.cross_check), flat];
}

/** The sentences that explain the figures, folded away. */
function meaning(figures) {
  const explained = figures.filter((figure) => figure.text);
  if (!explained.length) return null;
  return h("details", { class: "small" }, h("summary", {}, "What these figures are"), h("ul", { class: "meanings" }, explained.map((figure) => h("li", {}, `${figure.name}: ${figure.text}`))));
}

/** The cards of one analysis; `part` says of which part of the model they are, where one is missing. */
export function figuresCard(kind, summary, title, part) {
  const figures = figuresOf(kind, summary);
  return h(
    "section",
    { class: "stack tight", "aria-label": title },
    h("h2", {}, title, part ? h("span", { class: "part" }, ` ${part}`) : null),
    h(
      "div",
      { class: "figures" },
      figures.map((figure) =>
        h(
          "div",
          { class: "card figure-card" },
          h("span", { class: "label" }, figure.name),
          h("span", { class: "big" }, figure.value),
          figure.note ? h("span", { class: "muted small" }, figure.note) : null,
          part ? h("span", { class: "part small" }, part) : null,
        ),
      ),
    ),
    meaning(figures),
    queries(summary),
    notes(summary),
  );
}
