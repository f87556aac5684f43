// The checkpoints of a series: λ_max against the edge of stability, overlaps of neighbours, and any number over them.

import { numberSelect, numbersOf } from "../scripts/compare.js";
import { get } from "../scripts/api.js";
import { h, replace, unpressed } from "../scripts/dom.js";
import { curvatureName, decade, number, several } from "../scripts/format.js";
import { statePill } from "../scripts/progress.js";
import { drawPlot } from "./plot.js";

const LOOKS = [{ style: "A" }, { style: "G" }, { style: "A", dashed: true }, { style: "G", dashed: true }];
const MOST_LINES = 7; // with that of the whole model as many as there are looks
const EVERY_MS = 5_000; // while checkpoints come and go
const WIDE = 50; // a range that a logarithmic axis shows better

/** Draws lines over the checkpoints: {name, values, limit}; null values are gaps. */
function drawOver(place, points, title, lines, signal, bounds = null) {
  const values = lines.flatMap((each) => each.values).filter((value) => value !== null);
  if (!values.length) return replace(place, h("p", { class: "muted pad" }, "Nothing to draw yet."));
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const log = !bounds && least > 0 && most / least > WIDE;
  const margin = (most - least || Math.abs(most) || 1) / 12;
  const [low, high] = bounds ?? (log ? [least / 1.5, most * 1.5] : [least - margin, most + margin]);
  const series = lines.map((each, place) => ({ ...LOOKS[place % LOOKS.length], ...each, legend: each.name, gaps: true, points: !each.limit, thin: place >= LOOKS.length }));
  drawPlot(
    place,
    {
      label: `${title} over ${several(points.length, "checkpoint")}: ${lines.map((each) => each.name).join(", ")}, from ${number(least)} to ${number(most)}`,
      height: () => 280,
      xs: points.map((_, index) => index + 1),
      x: { name: "checkpoint", log: false, low: 0.8, high: points.length + 0.2, incrs: [1, 2, 5, 10, 20, 50], format: (value) => (Number.isInteger(value) ? number(value) : "") },
      y: { name: title, log, low, high, format: log ? decade : number },
      series,
      read: (index) => [points[index].model, ...lines.map((each) => `${each.name} ${number(each.values[index])}`)].join("   "),
    },
    signal,
  );
}

function stability(place, view, signal) {
  const kinds = [...new Set(view.points.flatMap((point) => Object.keys(point.largest)))];
  const lines = kinds.map((of) => ({ name: `λ_max of ${curvatureName(of)}`, values: view.points.map((point) => point.largest[of] ?? null) }));
  const edge = view.points.map((point) => point.stable_below);
  if (edge.some((value) => value !== null)) lines.push({ name: "2 / learning rate", values: edge, style: "G", limit: true, dashed: true });
  drawOver(place, view.points, "λ_max", lines, signal);
}

function overlaps(place, view, signal) {
  const counts = [...new Set(view.overlaps.flatMap((pair) => Object.keys(pair.overlaps)))].sort((a, b) => a - b);
  const at = new Map(view.overlaps.map((pair) => [pair.index, pair.overlaps]));
  const lines = counts.map((k) => ({ name: `k = ${k}`, values: view.points.map((_, index) => at.get(index)?.[k] ?? null) }));
  drawOver(place, view.points, "overlap with the one before", lines, signal, [0, 1.04]);
}

function table(view) {
  const link = (point) => h("a", { href: `#/jobs/${encodeURIComponent(point.job)}`, class: "strong" }, point.model);
  const cells = (point) => [h("td", {}, statePill(point)), h("td", {}, link(point), point.failure ? h("span", { class: "under" }, point.failure) : null)];
  const pairs = view.overlaps.filter((pair) => pair.failure);
  return h(
    "details",
    { class: "card", open: view.points.some((point) => point.failure) || pairs.length > 0 },
    h("summary", {}, h("strong", {}, several(view.points.length, "checkpoint"))),
    h(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": "Checkpoints" },
      h("table", { class: "compared" }, h("caption", { class: "hidden-label" }, "Checkpoints with their jobs"), h("thead", {}, h("tr", {}, ["№", "State", "Checkpoint"].map((head) => h("th", { scope: "col" }, head)))), h("tbody", {}, view.points.map((point, index) => h("tr", {}, h("td", {}, number(index + 1)), cells(point))))),
    ),
    pairs.map((pair) => h("p", { class: "small" }, `Checkpoints ${pair.index} and ${pair.index + 1} could not be compared: ${pair.failure}`)),
  );
}

/** Shows the series so far; a chosen number stays chosen. */
export class SeriesCard {
  constructor(place, base, signal) {
    Object.assign(this, { place, base, signal, number: null, at: 0 });
  }

  async show(ended) {
    if (!ended && Date.now() < this.at + EVERY_MS) return;
    this.at = Date.now();
    const view = await get(`${this.base}/series`, this.signal);
    const plots = ["plot low", "plot low", ""].map((name) => h("div", { class: name }));
    // two of them tell which numbers layers have
    const ids = view.points.filter((point) => point.state === "succeeded").slice(0, 2).map((point) => point.job);
    this.names ??= ids.length < 2 ? null : await get(`/v1/jobs:compare?ids=${ids.join(",")}`, this.signal);
    const { select, chosen } = numberSelect(Object.keys(view.model), (kind) => numbersOf(kind, this.names ?? { layers: [], model: view.model }), (kind, name) => this.draw(plots[2], view, kind, name));
    const before = [...select.options].findIndex((option) => option.text === this.number);
    if (before >= 0) select.selectedIndex = before;
    await unpressed();
    const names = ["λ_max and the edge of stability", "Leading eigenspaces of neighbours"];
    const open = this.place.querySelector("details")?.open;
    replace(
      this.place,
      h(
        "section",
        { class: "card stack tight", "aria-label": "Series" },
        h("h2", {}, `Series of ${several(view.points.length, "checkpoint")}`),
        h("div", { class: "plot-pair" }, names.map((name, index) => h("div", {}, h("h3", { class: "plot-name" }, name), plots[index]))),
        chosen() ? h("div", {}, h("div", { class: "row apart" }, h("h3", { class: "plot-name" }, "A number over the series"), select), plots[2]) : null,
      ),
      table(view),
    );
    if (open !== undefined) this.place.querySelector("details").open = open;
    stability(plots[0], view, this.signal);
    overlaps(plots[1], view, this.signal);
    if (chosen()) await this.draw(plots[2], view, ...chosen());
  }

  /** Draws the number of the whole model, and of the layers that have one of this path. */
  async draw(plot, view, kind, name) {
    this.number = name;
    const whole = view.model[kind][name] ? [{ name: "whole model", values: view.model[kind][name].values }] : [];
    const { layers } = await get(`${this.base}/series?kind=${kind}&metric=${encodeURIComponent(name)}`, this.signal);
    if (this.number !== name) return;
    const found = layers.filter((layer) => layer.metrics[name]);
    const said = found.length > MOST_LINES ? h("p", { class: "muted small" }, `Of ${several(found.length, "layer")} the first ${MOST_LINES} are drawn; all are in `, h("code", {}, `${this.base}/series?metric=${name}`), ".") : null;
    const lines = found.slice(0, MOST_LINES).map((layer) => ({ name: layer.layer || "(model)", values: layer.metrics[name].values, thin: true }));
    const place = h("div", { class: "plot low" });
    replace(plot, place, said);
    drawOver(place, view.points, name, [...whole, ...lines], this.signal);
  }
}
