// The eigenvalues of all layers together: how many lie where, and how many count at which damping.

import { h, replace, s } from "../scripts/dom.js";
import { number, percent, power, several, words } from "../scripts/format.js";
import { steps } from "./memory_curve.js";
import { decades, logScale } from "./scale.js";

const NARROWEST = 280;
const HEIGHT = 260;
const EDGE = { left: 58, right: 16, top: 14, bottom: 46 };

function axes(width, [low, high], top, x, y, name) {
  const group = s("g", { class: "axes", "aria-hidden": "true" });
  for (const value of steps(top, 4)) {
    group.append(
      s("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y(value), y2: y(value) }),
      s("text", { x: EDGE.left - 8, y: y(value) + 4, "text-anchor": "end" }, number(value)),
    );
  }
  for (const exponent of decades(low, high, width / 62)) {
    group.append(s("text", { x: x(10 ** exponent), y: HEIGHT - EDGE.bottom + 18, "text-anchor": "middle" }, power(exponent)));
  }
  group.append(
    s("line", { class: "frame", x1: EDGE.left, x2: width - EDGE.right, y1: HEIGHT - EDGE.bottom, y2: HEIGHT - EDGE.bottom }),
    s("text", { class: "axis-name", x: (EDGE.left + width - EDGE.right) / 2, y: HEIGHT - 7, "text-anchor": "middle" }, name),
  );
  return group;
}

function picture(place, ends, top, name, label, marks) {
  const width = Math.max(NARROWEST, Math.floor(place.clientWidth));
  const x = logScale(ends[0], ends[1], EDGE.left + 4, width - EDGE.right - 4);
  const y = (value) => HEIGHT - EDGE.bottom - (value / (top * 1.06)) * (HEIGHT - EDGE.top - EDGE.bottom);
  replace(
    place,
    s("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, class: "spectrum whole", role: "img", "aria-label": label }, axes(width, ends, top, x, y, name), marks(x, y)),
  );
}

function drawDensity(place, density) {
  const { edges, counts } = density;
  // empty decades below the first eigenvalue would squash the rest
  const first = Math.max(0, counts.findIndex((count) => count > 0));
  const ends = [edges[first], edges[edges.length - 1]];
  const all = counts.reduce((sum, count) => sum + count, density.below);
  const label = `${number(all)} eigenvalues of the model between ${number(ends[0])} and ${number(ends[1])}, ${number(density.below)} below ${number(edges[0])}`;
  picture(place, ends, Math.max(...counts), "eigenvalue of F", label, (x, y) =>
    s(
      "g",
      { class: "series A" },
      counts.map((count, bin) => {
        if (!count || bin < first) return null;
        const [left, right] = [x(edges[bin]), x(edges[bin + 1])];
        const bar = s("rect", { class: "bin", x: left + 0.5, width: Math.max(1, right - left - 1), y: y(count), height: y(0) - y(count) });
        bar.append(s("title", {}, `${number(count)} from ${number(edges[bin])} to ${number(edges[bin + 1])}`));
        return bar;
      }),
    ),
  );
}

function drawCurve(place, curve, dimension) {
  const points = curve.damping.map((damping, index) => [damping, curve.effective_dimension[index]]).filter(([, value]) => value !== null);
  const ends = [points[0][0], points[points.length - 1][0]];
  const label = `Effective dimension of the model, from ${number(points[0][1])} of ${number(dimension)} at damping ${number(ends[0])} to ${number(points[points.length - 1][1])} at ${number(ends[1])}`;
  picture(place, ends, dimension, "damping λ, absolute", label, (x, y) =>
    s(
      "g",
      { class: "series G" },
      s("line", { class: "floor", x1: EDGE.left, x2: x(ends[1]), y1: y(dimension), y2: y(dimension) }),
      s("path", { class: "curve", fill: "none", d: points.map(([damping, value], index) => `${index ? "L" : "M"}${x(damping).toFixed(1)} ${y(value).toFixed(1)}`).join("") }),
    ),
  );
}

function facts(model, summary) {
  const top = model.top_eigenvalues?.[0];
  const share = [...(model.trace_shares ?? [])].sort((a, b) => (b.share ?? 0) - (a.share ?? 0))[0];
  const decay = model.decay;
  const late = Object.entries(summary.not_converged ?? {}).filter(([, layers]) => layers);
  const lines = [
    ["Effective rank", number(model.effective_rank, 4), "Of all layers as one block-diagonal matrix; the layers' own do not add up to it"],
    ["Participation ratio", number(model.participation_ratio, 4)],
    ["Stable rank", number(model.stable_rank, 4)],
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
  if (model?.density) figures.push(["Where the eigenvalues lie", (plot) => drawDensity(plot, model.density)]);
  if (model?.effective_dimension_curve) {
    figures.push(["Directions that count, by damping", (plot) => drawCurve(plot, model.effective_dimension_curve, summary.dimension)]);
  }
  if (!figures.length) return;
  // never empty: what is empty in a stack is not laid out, and so has no width to draw for
  const plots = figures.map(() => h("div", { class: "plot low" }, h("p", { class: "muted pad" }, "…")));
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
  const drawn = new Map();
  const watcher = new ResizeObserver(() => {
    for (const [index, plot] of plots.entries()) {
      if (Math.abs(plot.clientWidth - (drawn.get(index) ?? 0)) < 8) continue;
      drawn.set(index, plot.clientWidth);
      figures[index][1](plot);
    }
  });
  for (const plot of plots) watcher.observe(plot);
  signal.addEventListener("abort", () => watcher.disconnect());
}
