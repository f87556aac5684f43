// The eigenvalues of one layer's A and G, largest first, on log-log axes.

import { h, replace } from "../scripts/dom.js";
import { decade, number } from "../scripts/format.js";
import { drawPlot } from "./plot.js";

// smaller shares of the largest eigenvalue are rounding, not curvature, and would only stretch the axis
const DEEPEST = 1e-18;

/** Descending and positive, with how many were left out; rounding may leave zeros and small negatives. */
function prepare({ name, style, dashed, ascending }) {
  const all = [...ascending].reverse();
  const values = all.filter((value) => value > 0 && value >= all[0] * DEEPEST);
  const hidden = all.length - values.length;
  const legend = `${name}: ${number(all.length)} eigenvalues${hidden ? ` (${number(hidden)} at zero, not drawn)` : ""}`;
  return { name, style, dashed, values, legend, points: values.length <= 24 };
}

/** Draws the spectrum of one job's layer in `place`. */
export function drawSpectrum(place, spectrum, kappaMax, signal) {
  drawSpectra(place, spectrum.layer, ["A", "G"].map((name) => ({ name, style: name, ascending: spectrum[name] ?? [] })), kappaMax, signal);
}

/** Draws spectra over each other; without anything to draw it says so. */
export function drawSpectra(place, layer, spectra, kappaMax, signal) {
  const sides = spectra.map(prepare).filter((side) => side.values.length);
  if (!sides.length) {
    replace(place, h("p", { class: "muted pad" }, "This layer has no eigenvalue above zero: nothing to draw."));
    return;
  }
  const longest = Math.max(2, ...sides.map((side) => side.values.length));
  const smallest = Math.min(...sides.map((side) => side.values.at(-1)));
  const high = 1.8 * Math.max(...sides.map((side) => side.values[0]));
  // a clip just below the curve belongs in the picture, one far below would squash it
  const clips = sides
    .filter((side) => kappaMax && side.values.length > 1 && side.values[0] / kappaMax > smallest / 1e3)
    .map((side) => ({ style: side.style, limit: true, values: Array(longest).fill(side.values[0] / kappaMax) }));
  if (clips.length) clips[0].legend = `clip at λ_max / κ_max, κ_max = ${number(kappaMax)}`;
  const low = Math.min(smallest, ...clips.map((clip) => clip.values[0])) / 1.8;
  const padded = (values) => Array.from({ length: longest }, (_, index) => values[index] ?? null);
  const ranges = sides.map((side) => `${side.name} from ${number(side.values[0])} to ${number(side.values.at(-1))}`);
  const plot = {
    label: `Spectra of ${layer}: ${ranges.join(", ")}`,
    height: (width) => (width < 560 ? 300 : 380),
    xs: Array.from({ length: longest }, (_, index) => index + 1),
    x: { name: "eigenvalue number, largest first", log: true, low: longest ** -0.015, high: longest ** 1.015 },
    y: { name: "eigenvalue", log: true, low, high, format: decade },
    series: [...sides.map((side) => ({ ...side, values: padded(side.values) })), ...clips],
    read: (index) => [`№ ${number(index + 1)}`, ...sides.filter((side) => index < side.values.length).map((side) => `${side.name} ${number(side.values[index])}`)].join("   "),
  };
  drawPlot(place, plot, signal);
}
