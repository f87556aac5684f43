// The page of one job: progress, summary, layers, spectra, memory and files.

import { ANALYSES } from "./analyses.js";
import { allPages, cancel, fullId, get, watchJob } from "./api.js";
import { coverageCard, expertsCard, noticesCard, partialCard, partSentence, refusedCard, reproductionCard } from "./coverage.js";
import { h, replace, unpressed } from "./dom.js";
import { number } from "./format.js";
import { cancelledCard, failureCard, filesCard, heading, placementCard } from "./job_parts.js";
import { figuresCard } from "./figures.js";
import { annotationsCard, logCard, showLineage, versionOf } from "./lineage.js";
import { LayerTable } from "./layers.js";
import { showCurvatures } from "../plots/curvature_density.js";
import { showMemory } from "../plots/memory_curve.js";
import { SeriesCard } from "../plots/series.js";
import { showModelSpectrum } from "../plots/model_spectrum.js";
import { SpectrumPanel } from "../plots/spectrum_panel.js";
import { piecesCard, stillStopping } from "./pieces.js";
import { bar, ENDED, isOpenEnded, isPartial, partsDone, shareDone, stageSentence, timeLeft } from "./progress.js";

const ROWS_EVERY_MS = 1_500;
const ASK_EVERY_MS = 1_000;

function progressCard(job) {
  const progress = job.progress ?? {};
  const share = shareDone(job);
  // the sentence counts in the unit of the stage; of several analyses this says which one it is
  const place = job.kinds.length > 1 ? job.kinds.indexOf(progress.stage) + 1 : 0;
  const analysis = place ? `Analysis ${place} of ${job.kinds.length}` : null;
  const openEnded = isOpenEnded(job);
  // stages before the layers do not move the total yet: they get a thin bar of their own
  const stageShare = progress.total && share < 0.01 ? progress.done / progress.total : null;
  return h(
    "section",
    { class: "card stack tight", "aria-label": "Progress" },
    h("div", { class: "row apart" }, h("h2", {}, stageSentence(job)), h("span", { class: "figure" }, openEnded ? "" : `${Math.round(share * 100)}%`)),
    bar(share, "Progress of the job", { state: job.state, large: true, openEnded }),
    stageShare === null ? null : bar(stageShare, "Progress of this stage", { thin: true }),
    h("div", { class: "row apart muted small" }, h("span", {}, analysis ?? " "), h("span", {}, timeLeft(job))),
  );
}

function summaryParts(results, titles, job) {
  const { kinds } = job;
  const summaries = Object.entries(results.summary ?? {}).filter(([, summary]) => summary);
  const coverage = summaries.map(([, summary]) => summary.coverage).find(Boolean);
  // in the order of the document, with the collection's own summary last
  const last = (kind) => ANALYSES[kind]?.damped === false;
  summaries.sort(([a], [b]) => last(a) - last(b) || kinds.indexOf(a) - kinds.indexOf(b));
  return [...summaries.map(([kind, summary]) => figuresCard(kind, summary, titles.get(kind) ?? kind, partSentence(job.coverage))), coverage && job.coverage ? coverageCard(coverage, job.coverage) : null, expertsCard(job.coverage?.experts)];
}

export async function showJob(main, shownId, signal) {
  document.title = "Job · Kronoscope";
  const id = await fullId(shownId, signal);
  const base = `/v1/jobs/${encodeURIComponent(id)}`;
  const [first, menu] = await Promise.all([watchJob(id, null, signal), get("/v1/analyses", signal).catch(() => ({ items: [] }))]);
  signal.throwIfAborted(); // another view may be shown by now
  const titles = new Map(menu.items.map((item) => [item.kind, item.title]));
  const top = h("div", { class: "stack" });
  const live = h("div", { class: "stack" });
  const pieces = h("div", {});
  const series = h("div", { class: "stack wide" });
  const summary = h("div", { class: "stack wide" });
  const model = h("div", {});
  const curvatures = h("div", {});
  const layers = h("section", { class: "stack tight", "aria-label": "Layers" });
  const memory = h("div", {});
  const files = h("div", { class: "stack" });
  const lineage = h("div", {});
  const own = annotationsCard(first.job, (saved) => draw((job = saved)));
  const log = logCard(base, () => ENDED.has(job.state), signal);
  replace(main, h("div", { class: "stack wide" }, h("div", { class: "stack tight" }, top, own), live, series, pieces, layers, summary, model, curvatures, memory, files, lineage, log));

  const table = new LayerTable(layers, (row) => panel.open(row), signal);
  const panel = new SpectrumPanel(table.spectra, base, signal, (ordinal) => table.mark(ordinal));
  const card = first?.job.document?.series ? new SeriesCard(series, base, signal) : null;
  let rowsSeen = -1;
  let rowsAt = 0;
  let rowsLater = 0;
  let rowsTurn = 0;
  let finalShown = false;
  let lineageOf = null;
  let kept = null;

  async function stop(event) {
    event.target.disabled = true;
    try {
      const asked = await cancel(id);
      if (!ENDED.has(job.state)) draw(asked); // otherwise the end was shown before this answer
    } catch (error) {
      event.target.disabled = false;
      if (!signal.aborted && !ENDED.has(job.state)) replace(live, h("div", { class: "notice bad", role: "alert" }, error.message));
    }
  }

  function draw(job) {
    const focused = document.activeElement?.getAttribute?.("href");
    const scrolled = pieces.querySelector(".scroll")?.scrollLeft ?? 0;
    const opened = pieces.querySelector("details")?.open ?? false;
    replace(top, heading(job, stop));
    replace(pieces, piecesCard(job));
    if (opened && pieces.querySelector("details")) pieces.querySelector("details").open = true;
    if (scrolled) pieces.querySelector(".scroll").scrollLeft = scrolled;
    if (focused) [...pieces.querySelectorAll("a")].find((each) => each.getAttribute("href") === focused)?.focus();
    drawLive(job);
  }

  function drawLive(job) {
    replace(live, ENDED.has(job.state) ? null : progressCard(job), placementCard(job), job.failure ? failureCard(job, kept) : null, cancelledCard(job, kept), noticesCard(job), ENDED.has(job.state) ? refusedCard(job, titles) : null, ENDED.has(job.state) ? partialCard(job.coverage) : null);
  }

  /** Loads the rows so far, at most every second and a half; the last change is always loaded. */
  async function loadRows(job, force) {
    clearTimeout(rowsLater);
    const done = job.progress?.layers_done ?? 0;
    if (!force && done === rowsSeen) return;
    const due = rowsAt + ROWS_EVERY_MS - Date.now();
    if (!force && due > 0) {
      rowsLater = setTimeout(() => loadRows(job, false).catch(() => undefined), due);
      return;
    }
    rowsAt = Date.now();
    rowsTurn += 1;
    const turn = rowsTurn;
    const of = (kind) => again(() => allPages(`${base}/layers?kind=${kind}`, signal));
    // the analysis that is opened first need not wait for the others
    const [first, ...others] = [...job.kinds].sort((a, b) => Boolean(ANALYSES[b]?.opens) - Boolean(ANALYSES[a]?.opens));
    const opened = await of(first);
    await unpressed();
    if (turn === rowsTurn && opened.length && !table.shown && !signal.aborted) table.show(opened, [first]);
    const rows = [...opened, ...(await Promise.all(others.map(of))).flat()];
    await unpressed();
    if (turn !== rowsTurn) return; // a later request is under way, or done
    rowsSeen = done;
    if (!rows.length || signal.aborted) return;
    const kinds = job.kinds.filter((kind) => rows.some((row) => row.kind === kind));
    table.show(rows, kinds, ENDED.has(job.state) ? partSentence(job.coverage) : null);
  }

  async function finish(job) {
    if (finalShown) return;
    finalShown = true;
    const results = await again(() => get(`${base}/results`, signal));
    await unpressed();
    kept = results.layers.count;
    drawLive(job);
    replace(summary, reproductionCard(results.manifest?.reproduction), ...summaryParts(results, titles, job));
    replace(files, filesCard(job, base, results));
    const summaries = Object.values(results.summary ?? {});
    showModelSpectrum(model, summaries.find((each) => each?.model), signal);
    showCurvatures(curvatures, summaries.find((each) => each?.curvatures), signal);
    await Promise.all([panel.show(results.artifacts, table.rows), showMemory(memory, base, results.artifacts, signal)]);
  }

  signal.addEventListener("abort", () => clearTimeout(rowsLater));
  let { job, etag } = first;
  for (;;) {
    await unpressed();
    draw(job);
    document.title = `${job.name ?? job.kinds.join(" + ")}${isPartial(job) ? ` · ${partsDone(job, " measured").join(", ")}` : ""} · Kronoscope`;
    const ended = ENDED.has(job.state);
    if (card) await again(() => card.show(ended));
    if (lineageOf !== versionOf(job)) {
      lineageOf = versionOf(job);
      showLineage(lineage, base, ended, signal).catch(() => (lineageOf = null)); // asked for again with the next change
    }
    await loadRows(job, ended && !finalShown);
    if (ended) {
      await finish(job);
      if (!stillStopping(job)) return;
      await new Promise((resolve) => setTimeout(resolve, ASK_EVERY_MS));
      const later = await again(() => watchJob(id, null, signal));
      if (later) ({ job, etag } = later);
      continue;
    }
    const asked = Date.now();
    const changed = await again(() => watchJob(id, etag, signal));
    // the reason why a job waits changes without the job
    const next = changed ?? (job.state === "queued" ? await again(() => watchJob(id, null, signal)) : null);
    if (next) ({ job, etag } = next);
    // without room for another long poll the service answers at once
    if (!changed) await new Promise((resolve) => setTimeout(resolve, asked + ASK_EVERY_MS - Date.now()));
  }

  /** Repeats a call while the service restarts; other errors are thrown. */
  async function again(call) {
    for (let wait = 1_000; ; wait = Math.min(wait * 2, 15_000)) {
      try {
        const answer = await call();
        if (wait > 1_000) {
          await unpressed();
          draw(job); // in place of the notice
        }
        return answer;
      } catch (error) {
        if (signal.aborted || ![0, 429, 502, 503, 504].includes(error.status)) throw error;
        replace(live, h("div", { class: "notice warn", role: "status" }, `${error.message} Trying again.`));
        await new Promise((resolve) => setTimeout(resolve, wait));
      }
    }
  }
}
