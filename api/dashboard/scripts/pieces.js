// The pieces of a divided job: one table with a bar, a state and a link for each, and the way back from a piece.

import { h } from "./dom.js";
import { number, several } from "./format.js";
import { bar, ENDED, statePill } from "./progress.js";

const MOST_ROWS = 100;
const ROUNDS = { collect: "Collect", correct: "Correct eigenvalues", decompose: "Decompose", score: "Score" };

function counts(round, count) {
  return round === "score" ? several(count, "query", "queries") : several(count, "example");
}

function link(id, text) {
  return h("a", { href: `#/jobs/${encodeURIComponent(id)}`, class: "strong" }, text);
}

function row(piece) {
  const share = (piece.progress ?? 0) / 100;
  const title = `piece ${piece.index + 1} of ${piece.count}`;
  const measured = piece.layers === null ? counts(piece.round, piece.examples ?? 0) : several(piece.layers, "layer");
  return h(
    "tr",
    { "data-state": piece.state },
    h("td", { class: "cell-state" }, statePill(piece)),
    h("td", { class: "cell-name" }, link(piece.id, title), h("span", { class: "under" }, `${ROUNDS[piece.round] ?? piece.round} · ${measured}`)),
    h("td", { class: "cell-progress" }, h("div", { class: "progress-line" }, bar(share, `Progress of ${title}`, { state: piece.state }), h("span", { class: "figure" }, `${Math.round(share * 100)}%`))),
    h("td", { class: "mono" }, piece.worker ?? "–"),
    h("td", { class: "numeric" }, piece.failures ? `${number(piece.attempt)} (${number(piece.failures)} failed)` : number(piece.attempt)),
  );
}

/** The sentence above the table: how many of the pieces are in which state. */
function counted(pieces) {
  const groups = Map.groupBy(pieces, (piece) => piece.state);
  const said = ["succeeded", "running", "queued", "cancelling", "failed", "cancelled"].filter((state) => groups.has(state));
  return said.map((state) => `${number(groups.get(state).length)} ${state}`).join(", ");
}

export function piecesCard(job) {
  const pieces = job.pieces ?? [];
  if (!pieces.length) return null;
  // of thousands those are shown that are not done yet; the others are listed by the API (`?parent=`)
  const open = pieces.filter((piece) => piece.state !== "succeeded");
  const shown = pieces.length <= MOST_ROWS ? pieces : [...open, ...pieces.filter((piece) => piece.state === "succeeded")].slice(0, MOST_ROWS);
  const heads = ["State", "Piece", "Progress", "Worker", "Attempts"];
  const table = h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of pieces" },
    h(
      "table",
      { class: "jobs pieces" },
      h("caption", { class: "hidden-label" }, "Pieces of this job, in the order in which they are merged"),
      h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col", class: head === "Attempts" ? "numeric" : null }, head)))),
      h("tbody", {}, shown.map(row)),
    ),
  );
  const title = h("div", { class: "row apart pad" }, h("h2", {}, "Pieces"), h("span", { class: "muted small" }, counted(pieces)));
  return h(
    "section",
    { class: "card flush", "aria-label": "Pieces" },
    ENDED.has(job.state) && job.state !== "failed" ? h("details", { class: "pad" }, h("summary", {}, `Pieces: ${counted(pieces)}`), table) : [title, table],
    shown.length < pieces.length ? h("p", { class: "muted small pad" }, `${number(pieces.length - shown.length)} more are done.`) : null,
  );
}

/** The fact by which the page of a piece leads to the whole job; null for any other. */
export function partOf(job) {
  if (!job.parent) return null;
  const { piece } = job;
  return ["Part", h("span", {}, piece ? `piece ${piece.index + 1} of ${piece.count} of ` : "of the series ", link(job.parent, `job ${job.parent.slice(-8)}`))];
}

/** The fact that tells what a piece computes, in place of the analyses of the whole job; null for any other. */
export function shareOf(job) {
  const { piece } = job;
  if (!job.parent || !piece) return null;
  const share = piece.layers ? several(piece.layers.length, "layer") : `${piece.round === "score" ? "queries" : "examples"} ${number((piece.begin ?? 0) + 1)} to ${number(piece.end ?? 0)} of ${number(piece.total ?? 0)}`;
  return ["Computes", `${(ROUNDS[piece.round] ?? piece.round).toLowerCase()}: ${share}`];
}

/** Whether a job has ended and pieces of it have yet to stop. */
export function stillStopping(job) {
  return ENDED.has(job.state) && (job.pieces ?? []).some((piece) => !ENDED.has(piece.state));
}
