// The memory curve of a job: what was held when, beside the peak that was planned.

import { get } from "../scripts/api.js";
import { h, replace, s } from "../scripts/dom.js";
import { bytes, seconds } from "../scripts/format.js";

const FILE = "memory_curve.json";
const NARROWEST = 280;
const HEIGHT = 230;
const EDGE = { left: 74, right: 18, top: 14, bottom: 44 };
const SERIES = [
  ["host_bytes", "host", "A", "resident on the host"],
  ["device_reserved_bytes", "device", "G", "reserved on the device"],
  ["device_allocated_bytes", "device", "G thin", "held by tensors on the device"],
];

/** Round steps for an axis from 0: at most `most` of them, in units of `base` (1000 or 1024). */
export function steps(high, most, base = 10) {
  if (!(high > 0)) return [0];
  const unit = base ** Math.floor(Math.log(high / most) / Math.log(base));
  const factors = base === 10 ? [1, 2, 5, 10] : [1, 2, 5, 10, 20, 50, 100, 200, 500, base];
  const step = unit * (factors.find((factor) => (high / most) <= factor * unit) ?? base);
  return Array.from({ length: Math.floor(high / step) + 1 }, (_, index) => index * step);
}

function lines(curve) {
  return SERIES.map(([field, place, style, words]) => {
    const points = curve.samples.filter((sample) => typeof sample[field] === "number");
    const planned = style === "G thin" ? null : curve[`planned_${place}_peak_bytes`];
    return { field, place, style, words, points, planned: planned > 0 ? planned : null, top: Math.max(0, ...points.map((sample) => sample[field])) };
  }).filter((line) => line.points.length);
}

function draw(place, curve) {
  const width = Math.max(NARROWEST, Math.floor(place.clientWidth));
  const drawn = lines(curve);
  const last = curve.samples[curve.samples.length - 1].seconds || 1e-3;
  const high = 1.08 * Math.max(...drawn.flatMap((line) => [line.top, line.planned ?? 0]));
  const x = (value) => EDGE.left + (value / last) * (width - EDGE.left - EDGE.right);
  const y = (value) => HEIGHT - EDGE.bottom - (value / high) * (HEIGHT - EDGE.top - EDGE.bottom);
  const axes = s("g", { class: "axes", "aria-hidden": "true" });
  for (const value of steps(high, 4, 1024)) {
    axes.append(
      s("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y(value), y2: y(value) }),
      s("text", { x: EDGE.left - 9, y: y(value) + 4, "text-anchor": "end" }, value ? bytes(value) : "0"),
    );
  }
  for (const value of steps(last, width < 560 ? 3 : 7)) {
    axes.append(s("text", { x: x(value), y: HEIGHT - EDGE.bottom + 18, "text-anchor": "middle" }, value ? seconds(value) : "0"));
  }
  axes.append(
    s("line", { class: "frame", x1: EDGE.left, x2: width - EDGE.right, y1: HEIGHT - EDGE.bottom, y2: HEIGHT - EDGE.bottom }),
    s("text", { class: "axis-name", x: (EDGE.left + width - EDGE.right) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, "time since the start of the attempt"),
  );
  const paths = drawn.map((line) =>
    s(
      "g",
      { class: `series ${line.style}` },
      line.planned ? s("line", { class: "floor", x1: EDGE.left, x2: width - EDGE.right, y1: y(line.planned), y2: y(line.planned) }) : null,
      s("path", { class: "curve", fill: "none", d: line.points.map((sample, index) => `${index ? "L" : "M"}${x(sample.seconds).toFixed(1)} ${y(sample[line.field]).toFixed(1)}`).join("") }),
    ),
  );
  const said = drawn.map((line) => `at most ${bytes(line.top)} ${line.words}${line.planned ? `, ${bytes(line.planned)} planned` : ""}`).join("; ");
  replace(
    place,
    h(
      "div",
      { class: "legend" },
      drawn.map((line) => h("span", { class: `key ${line.style}` }, `${line.words}: at most ${bytes(line.top)}`)),
      drawn.filter((line) => line.planned).map((line) => h("span", { class: "key floor" }, `planned, ${line.place}: ${bytes(line.planned)}`)),
    ),
    s("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, class: "spectrum memory", role: "img", "aria-label": `Memory over ${seconds(last)}: ${said}` }, axes, paths),
  );
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
function stageTable(stages, pace) {
  const quantities = [
    ["device_bytes", "Device", bytes],
    ["host_bytes", "Host", bytes],
    ["seconds", "Time", seconds],
  ].filter(([name]) => stages.some((stage) => stage[`measured_${name}`]));
  if (!quantities.length) return null;
  const signed = (error) => {
    if (typeof error !== "number") return "–";
    if (error >= 10) return `×${Math.round(1 + error)}`;
    return `${error < 0 ? "−" : "+"}${Math.abs(Math.round(error * 100))} %`;
  };
  const cells = (stage) =>
    quantities.flatMap(([name, , show]) => {
      const [planned, measured, error] = ["planned", "measured", "error"].map((part) => stage[`${part}_${name}`]);
      const over = name !== "seconds" && error > 0;
      // at a usual pace less than ten seconds are not foreseen, and below one it is mostly what begins everything
      const hidden = name === "seconds" && pace !== "measured" && (planned ?? 0) < 10;
      const short = hidden || (name === "seconds" && Math.min(planned ?? 0, measured ?? 0) < 1);
      return [planned && !hidden ? `${name === "seconds" ? "about " : ""}${show(planned)}` : "–", measured ? show(measured) : "–", h(over ? "strong" : "span", {}, short ? "–" : signed(error))].map((value) => h("td", {}, value));
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
  // never empty: what is empty in a stack is not laid out, and so has no width to draw for
  const plot = h("div", { class: "plot low" }, h("p", { class: "muted pad" }, "…"));
  replace(place, h("section", { class: "card stack tight", "aria-label": "Memory" }, h("h2", {}, "Memory"), plot, stageTable(curve.stages ?? [], curve.pace), table(curve)));
  let width = 0;
  const watcher = new ResizeObserver(() => {
    if (Math.abs(plot.clientWidth - width) < 8) return;
    width = plot.clientWidth;
    draw(plot, curve);
  });
  watcher.observe(plot);
  signal.addEventListener("abort", () => watcher.disconnect());
}
