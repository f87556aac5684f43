// Draws the eigenvalues of one layer's A and G, largest first, on log-log axes.

import { h, replace, s } from "../scripts/dom.js";
import { number, power } from "../scripts/format.js";
import { between, counts, decades, logScale, thinned } from "./scale.js";

const NARROWEST = 280;
const EDGE = { left: 62, right: 18, top: 16, bottom: 48 };
// below this share of the largest eigenvalue lies rounding, not curvature: it would only stretch the axis
const DEEPEST = 1e-18;

/** Descending and positive, with how many were left out; rounding may leave zeros and small negatives. */
export function prepare(ascending) {
  const all = [...ascending].reverse();
  const top = all[0] ?? 0;
  const values = all.filter((value) => value > 0 && value >= top * DEEPEST);
  return { values, size: all.length, hidden: all.length - values.length, top };
}

function curve(values, x, y) {
  return thinned(values.length).map((index, step) => `${step ? "L" : "M"}${x(index + 1).toFixed(1)} ${y(values[index]).toFixed(1)}`).join("");
}

function axes(frame, x, y, low, high, longest) {
  const { width, height } = frame;
  const group = s("g", { class: "axes", "aria-hidden": "true" });
  for (const exponent of decades(low, high, height > 350 ? 9 : 6)) {
    const at = y(10 ** exponent);
    group.append(
      s("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: at, y2: at }),
      s("text", { x: EDGE.left - 9, y: at + 4, "text-anchor": "end" }, power(exponent)),
    );
  }
  for (const value of high / low < 1e5 ? between(low, high) : []) {
    group.append(s("line", { class: "grid minor", x1: EDGE.left, x2: width - EDGE.right, y1: y(value), y2: y(value) }));
  }
  for (const tick of counts(longest, width)) {
    const at = x(tick);
    group.append(
      s("line", { class: "grid", x1: at, x2: at, y1: EDGE.top, y2: height - EDGE.bottom }),
      s("text", { x: at, y: height - EDGE.bottom + 19, "text-anchor": "middle" }, number(tick)),
    );
  }
  group.append(
    s("line", { class: "frame", x1: EDGE.left, x2: width - EDGE.right, y1: height - EDGE.bottom, y2: height - EDGE.bottom }),
    s("line", { class: "frame", x1: EDGE.left, x2: EDGE.left, y1: EDGE.top, y2: height - EDGE.bottom }),
    s("text", { class: "axis-name", x: (EDGE.left + width - EDGE.right) / 2, y: height - 8, "text-anchor": "middle" }, "eigenvalue number, largest first"),
    s("text", { class: "axis-name", transform: `translate(15 ${(EDGE.top + height - EDGE.bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, "eigenvalue"),
  );
  return group;
}

function series(frame, name, data, x, y, kappaMax) {
  const { width, height } = frame;
  const group = s("g", { class: `series ${name}` });
  const { values } = data;
  if (kappaMax && values.length > 1) {
    const at = y(data.top / kappaMax);
    if (at <= height - EDGE.bottom && at >= EDGE.top) {
      group.append(s("line", { class: "floor", x1: EDGE.left, x2: width - EDGE.right, y1: at, y2: at }));
    }
  }
  group.append(s("path", { class: "curve", d: curve(values, x, y), fill: "none" }));
  if (values.length <= 24) {
    for (const [index, value] of values.entries()) group.append(s("circle", { cx: x(index + 1), cy: y(value), r: 2.6 }));
  }
  return group;
}

function legendItem(name, data) {
  const more = data.hidden ? ` (${number(data.hidden)} at zero, not drawn)` : "";
  return h("span", { class: `key ${name}` }, `${name}: ${number(data.size)} eigenvalues${more}`);
}

/** Fills `place` with the plot; without anything to draw it says so. */
export function drawSpectrum(place, spectrum, kappaMax) {
  const sides = [["A", prepare(spectrum.A ?? [])], ["G", prepare(spectrum.G ?? [])]].filter(([, data]) => data.values.length);
  if (!sides.length) {
    replace(place, h("p", { class: "muted pad" }, "This layer has no eigenvalue above zero: nothing to draw."));
    return;
  }
  const width = Math.max(NARROWEST, Math.floor(place.clientWidth));
  const height = width < 560 ? 300 : 400;
  const frame = { width, height };
  const longest = Math.max(2, ...sides.map(([, data]) => data.values.length));
  const all = sides.flatMap(([, data]) => [data.values[0], data.values[data.values.length - 1]]);
  const floors = kappaMax ? sides.filter(([, data]) => data.values.length > 1).map(([, data]) => data.top / kappaMax) : [];
  const smallest = Math.min(...all);
  // a floor just below the curve belongs in the picture, one far below would squash it
  const low = Math.min(smallest, ...floors.filter((floor) => floor > smallest / 1e3)) / 1.8;
  const high = Math.max(...all) * 1.8;
  const x = logScale(1, longest, EDGE.left + 6, width - EDGE.right - 6);
  const y = logScale(low, high, height - EDGE.bottom, EDGE.top);
  const cursor = s("line", { class: "cursor", y1: EDGE.top, y2: height - EDGE.bottom, x1: 0, x2: 0, visibility: "hidden" });
  const dots = sides.map(([name]) => s("circle", { class: `dot ${name}`, r: 4.5, visibility: "hidden" }));
  const readout = h("output", { class: "readout" }, "Point at the curves, or use the arrow keys, to read values.");
  const said = sides.map(([name, data]) => `${name} from ${number(data.values[0])} to ${number(data.values[data.values.length - 1])}`).join(", ");
  const picture = s(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, width, height, class: "spectrum", role: "img", tabindex: 0, "aria-label": `Spectra of ${spectrum.layer}: ${said}` },
    axes(frame, x, y, low, high, longest),
    sides.map(([name, data]) => series(frame, name, data, x, y, kappaMax)),
    cursor,
    dots,
  );
  let at = 0;

  function read(index) {
    at = Math.min(longest, Math.max(1, index));
    cursor.setAttribute("x1", x(at));
    cursor.setAttribute("x2", x(at));
    cursor.setAttribute("visibility", "visible");
    const parts = [`№ ${number(at)}`];
    for (const [place_, [name, data]] of sides.entries()) {
      const value = data.values[at - 1];
      dots[place_].setAttribute("visibility", value === undefined ? "hidden" : "visible");
      if (value === undefined) continue;
      dots[place_].setAttribute("cx", x(at));
      dots[place_].setAttribute("cy", y(value));
      parts.push(`${name} ${number(value, 4)}`);
    }
    readout.textContent = parts.join("   ");
  }

  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const inside = ((event.clientX - box.left) / box.width) * width;
    const share = (inside - EDGE.left - 6) / (width - EDGE.right - EDGE.left - 12);
    read(Math.round(longest ** Math.min(1, Math.max(0, share))));
  });
  picture.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, PageDown: Math.ceil(at / 2), PageUp: -Math.ceil(at / 3) }[event.key];
    if (event.key === "Home") read(1);
    else if (event.key === "End") read(longest);
    else if (step) read(at + step);
    else return;
    event.preventDefault();
  });
  const floorKey = floors.length ? h("span", { class: "key floor" }, `clip at λ_max / κ_max, κ_max = ${number(kappaMax)}`) : null;
  replace(place, h("div", { class: "legend" }, sides.map(([name, data]) => legendItem(name, data)), floorKey), picture, readout);
}
