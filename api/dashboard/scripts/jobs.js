// The list of jobs: filtered by state, refreshed while it is shown, with older jobs on request.

import { get } from "./api.js";
import { h, replace, unpressed } from "./dom.js";
import { age, clock, jobName, modelName, several, sourceName } from "./format.js";
import { bar, ENDED, isOpenEnded, isPartial, shareDone, stageSentence, statePill, timeLeft } from "./progress.js";

const STATES = ["queued", "running", "waiting", "succeeded", "failed", "cancelled"];
const DONE = ["partial", "diagonal"]; // of the jobs that succeeded: done in part, or with a diagonal alone of some parameters
const BUSY_MS = 2_000;
const CALM_MS = 8_000;
const TYPING_MS = 300;

const MOST_COMPARED = 8;

function row(job, chosen, choose) {
  const kinds = job.kinds.join(" + ");
  const share = shareDone(job);
  const stage = ENDED.has(job.state) ? "" : stageSentence(job);
  return h(
    "tr",
    { "data-state": job.state },
    h("td", { class: "cell-pick" }, h("input", { type: "checkbox", "aria-label": `Compare ${jobName(job)}, ${job.id.slice(-8)}`, "data-id": job.id, checked: chosen.has(job.id), onchange: choose })),
    h("td", { class: "cell-state" }, statePill(job)),
    h(
      "td",
      { class: "cell-name" },
      h("a", { href: `#/jobs/${encodeURIComponent(job.id)}`, class: "strong" }, jobName(job)),
      h("span", { class: "under" }, `${job.name && modelName(job) ? `${modelName(job)} ` : ""}on ${sourceName(job.document?.data)}`),
    ),
    h("td", { class: "cell-kind" }, kinds),
    h(
      "td",
      { class: "cell-progress" },
      job.state === "failed"
        ? h("span", { class: "failure-line", title: job.failure?.message ?? "" }, job.failure?.message ?? "failed")
        : h(
            "div",
            { class: "progress-line" },
            bar(share, `Progress of ${jobName(job)}`, { state: isPartial(job) ? "partial" : job.state, openEnded: isOpenEnded(job) }),
            isOpenEnded(job) ? null : h("span", { class: "figure" }, `${Math.round(share * 100)}%`),
          ),
      stage ? h("span", { class: "under" }, [stage, timeLeft(job)].filter(Boolean).join(" · ")) : null,
    ),
    h("td", { class: "cell-age", title: clock(job.created_at) }, age(job.created_at)),
    h("td", { class: "cell-id mono", title: job.id }, job.id.slice(-8)),
  );
}

function table(jobs, chosen, choose) {
  const heads = ["", "State", "Job", "Analysis", "Progress", "Submitted", "Id"];
  return h(
    "div",
    { class: "card flush" },
    h(
      "table",
      { class: "jobs choosable" },
      h("caption", { class: "hidden-label" }, "Jobs, newest first"),
      h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head || h("span", { class: "hidden-label" }, "Compare"))))),
      h("tbody", {}, jobs.map((job) => row(job, chosen, choose))),
    ),
  );
}

function nothing(state, name) {
  if (name) return h("div", { class: "empty" }, h("p", {}, `No ${state ? `${state} ` : ""}job has a name with “${name}”.`));
  if (DONE.includes(state)) return h("div", { class: "empty" }, h("p", {}, state === "partial" ? "No job was done in part." : "No job has a diagonal alone of some parameters."));
  if (state) return h("div", { class: "empty" }, h("p", {}, `No job is ${state === "waiting" ? "waiting for its pieces" : state}.`));
  return h(
    "div",
    { class: "empty" },
    h("h2", {}, "No jobs yet"),
    h("p", { class: "muted" }, "A job measures the curvature of one trained model, or trains a few-shot model. The first example takes a few seconds."),
    h("a", { class: "button primary", href: "#/new" }, "Submit the first job"),
  );
}

export async function showJobs(main, signal) {
  document.title = "Jobs · Kronoscope";
  let state = "";
  let name = "";
  let typing = 0;
  let pages = 1;
  let timer = 0;
  let turn = 0;
  const body = h("div", { class: "stack" });
  const chosen = new Set(); // in the order in which they were chosen: the first is the reference
  const comparison = h("div", { role: "status" });
  const filter = h(
    "div",
    { class: "segments", role: "group", "aria-label": "Show jobs by state" },
    ["", ...STATES, ...DONE].map((name) =>
      h("button", { type: "button", "data-name": name, "aria-pressed": String(name === ""), onclick: () => choose(name) }, name || "all"),
    ),
  );
  const search = h("input", {
    type: "search",
    class: "search",
    placeholder: "Find by name",
    "aria-label": "Find jobs by name",
    maxlength: 120,
    oninput: (event) => {
      clearTimeout(typing);
      typing = setTimeout(find, TYPING_MS, event.target.value.trim());
    },
  });
  replace(
    main,
    h(
      "div",
      { class: "stack" },
      h("div", { class: "row apart" }, h("h1", {}, "Jobs"), h("div", { class: "row" }, search, filter)),
      comparison,
      body,
    ),
  );

  function pick(event) {
    const { checked, dataset } = event.target;
    if (checked) chosen.add(dataset.id);
    else chosen.delete(dataset.id);
    offer();
  }

  function offer() {
    const fits = chosen.size >= 2 && chosen.size <= MOST_COMPARED;
    const said = `${several(chosen.size, "job")} chosen${fits ? "" : `; choose 2 to ${MOST_COMPARED} to compare them`}`;
    const compare = h("a", { class: "button primary", href: `#/compare/${[...chosen].map(encodeURIComponent).join(",")}` }, "Compare");
    replace(comparison, chosen.size ? h("div", { class: "card row apart" }, h("span", {}, said), h("div", { class: "row" }, h("button", { type: "button", onclick: forget }, "Clear"), fits ? compare : null)) : null);
  }

  function forget() {
    chosen.clear();
    for (const box of body.querySelectorAll(".cell-pick input")) box.checked = false;
    offer();
  }

  function find(text) {
    name = text;
    pages = 1;
    refresh();
  }

  function choose(picked) {
    state = picked;
    pages = 1;
    for (const button of filter.children) button.setAttribute("aria-pressed", String(button.dataset.name === picked));
    refresh();
  }

  async function load() {
    const jobs = [];
    const path = `/v1/jobs?limit=25${state ? `&${DONE.includes(state) ? "coverage" : "state"}=${state}` : ""}${name ? `&name=${encodeURIComponent(name)}` : ""}`;
    let cursor = null;
    for (let page = 0; page < pages; page += 1) {
      const answer = await get(cursor ? `${path}&before=${encodeURIComponent(cursor)}` : path, signal);
      jobs.push(...answer.items);
      cursor = answer.next;
      if (!cursor) break;
    }
    return { jobs, more: cursor !== null };
  }

  async function refresh() {
    clearTimeout(timer);
    let wait = CALM_MS;
    turn += 1;
    const mine = turn;
    try {
      const { jobs, more } = await load();
      await unpressed();
      if (mine !== turn || signal.aborted) return;
      const focused = document.activeElement?.getAttribute?.("href");
      const boxed = document.activeElement?.dataset?.id;
      replace(
        body,
        jobs.length ? table(jobs, chosen, pick) : nothing(state, name),
        more ? h("div", { class: "row" }, h("button", { type: "button", onclick: older }, "Show older jobs")) : null,
      );
      if (boxed) body.querySelector(`[data-id="${CSS.escape(boxed)}"]`)?.focus();
      if (focused) [...body.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus();
      if (jobs.some((job) => !ENDED.has(job.state))) wait = BUSY_MS;
    } catch (error) {
      if (mine !== turn || signal.aborted) return;
      replace(body, h("div", { class: "empty", role: "alert" }, h("p", {}, error.message)));
      if (error.status === 401) return;
    }
    timer = setTimeout(refresh, document.hidden ? 30_000 : wait);
  }

  function older() {
    pages += 1;
    refresh();
  }

  signal.addEventListener("abort", () => [timer, typing].forEach(clearTimeout));
  await refresh();
}
