// The densities of two curvatures over each other: K-FAC's, and that of an exact matrix with its 95% band.

import { h, replace } from "../scripts/dom.js";
import { curvatureName, decade, number, percent } from "../scripts/format.js";
import { drawPlot } from "./plot.js";

const HEIGHT = 300;
const BLOCKS = ["kfac", "ekfac"];
// the smallest share that is drawn: a tenth of one eigenvalue
const LEAST = 0.1;

/** A curve's values over the points that both curvatures have, null where it has none or it is below the axis. */
function over(points, density, values, low) {
  const known = new Map(density.log10.map((point, index) => [point, values[index]]));
  return points.map((point) => {
    const value = known.get(point);
    return typeof value === "number" && value >= low ? value : null;
  });
}

/** The same for an end of a band, which may lie below the axis. */
function edge(points, density, values, low) {
  const known = new Map(density.log10.map((point, index) => [point, values[index]]));
  return points.map((point) => {
    const value = known.get(point);
    return typeof value === "number" ? Math.max(value, low) : null;
  });
}

/** The lines of one curvature: its positive part with a band, and its negative part, dashed. */
function linesOf(curvature, style, points, name, low) {
  const { density } = curvature;
  const lines = [];
  for (const [part, dashed] of [["positive", false], ["negative", true]]) {
    const curve = density[part];
    if (!curve) continue;
    const legend = `${curvatureName(curvature.of)}${dashed ? ", negative eigenvalues by magnitude" : ""}`;
    const [values, lows, highs] = [curve[name], curve[`${name}_low`], curve[`${name}_high`]];
    if (highs && !dashed) {
      lines.push({ style, edge: "high", values: edge(points, density, highs, low) });
      lines.push({ style, edge: "low", values: edge(points, density, lows, low) });
    }
    const raw = new Map(density.log10.map((point, index) => [point, { value: values[index], low: lows?.[index], high: highs?.[index] }]));
    lines.push({ style, dashed, gaps: true, legend: highs && !dashed ? `${legend} and its 95% band` : legend, name: legend, raw, values: over(points, density, values, low) });
  }
  return lines;
}

function draw(place, chosen, name, words, signal) {
  const points = [...new Set(chosen.flatMap(([curvature]) => curvature.density.log10))].sort((a, b) => a - b);
  const low = LEAST / Math.max(...chosen.map(([curvature]) => curvature.dimension));
  const lines = chosen.flatMap(([curvature, style]) => linesOf(curvature, style, points, name, low));
  // where a density is drawn: what lies to the left is one flat line in every figure
  const shaped = chosen.flatMap(([curvature, style]) => linesOf(curvature, style, points, "density", low));
  const drawn = points.map((_, index) => shaped.some((line) => line.values[index] !== null));
  const [first, last] = [drawn.indexOf(true), drawn.lastIndexOf(true)];
  if (first < 0) {
    replace(place, h("p", { class: "muted pad" }, "There is no eigenvalue apart from zero: nothing to draw."));
    return;
  }
  const top = Math.max(...lines.flatMap((line) => line.values.filter((value) => value !== null)));
  const shown = points.slice(first, last + 1);
  const magnitudes = shown.map((point) => 10 ** point);
  const series = lines.map((line) => ({ ...line, values: line.values.slice(first, last + 1) }));
  const said = (line, point) => {
    const found = line.raw.get(point);
    if (typeof found?.value !== "number") return null;
    const band = typeof found.high === "number" ? ` (${percent(found.low)} to ${percent(found.high)})` : "";
    return `${line.name} ${percent(found.value)}${band}`;
  };
  const plot = {
    label: `${words.label}: ${chosen.map(([curvature]) => curvatureName(curvature.of)).join(" and ")}, magnitudes ${number(magnitudes[0])} to ${number(magnitudes.at(-1))}`,
    height: () => HEIGHT,
    xs: magnitudes,
    x: { name: "magnitude of the eigenvalue", log: true, low: magnitudes[0], high: magnitudes.at(-1), format: decade },
    y: { name: words.axis, log: true, low, high: Math.max(1.6 * top, 10 * low), format: decade },
    series,
    read: (index) => [`|λ| = ${number(magnitudes[index])}`, ...lines.filter((line) => line.raw).map((line) => said(line, shown[index])).filter(Boolean)].join("   "),
  };
  drawPlot(place, plot, signal);
}

const FIGURES = [
  ["density", { title: "Where the eigenvalues lie", axis: "share of eigenvalues in a decade", label: "Density of the eigenvalues" }],
  ["beyond", { title: "How many are larger", axis: "share of larger eigenvalues", label: "Share of larger eigenvalues" }],
];

/** What the band and the end of the curve mean, and what of K-FAC it is held against. */
function sentence(curvature) {
  const { density, of, products, passes } = curvature;
  const limit = density.positive.resolved_log10;
  const place = density.log10.indexOf(limit);
  const parts = [`${curvatureName(of)}: ${number(products)} products in ${number(passes)} passes over the data`];
  if (place >= 0) {
    const rest = Math.max(0, 1 - density.positive.beyond[place] - (density.negative?.beyond[0] ?? 0));
    parts.push(`${percent(rest)} of its eigenvalues lie between 0 and ${number(10 ** limit)}, where more steps would be needed to tell magnitudes apart`);
  }
  return `${parts.join("; ")}.`;
}

/** Shows the densities where the job has any; without one the page says nothing. */
export function showCurvatures(place, summary, signal) {
  const known = (summary?.curvatures ?? []).filter((each) => each.density);
  if (!known.length) return;
  const blocks = known.filter((each) => BLOCKS.includes(each.of));
  const exact = known.filter((each) => !BLOCKS.includes(each.of));
  const plots = FIGURES.map(() => h("div", { class: "plot low" }));
  const note = h("p", { class: "muted small" });
  const tabs = h("div", { class: "segments", role: "group", "aria-label": "Exact curvature" });

  function choose(curvature, focus = false) {
    const thin = blocks.slice(0, 1).map((each) => [each, "A"]);
    const chosen = curvature ? [...thin, [curvature, "G"]] : blocks.map((each, index) => [each, index ? "G" : "A"]);
    replace(
      tabs,
      exact.length > 1
        ? exact.map((each) => h("button", { type: "button", "aria-pressed": String(each === curvature), onclick: () => choose(each, true) }, curvatureName(each.of)))
        : [],
    );
    replace(note, curvature ? sentence(curvature) : "");
    for (const [index, [name, words]] of FIGURES.entries()) draw(plots[index], chosen, name, words, signal);
    if (focus) tabs.querySelector('[aria-pressed="true"]')?.focus();
  }

  replace(
    place,
    h(
      "section",
      { class: "card stack tight", "aria-label": "Density of the eigenvalues", id: "densities" },
      h("div", { class: "row apart" }, h("h2", {}, "Density of the eigenvalues"), tabs),
      h("div", { class: "plot-pair" }, FIGURES.map(([, words], index) => h("div", {}, h("h3", { class: "plot-name" }, words.title), plots[index]))),
      note,
    ),
  );
  choose(exact[0] ?? null);
}
