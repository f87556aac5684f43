// A plot on a canvas, drawn by uPlot in the page's colours: legend, axes, values by pointer and by arrow keys.

import { h, replace } from "../scripts/dom.js";
import { number } from "../scripts/format.js";

const { uPlot } = globalThis;
const NARROWEST = 240;
const FONT = '12px Inter, "Segoe UI", system-ui, Roboto, Arial, sans-serif';
const HINT = "Point at the plot, or use the arrow keys, to read values.";

const closers = new WeakMap();
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const ink = (series) => colour(series.style === "A" ? "--series-a" : "--series-g");

/** Powers of ten from low to high, with 2 and 5 of each where there is room, or every n-th where there is not. */
function logTicks(low, high, pixels, space) {
  const decade = pixels / Math.log10(high / low);
  const step = Math.ceil(space / decade);
  const ticks = [];
  for (let exponent = Math.floor(Math.log10(low)); exponent <= Math.log10(high); exponent += 1) {
    if (exponent % step) continue;
    for (const factor of decade > 3.4 * space ? [1, 2, 5] : [1]) ticks.push(Number(`${factor}e${exponent}`));
  }
  return ticks.filter((tick) => tick >= low && tick <= high);
}

function axis(scale, { name, log, format = number, incrs, space: wanted }) {
  const upright = scale === "y";
  const space = wanted ?? (upright ? 34 : 62);
  const pixels = (u) => (upright ? u.bbox.height : u.bbox.width) / devicePixelRatio;
  const line = { stroke: () => colour("--line"), width: 1 };
  return {
    scale,
    space,
    incrs,
    label: name,
    font: FONT,
    labelFont: FONT,
    labelSize: 20,
    labelGap: upright ? 0 : 2,
    size: upright ? 58 : 30,
    gap: 6,
    stroke: () => colour("--muted"),
    ticks: { show: false },
    border: { ...line, show: true, stroke: () => colour("--line-strong") },
    grid: { ...line, show: upright || Boolean(log), filter: (u, ticks) => ticks },
    values: (u, ticks) => ticks.map((tick) => (log || tick ? format(tick) : "0")),
    ...(log ? { splits: (u, index, low, high) => logTicks(low, high, pixels(u), space), filter: (u, ticks) => ticks } : {}),
  };
}

function line(series) {
  // an edge of a band: only what is between the two is drawn
  if (series.edge) return { stroke: "transparent", width: 0, points: { show: false }, spanGaps: false };
  return {
    stroke: () => ink(series),
    width: series.limit ? 1.3 : series.thin ? 1.2 : 2.2,
    dash: series.limit || series.dashed ? [6, 5] : undefined,
    fill: series.bars ? () => `${ink(series)}c0` : undefined,
    paths: series.scatter ? () => null : series.bars ? uPlot.paths.bars({ size: [1, 400], gap: 1 }) : undefined,
    points: { show: Boolean(series.points), size: 6, fill: () => colour("--surface") },
    spanGaps: !series.gaps,
  };
}

/** The areas between two edges, as uPlot has them: places of the upper and the lower one, and a fill. */
function bands(series) {
  return series.flatMap((each, index) => (each.edge === "high" ? [{ series: [index + 1, index + 2], fill: () => `${ink(each)}33` }] : []));
}

/**
 * Draws a plot in `place` and redraws it when the width or the colour scheme changes.
 *
 * `plot.xs` are the positions, ascending; `x` and `y` are axes ({name, low, high, log, format, incrs, space});
 * `series` are {style, values, legend, limit, thin, dashed, gaps, bars, points, edge}; `read(index)` says the values at a
 * position. A series whose `edge` is "high" is the upper end of a band, and the next one, "low", its lower end.
 */
export function drawPlot(place, plot, signal) {
  closers.get(place)?.();
  const { xs, x, y, series } = plot;
  const size = () => {
    const width = Math.max(NARROWEST, Math.floor(place.clientWidth));
    return { width, height: plot.height(width) };
  };
  const picture = h("div", { class: "picture", role: "img", tabindex: 0, "aria-label": plot.label });
  const readout = h("output", { class: "readout" }, HINT);
  const keys = series.filter((each) => each.legend).map((each) => h("span", { class: `key ${each.style} ${each.limit || each.dashed ? "limit" : ""} ${each.thin ? "thin" : ""}` }, each.legend));
  replace(place, keys.length ? h("div", { class: "legend" }, keys) : null, picture, readout);
  let at = -1;
  let typed = false;

  const show = (u) => {
    if (u.cursor.idx === null || u.cursor.idx === undefined) return;
    if (!typed) at = u.cursor.idx;
    readout.textContent = plot.read(at);
  };
  const chart = new uPlot(
    {
      ...size(),
      padding: [10, 12, 0, 0],
      legend: { show: false },
      scales: {
        x: { time: false, distr: x.log ? 3 : 1, range: () => [x.low, x.high] },
        y: { distr: y.log ? 3 : 1, range: () => [y.low, y.high] },
      },
      axes: [axis("x", x), axis("y", y)],
      series: [{}, ...series.map(line)],
      bands: bands(series),
      cursor: {
        y: false,
        drag: { x: false, y: false },
        points: { size: (u, index) => (series[index - 1].limit || series[index - 1].edge ? 0 : 9), fill: (u, index) => ink(series[index - 1]) },
      },
      hooks: { setCursor: [show] },
    },
    [xs, ...series.map((each) => each.values)],
    picture,
  );
  picture.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowLeft: -1, PageDown: Math.ceil((at + 1) / 2), PageUp: -Math.ceil((at + 1) / 3), Home: -xs.length, End: xs.length };
    if (!(event.key in steps)) return;
    event.preventDefault();
    at = Math.min(xs.length - 1, Math.max(0, at + steps[event.key]));
    typed = true;
    chart.setCursor({ left: Math.max(0, chart.valToPos(xs[at], "x")), top: 0 });
    typed = false;
  });
  const watcher = new ResizeObserver(() => {
    if (size().width !== chart.width) chart.setSize(size());
  });
  watcher.observe(place);
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  const repaint = () => chart.redraw(false);
  scheme.addEventListener("change", repaint);
  const close = () => {
    closers.delete(place);
    watcher.disconnect();
    scheme.removeEventListener("change", repaint);
    signal.removeEventListener("abort", close);
    chart.destroy();
  };
  closers.set(place, close);
  signal.addEventListener("abort", close);
}
