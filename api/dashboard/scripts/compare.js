// The page that compares jobs: one number of every layer beside that of the first job, spectra, and the documents.

import { ANALYSES } from "./analyses.js";
import { get } from "./api.js";
import { h, replace } from "./dom.js";
import { decade, number } from "./format.js";
import { drawPlot } from "../plots/plot.js";
import { drawSpectra } from "../plots/spectrum.js";
import { statePill } from "./progress.js";

const WIDE = 50; // a range that a logarithmic axis shows better

const link = (job) => h("a", { href: `#/jobs/${encodeURIComponent(job.id)}`, class: "strong" }, titleOf(job));
const titleOf = (job) => job.name ?? `job ${job.id.slice(-8)}`;

/** Every number of one analysis that a layer or the whole model has, those of the layer table first. */
export function numbersOf(kind, view) {
  const known = view.layers.filter((layer) => layer.kind === kind).flatMap((layer) => Object.keys(layer.metrics));
  const names = [...new Set([...known, ...Object.keys(view.model[kind] ?? {})])];
  const listed = (ANALYSES[kind]?.columns ?? []).flatMap((column) => column.value.split("|").map((path) => path.replace("metrics.", "")));
  return [...new Set([...listed.filter((name) => names.includes(name)), ...names])];
}

/** A select of all numbers, by analysis; `choose` gets analysis and number. */
export function numberSelect(kinds, numbers, choose) {
  const choices = kinds.flatMap((kind) => numbers(kind).map((name) => [kind, name]));
  const groups = kinds.map((kind) => h("optgroup", { label: ANALYSES[kind]?.title ?? kind }, numbers(kind).map((name) => h("option", {}, name))));
  const select = h("select", { "aria-label": "Number", onchange: () => choose(...choices[select.selectedIndex]) }, groups);
  select.selectedIndex = Math.max(0, choices.findIndex(([kind]) => ANALYSES[kind]?.opens));
  return { select, chosen: () => choices[select.selectedIndex] };
}

function table(view, rows, name) {
  const heads = view.jobs.flatMap((job, place) => (place ? [titleOf(job), "difference", "ratio"] : [titleOf(job)]));
  const cells = (metric) => metric.values.flatMap((value, place) => (place ? [value, metric.differences[place], metric.ratios[place]] : [value]));
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": `${name} by layer` },
    h(
      "table",
      { class: "compared" },
      h("caption", { class: "hidden-label" }, `${name} of each job, with difference and ratio to the first`),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Layer"), heads.map((head) => h("th", { scope: "col", class: "numeric" }, head)))),
      h("tbody", {}, rows.map(([layer, metric]) => h("tr", {}, h("th", { scope: "row" }, layer), cells(metric).map((value) => h("td", { class: "numeric" }, number(value)))))),
    ),
  );
}

function drawScatter(place, [first, other], rows, name, signal) {
  const points = rows.filter(([, metric]) => metric.values.every((value) => value !== null)).sort((a, b) => a[1].values[0] - b[1].values[0]);
  if (points.length < 2) return replace(place, h("p", { class: "muted pad" }, "Fewer than two layers of both jobs have this number: nothing to draw."));
  const all = points.flatMap(([, metric]) => metric.values);
  const [least, most] = [Math.min(...all), Math.max(...all)];
  const log = least > 0 && most / least > WIDE;
  const margin = (most - least || Math.abs(most) || 1) / 20;
  const [low, high] = log ? [least / 1.5, most * 1.5] : [least - margin, most + margin];
  const xs = points.map(([, metric]) => metric.values[0]);
  const axis = (job) => ({ name: `${name}, ${titleOf(job)}`, log, low, high, format: log ? decade : number });
  drawPlot(
    place,
    {
      label: `${name} of ${points.length} layers: ${titleOf(other)} against ${titleOf(first)}, from ${number(least)} to ${number(most)}`,
      height: (width) => (width < 560 ? 300 : 380),
      xs,
      x: axis(first),
      y: axis(other),
      series: [
        { style: "A", scatter: true, points: true, legend: "a layer", values: points.map(([, metric]) => metric.values[1]) },
        { style: "G", limit: true, legend: "equal", values: xs },
      ],
      read: (index) => `${points[index][0]}   ${number(xs[index])}   ${number(points[index][1].values[1])}`,
    },
    signal,
  );
}

/** The eigenvalues of one layer in both jobs; a job that kept none is named. */
async function showSpectra(place, jobs, files, ordinals, layer, signal) {
  const kept = jobs.map((job, index) => (files[index].has(`spectra/${ordinals[index]}.json`) ? `/v1/jobs/${encodeURIComponent(job.id)}/artifacts/spectra/${ordinals[index]}.json?direct=false` : null));
  const spectra = await Promise.all(kept.map((path) => path && get(path, signal)));
  const sides = spectra.flatMap((spectrum, index) => (spectrum ? ["A", "G"].map((style) => ({ name: `${style} of ${titleOf(jobs[index])}`, style, dashed: index > 0, ascending: spectrum[style] ?? [] })) : []));
  const without = jobs.filter((_, index) => !spectra[index]).map(titleOf);
  const plot = h("div", { class: "plot" });
  replace(place, without.length ? h("p", { class: "muted small" }, `No spectrum of this layer was kept by ${without.join(" and ")}.`) : null, sides.length ? plot : null);
  if (sides.length) drawSpectra(plot, layer, sides, null, signal);
}

function documents(view) {
  const fields = Object.entries(view.documents);
  if (!fields.length) return h("p", { class: "muted" }, "The documents are the same.");
  const cell = (value) => h("td", {}, value === null ? "–" : h("code", {}, value));
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": "Differences of the documents" },
    h(
      "table",
      { class: "compared" },
      h("caption", { class: "hidden-label" }, "Fields in which the documents differ"),
      h("thead", {}, h("tr", {}, ["Field", ...view.jobs.map(titleOf)].map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", {}, fields.map(([field, values]) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, field)), values.map(cell)))),
    ),
  );
}

export async function showComparison(main, ids, signal) {
  document.title = "Comparison · Kronoscope";
  const view = await get(`/v1/jobs:compare?ids=${ids.map(encodeURIComponent).join(",")}`, signal);
  const files = await Promise.all(ids.map(async (id) => new Set((await get(`/v1/jobs/${encodeURIComponent(id)}/artifacts`, signal)).items.map((file) => file.name))));
  signal.throwIfAborted();
  const kinds = [...new Set([...view.layers.map((layer) => layer.kind), ...Object.keys(view.model)])];
  const [numbers, scatter, spectra] = ["card flush", "plot", ""].map((name) => h("div", { class: name }));
  const { select, chosen } = numberSelect(kinds, (kind) => numbersOf(kind, view), draw);
  const beside = h("select", { "aria-label": "Job beside the first", onchange: redraw }, view.jobs.slice(1).map((job) => h("option", {}, titleOf(job))));
  const layers = [...new Map(view.layers.map((layer) => [layer.layer, layer])).values()].filter((layer) => layer.ordinals.some((ordinal, index) => files[index].has(`spectra/${ordinal}.json`)));
  const layer = h("select", { "aria-label": "Layer", class: "mono", onchange: redraw }, layers.map((each) => h("option", {}, each.layer || "(model)")));

  function draw(kind, name) {
    const rows = view.layers.filter((each) => each.kind === kind && each.metrics[name]).map((each) => [each.layer || "(model)", each.metrics[name]]);
    const whole = view.model[kind]?.[name];
    replace(numbers, table(view, whole ? [...rows, ["Whole model", whole]] : rows, name));
    const other = beside.selectedIndex + 1;
    const pair = (metric) => ({ values: [metric.values[0], metric.values[other]] });
    drawScatter(scatter, [view.jobs[0], view.jobs[other]], rows.map(([title, metric]) => [title, pair(metric)]), name, signal);
  }

  function redraw() {
    if (chosen()) draw(...chosen());
    const other = beside.selectedIndex + 1;
    const of = (list) => [list[0], list[other]];
    const shown = layers[layer.selectedIndex];
    if (!shown) return replace(spectra, h("p", { class: "muted pad" }, "None of these jobs has kept a spectrum."));
    return showSpectra(spectra, of(view.jobs), of(files), of(shown.ordinals), shown.layer, signal).catch((error) => signal.aborted || replace(spectra, h("p", { class: "muted pad", role: "alert" }, error.message)));
  }

  const named = view.jobs.map((job, place) => h("div", {}, h("dt", {}, place ? "Compared with it" : "Reference"), h("dd", { class: "row" }, link(job), statePill(job))));
  const only = view.jobs.filter((job) => job.only.length);
  replace(
    main,
    h(
      "div",
      { class: "stack wide" },
      h("h1", {}, "Comparison"),
      h("dl", { class: "facts" }, named),
      only.length ? h("section", { class: "notice", "aria-label": "Layers that not all have" }, h("strong", {}, "Not all have the same layers"), only.map((job) => h("p", {}, `Of ${titleOf(job)}, and not of all: ${job.only.map((name) => name || "(model)").join(", ")}.`))) : null,
      h("section", { class: "stack tight", "aria-label": "Numbers" }, h("div", { class: "row apart" }, h("h2", {}, "Numbers by layer"), h("div", { class: "row" }, select)), numbers),
      h(
        "section",
        { class: "card stack tight", "aria-label": "Plots" },
        h("div", { class: "row apart" }, h("h2", {}, "Against the first job"), view.jobs.length > 2 ? beside : null),
        h("div", { class: "plot-pair" }, h("div", {}, h("h3", { class: "plot-name" }, "Each layer's number"), scatter), h("div", {}, h("div", { class: "row apart" }, h("h3", { class: "plot-name" }, "Spectra of A and G"), layers.length ? layer : null), spectra)),
      ),
      h("section", { class: "stack tight", "aria-label": "Documents" }, h("h2", {}, "Documents"), h("div", { class: "card flush" }, documents(view))),
    ),
  );
  await redraw();
}
