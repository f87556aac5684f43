// The memory curve of a job: what was held when, beside the peak that was planned.

import { get } from "../scripts/api.js";
import { h, replace } from "../scripts/dom.js";
import { bytes, seconds } from "../scripts/format.js";
import { drawPlot } from "./plot.js";

const FILE = "memory_curve.json";
// steps of an axis of bytes: powers of two
const STEPS = Array.from({ length: 50 }, (_, exponent) => 2 ** (exponent + 10));
const SERIES = [
  ["host_bytes", "host", "A", "resident on the host"],
  ["device_reserved_bytes", "device", "G", "reserved on the device"],
  ["device_allocated_bytes", "device", "G", "held by tensors on the device"],
];

function draw(place, { samples, ...curve }, signal) {
  const lines = SERIES.map(([field, part, style, name]) => {
    const values = samples.map((sample) => (typeof sample[field] === "number" ? sample[field] : null));
    const top = Math.max(0, ...values);
    const thin = field === "device_allocated_bytes";
    const planned = thin ? 0 : (curve[`planned_${part}_peak_bytes`] ?? 0);
    return { style, values, top, thin, planned, part, name, legend: `${name}: at most ${bytes(top)}` };
  }).filter((line) => line.values.some((value) => value !== null));
  const limits = lines
    .filter((line) => line.planned > 0)
    .map(({ style, part, planned }) => ({ style, limit: true, legend: `planned, ${part}: ${bytes(planned)}`, values: samples.map(() => planned) }));
  const last = samples.at(-1).seconds || 1e-3;
  const peaks = lines.map((line) => `at most ${bytes(line.top)} ${line.name}${line.planned > 0 ? `, ${bytes(line.planned)} planned` : ""}`);
  const plot = {
    label: `Memory over ${seconds(last)}: ${peaks.join("; ")}`,
    height: () => 230,
    xs: samples.map((sample) => sample.seconds),
    x: { name: "time since the start of the attempt", low: Math.min(samples[0].seconds, last * 0.99), high: last, format: seconds, space: 96 },
    y: { name: "memory", low: 0, high: 1.08 * Math.max(1, ...lines.flatMap((line) => [line.top, line.planned])), format: bytes, incrs: STEPS },
    series: [...lines, ...limits],
    read: (index) => [`${seconds(samples[index].seconds)}, ${samples[index].operation}`, ...lines.filter((line) => line.values[index] !== null).map((line) => `${bytes(line.values[index])} ${line.name}`)].join("   "),
  };
  drawPlot(place, plot, signal);
}

/** Every operation once: when it began, how long it took, what it left held. The picture's text. */
function table(curve) {
  const begun = new Map();
  const rows = [];
  const held = (sample) => SERIES.map(([field]) => (typeof sample[field] === "number" ? bytes(sample[field]) : null)).filter(Boolean).join(", ");
  for (const sample of curve.samples) {
    if (sample.moment === "before") begun.set(sample.operation, sample);
    const before = sample.moment === "after" ? begun.get(sample.operation) : null;
    if (!before) continue;
    begun.delete(sample.operation);
    rows.push([sample.operation, seconds(before.seconds), seconds(sample.seconds - before.seconds), held(before), held(sample)]);
  }
  const names = SERIES.filter(([field]) => curve.samples.some((sample) => typeof sample[field] === "number")).map(([, , , words]) => words);
  return h(
    "details",
    {},
    h("summary", {}, "Operation by operation"),
    h(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": "Memory by operation" },
      h(
        "table",
        { class: "plain" },
        h("caption", {}, `Bytes ${names.join(", ")}.`),
        h("thead", {}, h("tr", {}, ["Operation", "Began at", "Took", "Before", "After"].map((name) => h("th", { scope: "col" }, name)))),
        h("tbody", {}, rows.map(([name, ...values]) => h("tr", {}, h("th", { scope: "row" }, name), values.map((value) => h("td", {}, value))))),
      ),
    ),
  );
}

/** What each stage took beside what was planned for it; one that held more than planned is marked. */
function stageTable(stages) {
  const quantities = [
    ["device_bytes", "Device", bytes],
    ["host_bytes", "Host", bytes],
    ["seconds", "Time", seconds],
  ].filter(([name]) => stages.some((stage) => stage[`measured_${name}`]));
  if (!quantities.length) return null;
  const signed = (error) => {
    if (typeof error !== "number") return "–";
    if (error >= 10) return `×${Math.round(1 + error)}`;
    return `${error < 0 ? "−" : "+"}${Math.abs(Math.round(error * 100))}%`;
  };
  const cells = (stage) =>
    quantities.flatMap(([name, , show]) => {
      const [planned, measured, error] = ["planned", "measured", "error"].map((part) => stage[`${part}_${name}`]);
      const over = name !== "seconds" && error > 0;
      return [planned ? `${name === "seconds" ? "about " : ""}${show(planned)}` : "–", measured ? show(measured) : "–", h(over ? "strong" : "span", {}, signed(error))].map((value) => h("td", {}, value));
    });
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": "Stages, planned and measured" },
    h(
      "table",
      { class: "plain" },
      h("caption", {}, "Each stage's peak and time, planned and measured."),
      h("thead", {}, h("tr", {}, ["Stage", ...quantities.flatMap(([, words]) => [`${words}, planned`, "measured", "error"])].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, stages.map((stage) => h("tr", {}, h("th", { scope: "row" }, stage.stage), cells(stage)))),
    ),
  );
}

/** Shows the curve where the job has one; without it the page says nothing. */
export async function showMemory(place, base, artifacts, signal) {
  if (!(artifacts ?? []).some((file) => file.name === FILE)) return;
  let curve;
  try {
    curve = await get(`${base}/artifacts/${FILE}?direct=false`, signal);
  } catch {
    return; // the file is listed below, where fetching it says what is wrong
  }
  if (signal.aborted || !curve?.samples?.length) return;
  const plot = h("div", { class: "plot low" });
  replace(place, h("section", { class: "card stack tight", "aria-label": "Memory" }, h("h2", {}, "Memory"), plot, stageTable(curve.stages ?? []), table(curve)));
  draw(plot, curve, signal);
}
