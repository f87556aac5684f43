// The eigenvalues of all layers together: how many lie where, and how many count at which damping.

import { h, replace } from "../scripts/dom.js";
import { decade, number, percent, several, words } from "../scripts/format.js";
import { drawPlot } from "./plot.js";

const HEIGHT = 250;

function drawDensity(place, { edges, counts, below }, signal) {
  // empty decades below the first eigenvalue would squash the rest
  const first = Math.max(0, counts.findIndex((count) => count > 0));
  const bins = counts.slice(first).map((count, index) => ({ count, from: edges[first + index], to: edges[first + index + 1] }));
  const all = counts.reduce((sum, count) => sum + count, below);
  const [low, high] = [edges[first], edges.at(-1)];
  const plot = {
    label: `${number(all)} eigenvalues of the model between ${number(low)} and ${number(high)}, ${number(below)} below ${number(edges[counts.findIndex((count) => count !== null)] ?? high)}`,
    height: () => HEIGHT,
    xs: bins.map((bin) => Math.sqrt(bin.from * bin.to)),
    x: { name: "eigenvalue of F", log: true, low, high, format: decade },
    y: { name: "eigenvalues", low: 0, high: 1.06 * Math.max(1, ...counts) },
    series: [{ style: "A", bars: true, values: bins.map((bin) => bin.count) }],
    read: (index) => `${several(bins[index].count, "eigenvalue")} from ${number(bins[index].from)} to ${number(bins[index].to)}`,
  };
  drawPlot(place, plot, signal);
}

function drawCurve(place, curve, dimension, signal) {
  const points = curve.damping.map((damping, index) => [damping, curve.effective_dimension[index]]).filter(([, value]) => value !== null);
  const [[low, most], [high, least]] = [points[0], points.at(-1)];
  const plot = {
    label: `Effective dimension of the model, from ${number(most)} of ${number(dimension)} at damping ${number(low)} to ${number(least)} at ${number(high)}`,
    height: () => HEIGHT,
    xs: points.map(([damping]) => damping),
    x: { name: "damping λ, absolute", log: true, low, high, format: decade },
    y: { name: "effective dimension", low: 0, high: 1.06 * dimension },
    series: [
      { style: "G", values: points.map(([, value]) => value) },
      { style: "G", limit: true, values: points.map(() => dimension) },
    ],
    read: (index) => `${number(points[index][1])} of ${number(dimension)} directions at damping ${number(points[index][0])}`,
  };
  drawPlot(place, plot, signal);
}

function facts(model, summary) {
  const top = model.top_eigenvalues?.[0];
  const share = [...(model.trace_shares ?? [])].sort((a, b) => (b.share ?? 0) - (a.share ?? 0))[0];
  const decay = model.decay;
  const late = Object.entries(summary.not_converged ?? {}).filter(([, layers]) => layers);
  const lines = [
    ["Effective rank of the model", number(model.effective_rank), "Of all layers as one block-diagonal matrix; the layers' own do not add up to it"],
    ["Participation ratio", number(model.participation_ratio)],
    ["Stable rank", number(model.stable_rank)],
    ["Numerical rank", number(model.rank)],
    ["Decay", decay ? `α = ${number(decay.exponent)}` : "–", decay ? `λ_k ∝ k^−α over ranks ${number(decay.first_rank)} to ${number(decay.last_rank)}, R² ${number(decay.r_squared)}` : "Too few eigenvalues for a fit"],
    ["κ, damped", number(model.kappa_damped)],
    top ? ["Largest eigenvalue", `${number(top.value)} in ${top.layer || "(model)"}`] : null,
    share ? ["Most of the trace", `${percent(share.share)} in ${share.layer || "(model)"}`] : null,
    summary.not_converged ? ["Not converged", late.length ? late.map(([metric, layers]) => `${words(metric)} (${several(layers, "layer")})`).join(", ") : "nothing"] : null,
    model.no_spectrum?.length ? ["Without eigenvalues", model.no_spectrum.join(", ")] : null,
    model.estimated?.length ? ["Eigenvalues estimated between bounds", model.estimated.join(", "), "Rank, condition, quantiles and decay follow from them; their own bounds are in `intervals`"] : null,
    model.approximate?.length ? ["Approximate, of a sketch of G", model.approximate.join(", ")] : null,
  ].filter(Boolean);
  return h("dl", { class: "facts" }, lines.map(([name, value, title]) => h("div", { title }, h("dt", {}, name), h("dd", {}, value))));
}

/** Shows what was asked for of all layers together; without any of it the page says nothing. */
export function showModelSpectrum(place, summary, signal) {
  const model = summary?.model;
  const figures = [];
  if (model?.density) figures.push(["Where the eigenvalues lie", (plot) => drawDensity(plot, model.density, signal)]);
  if (model?.effective_dimension_curve) {
    figures.push(["Directions that count, by damping", (plot) => drawCurve(plot, model.effective_dimension_curve, summary.dimension, signal)]);
  }
  if (!figures.length) return;
  const plots = figures.map(() => h("div", { class: "plot low" }));
  replace(
    place,
    h(
      "section",
      { class: "card stack tight", "aria-label": "Spectrum of the model" },
      h("h2", {}, "Spectrum of the model"),
      h("div", { class: "plot-pair" }, figures.map(([name], index) => h("div", {}, h("h3", { class: "plot-name" }, name), plots[index]))),
      facts(model, summary),
    ),
  );
  for (const [index, [, draw]] of figures.entries()) draw(plots[index]);
}
