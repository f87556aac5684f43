// The summary figures of an analysis, each with a sentence that explains it.

import { h } from "./dom.js";
import { bytes, curvatureName, number, percent, portion, several, words } from "./format.js";

const FIGURES = {
  capacity: (summary) => [
    {
      name: "Effective dimension",
      value: number(summary.effective_dimension, 4),
      note: `of ${number(summary.dimension)} directions`,
      text: "The number of directions in which the loss has more curvature than the damping.",
    },
    {
      name: "Share of directions",
      value: percent(summary.effective_dimension_share, 2),
      note: "effective dimension / dimension",
      text: "The other directions have less curvature than the damping.",
    },
    {
      name: "Sum of effective ranks",
      value: number(summary.effective_rank, 4),
      note: "over layers",
      text: "A layer's effective rank is the size of a flat spectrum with the same entropy: the more even the spectrum, the larger.",
    },
    {
      name: "Trace",
      value: number(summary.trace, 4),
      note: "total curvature",
      text: "The sum of all eigenvalues: the larger, the more the loss changes under small random changes of the weights.",
    },
  ],
  compare_curvature: (summary) => {
    const last = summary.overlaps?.findLast((each) => each.overlap != null);
    const apart = (summary.only_first?.length ?? 0) + (summary.only_against?.length ?? 0) + (summary.other_sizes?.length ?? 0);
    const differences = (summary.differences ?? []).map((each) => `${each.option} ${each.first} against ${each.against}`).join(", ");
    return [
      {
        name: "Overlap",
        value: last ? number(last.overlap, 3) : "–",
        note: last ? `k = ${last.k}, mean over ${several(last.layers, "layer")}` : "no eigenspace is determined",
        text: "Of the spans of the leading eigenvectors of G ⊗ A in both sets: 1 where they are equal, 0 where they are orthogonal.",
      },
      {
        name: "Distance",
        value: summary.relative_distance == null ? "–" : number(summary.relative_distance, 3),
        note: summary.farthest ? `largest in ${summary.farthest}` : "relative, by Frobenius norm",
        text: "‖F₁ − F₂‖ / ‖F₂‖ of the block-diagonal matrices of all compared layers, by Frobenius norm.",
      },
      {
        name: "Divergence",
        value: summary.divergence == null ? "–" : number(summary.divergence, 3),
        note: `nats; ${summary.reverse_divergence == null ? "–" : number(summary.reverse_divergence, 3)} the other way`,
        text: "Kullback-Leibler divergence of the Gaussians whose precisions are the two damped curvatures.",
      },
      {
        name: "Compared",
        value: several(summary.layers, "layer"),
        note: apart ? `${number(apart)} only in one set, or of another size` : "all layers of both sets",
        text: differences ? `The two were collected with ${differences}.` : "The two were collected with the same options.",
      },
    ];
  },
  reconstruction: (summary) => [
    {
      name: "Clipped",
      value: percent(summary.clipped_share, 2),
      note: `${number(summary.clipped)} of ${number(summary.eigenvalues)} eigenvalues`,
      text: "Eigenvalues of A and G below λ_max/κ_max, which were raised to this floor.",
    },
    {
      name: "Floor kept",
      value: summary.floor_kept == null ? "–" : portion(summary.floor_kept),
      note: `κ_max = ${number(summary.kappa_max)}`,
      text: "The smallest eigenvalue after clipping over the floor λ_max/κ_max, at its minimum over all factors.",
    },
    {
      name: "Trace added",
      value: summary.mass_share == null ? "–" : percent(summary.mass_share, 2),
      note: "of the trace before clipping",
      text: "The part of the trace that clipping has added.",
    },
    {
      name: "Error",
      value: summary.relative_error == null ? "–" : number(summary.relative_error, 2),
      note: summary.route === "eigenbasis" ? "no factor was rebuilt" : "largest of all factors",
      text: "Relative distance of a stabilised factor from Q max(Λ, f) Qᵀ.",
    },
  ],
  natural_gradient: (summary) => [
    {
      name: "Gradient",
      value: number(summary.gradient_norm, 4),
      note: summary.gradient === "file" ? "norm, of a file" : "norm, of the mean loss",
      text: summary.uncovered_share ? `${percent(summary.uncovered_share, 2)} of its square is in parameters that no layer covers, where there is no direction.` : "Every trainable number has a direction.",
    },
    ...summary.directions.map((each) => ({
      name: `α = ${number(each.power)}`,
      value: each.cosine == null ? "–" : each.cosine.toFixed(3),
      note: `cosine to the gradient; gᵀF^(−α)g = ${number(each.inner, 3)}`,
      text: `Norm ${number(each.norm, 3)}; a step of 1 goes as far along the gradient as plain descent with a learning rate of ${number(each.effective_step, 3)}.`,
    })),
  ],
  factors: (summary) => [
    { name: "Examples", value: number(summary.examples), note: `${several(summary.updates, "update")}, ${several(summary.passes, "pass", "passes")}`, text: "The number of examples that the factors are averaged over." },
    { name: "Layers", value: number(summary.layers), note: `${summary.fisher} Fisher, ${summary.sharing}`, text: "Layers whose A and G were collected." },
    {
      name: "Size of the factors",
      value: bytes(summary.factor_bytes),
      note: `${bytes(summary.dense_factor_bytes)} without sharing`,
      text: "Layers that read the same input share one A.",
    },
  ],
  spectrum: (summary) => (summary.curvatures ?? []).map(curvatureFigure),
};

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
  const interval = each.trace_low == null ? "" : ` (95 %: ${number(each.trace_low)} to ${number(each.trace_high)})`;
  const parts = [
    bottom && top ? `smallest ${least(bottom)}${number(bottom.value)}` : null,
    each.trace == null ? null : `trace ${number(each.trace, 4)}${interval}`,
    each.negative_share == null ? null : `${percent(each.negative_share)} negative`,
  ];
  const shown = top ?? bottom;
  return {
    name: `${curvatureName(each.of)}, ${top || !bottom ? "largest" : "smallest"} eigenvalue`,
    value: shown ? `${least(shown)}${number(shown.value, 4)}` : "–",
    note: parts.filter(Boolean).join(", "),
    text: CURVATURES[each.of] ?? "",
  };
}

const PLAIN = new Set(["coverage"]);

function generic(summary) {
  return Object.entries(summary)
    .filter(([name, value]) => typeof value === "number" && !PLAIN.has(name))
    .map(([name, value]) => ({ name: words(name), value: number(value, 4), note: "", text: "" }));
}

function besideExact(exact) {
  if (!exact) return null;
  const interval = exact.trace_low == null ? "" : ` (95 %: ${number(exact.trace_low, 4)} to ${number(exact.trace_high, 4)})`;
  const trace = `The exact Gauss-Newton matrix has trace ${number(exact.trace, 4)}${interval} where K-FAC has ${number(exact.kronecker_trace, 4)}`;
  const most = exact.top_converged ? "" : "at least ";
  const top = exact.top_eigenvalue == null ? "" : `, and largest eigenvalue ${most}${number(exact.top_eigenvalue, 4)} where K-FAC has ${number(exact.kronecker_spectral_norm, 4)}`;
  return h("p", { class: "small" }, `${trace}${top}.`);
}

function notes(kind, summary) {
  if (kind !== "capacity") return null;
  const parts = [
    `damping ${number(summary.damping)} (${[summary.damping_mode, summary.damping_split].filter(Boolean).join(", ")})`,
    summary.kappa_max ? `κ_max = ${number(summary.kappa_max)}` : "no clipping",
    `${summary.fisher} Fisher`,
    summary.sharing,
    `log det ${number(summary.logdet_damped, 5)} (damped)`,
    several(summary.eigendecompositions, "eigendecomposition"),
  ];
  const flat = summary.identity_layers?.length
    ? h("p", { class: "notice warn small" }, `The damping exceeds every eigenvalue of ${summary.identity_layers.join(", ")}: a preconditioner would be the identity there.`)
    : null;
  return [h("p", { class: "muted small" }, parts.join(" · ")), besideExact(summary.cross_check), flat];
}

/** The cards of one analysis; `part` says of which part of the model they are, where one is missing. */
export function figuresCard(kind, summary, title, part) {
  const figures = (FIGURES[kind] ?? generic)(summary);
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
          figure.text ? h("p", { class: "small" }, figure.text) : null,
        ),
      ),
    ),
    notes(kind, summary),
  );
}
