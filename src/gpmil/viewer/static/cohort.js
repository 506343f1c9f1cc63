// The cohort page: how good the predictions are. A click on a picture picks slides in the list.

import * as api from "./api.js";
import { classConfusion, classesOf } from "./classes.js";
import { byId, make, makeSvg } from "./dom.js";
import { showPatients } from "./patients.js";
import { get, set } from "./state.js";

const [WIDTH, HEIGHT] = [330, 300];
const BOX = { left: 46, right: 318, top: 12, bottom: 256 };
const MOST_POINTS = 40; // of a ROC curve that can be clicked

const short = (value) => Number(value).toFixed(2);

// --- Picks: "from:0.37", "bin:0.2:0.3", "cell:tp" ------------------------------------------------
const CELLS = {
  tp: ["true positives", 1, 1],
  fn: ["false negatives", 0, 1],
  fp: ["false positives", 1, 0],
  tn: ["true negatives", 0, 0],
};

// Whether a slide of this probability, label and call is meant; a pick that cannot be read means all.
export function picked(pick) {
  const [kind, first, second] = pick.split(":");
  if (kind === "from") return (p, label) => label !== null && p !== null && p >= Number(first);
  if (kind === "bin") {
    const [low, high] = [Number(first), Number(second)];
    // a bin is given by the lowest and the highest probability in it
    return (p, label) => label !== null && p !== null && p >= low && p <= high;
  }
  if (kind === "cell" && first in CELLS) {
    const [, called, truth] = CELLS[first];
    return (p, label, call) => label === truth && call === called;
  }
  return () => true;
}

export function pickWords(pick) {
  const [kind, first, second] = pick.split(":");
  if (kind === "from") return `probability from ${Number(first).toPrecision(3)} on`;
  if (kind === "bin") return `probability ${short(first)} to ${short(second)}`;
  return kind === "cell" && first in CELLS ? CELLS[first][0] : "";
}

// --- Pictures ------------------------------------------------------------------------------------
const across = (value) => BOX.left + value * (BOX.right - BOX.left);
const upward = (value) => BOX.bottom - value * (BOX.bottom - BOX.top);

function axes(title, horizontal, vertical) {
  const viewBox = `0 0 ${WIDTH} ${HEIGHT}`;
  const svg = makeSvg("svg", { viewBox, role: "group", "aria-label": title });
  const text = (words, place) => svg.append(makeSvg("text", place, words));
  for (const tick of [0, 0.25, 0.5, 0.75, 1]) {
    const [x, y] = [across(tick), upward(tick)];
    svg.append(
      makeSvg("line", { class: "grid", x1: x, x2: x, y1: BOX.top, y2: BOX.bottom }),
      makeSvg("line", { class: "grid", x1: BOX.left, x2: BOX.right, y1: y, y2: y }),
    );
    text(String(tick), { x, y: BOX.bottom + 16, "text-anchor": "middle" });
    text(String(tick), { x: BOX.left - 6, y: y + 4, "text-anchor": "end" });
  }
  const ends = { x1: across(0), y1: upward(0), x2: across(1), y2: upward(1) };
  svg.append(makeSvg("line", { class: "diagonal", ...ends }));
  const middle = { class: "axis", "text-anchor": "middle" };
  text(horizontal, { ...middle, x: across(0.5), y: HEIGHT - 8 });
  text(vertical, { ...middle, transform: `translate(12 ${upward(0.5)}) rotate(-90)` });
  return svg;
}

// A mark that can be clicked, or reached by the tab key and entered.
function clickable(element, words, pick) {
  element.classList.add("clickable");
  element.classList.toggle("picked", get().pick === pick);
  const attributes = { tabindex: 0, role: "button", "aria-label": words };
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(element.namespaceURI.endsWith("svg") ? makeSvg("title", {}, words) : "");
  const choose = () => set({ pick: get().pick === pick ? "" : pick });
  element.addEventListener("click", choose);
  element.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    event.stopPropagation();
    choose();
  });
  return element;
}

function roc({ fpr, tpr, threshold, auc }) {
  const svg = axes("ROC curve", "false positive rate", "sensitivity");
  const points = fpr.map((f, k) => `${across(f)},${upward(tpr[k])}`).join(" ");
  svg.append(makeSvg("polyline", { class: "curve", points }));
  const every = Math.max(1, Math.ceil(fpr.length / MOST_POINTS));
  for (let k = 0; k < fpr.length; k += every) {
    // the first threshold is above every probability: no slide to pick
    if (!(threshold[k] !== null && threshold[k] <= 1)) continue;
    const rates = `sensitivity ${short(tpr[k])}, false positive rate ${short(fpr[k])}`;
    const words = `threshold ${Number(threshold[k]).toPrecision(3)}: ${rates}`;
    const dot = makeSvg("circle", { class: "dot", cx: across(fpr[k]), cy: upward(tpr[k]), r: 5 });
    svg.append(clickable(dot, words, `from:${threshold[k]}`));
  }
  return figure("ROC", estimate("area under the curve", auc), svg);
}

function reliability(bins) {
  const svg = axes("Reliability", "predicted probability", "share of positive slides");
  for (const bin of bins.filter(({ n }) => n > 0)) {
    const [x, y] = [across(bin.mean), upward(bin.share)];
    if ((bin.share_low ?? null) !== null) {
      const ends = { y1: upward(bin.share_low), y2: upward(bin.share_high) };
      svg.append(makeSvg("line", { class: "whisker", x1: x, x2: x, ...ends }));
    }
    const range = `${short(bin.low)} to ${short(bin.high)}`;
    const words = `${bin.n} slides predicted ${range}: ${short(bin.share)} are positive`;
    const r = 4 + Math.min(6, Math.sqrt(bin.n) / 2); // more slides, more weight to the eye
    const dot = makeSvg("circle", { class: "dot", cx: x, cy: y, r });
    svg.append(clickable(dot, words, `bin:${bin.low}:${bin.high}`));
  }
  return figure("Reliability", "on the diagonal, probabilities mean what they say", svg);
}

function confusion(counts) {
  const most = Math.max(1, counts.tp, counts.fp, counts.fn, counts.tn);
  const cell = (name) => {
    const [words] = CELLS[name];
    const td = make("td", {}, make("strong", {}, String(counts[name])), make("span", {}, words));
    td.style.setProperty("--share", `${Math.round((45 * counts[name]) / most)}%`);
    td.classList.toggle("error", name === "fp" || name === "fn");
    return clickable(td, `${counts[name]} ${words}`, `cell:${name}`);
  };
  const head = (...words) => make("tr", {}, ...words.map((w) => make("th", { scope: "col" }, w)));
  const row = (word, ...cells) => make("tr", {}, make("th", { scope: "row" }, word), ...cells);
  const table = make(
    "table",
    { class: "confusion" },
    make("thead", {}, head("", "called positive", "called negative")),
    make(
      "tbody",
      {},
      row("is positive", cell("tp"), cell("fn")),
      row("is negative", cell("fp"), cell("tn")),
    ),
  );
  return figure("Confusion", "as the model calls slides, by its own threshold", table);
}

function figure(title, note, content) {
  const caption = make("figcaption", {}, make("h3", {}, title), make("p", {}, note));
  return make("figure", {}, caption, content);
}

function estimate(name, found) {
  if (!found || found.value === null) return name;
  const value = Number(found.value).toFixed(3);
  if ((found.low ?? null) === null) return `${name} ${value}`;
  return `${name} ${value} (${short(found.low)} to ${short(found.high)})`;
}

function metricTable(title, note, metrics) {
  const digits = (value) => ((value ?? null) === null ? "\u2013" : Number(value).toFixed(3));
  const rows = Object.entries(metrics).map(([name, { value, low, high }]) => {
    const title = make("th", { scope: "row" }, name.replaceAll("_", " "));
    const range = (low ?? null) === null ? "" : `${digits(low)} to ${digits(high)}`;
    return make("tr", {}, title, make("td", {}, digits(value)), make("td", {}, range));
  });
  const titles = ["", "value", "interval"].map((word) => make("th", { scope: "col" }, word));
  const head = make("thead", {}, make("tr", {}, ...titles));
  const table = make("table", { class: "metrics" }, head, make("tbody", {}, ...rows));
  return figure(title, note, table);
}

const BY_SLIDE =
  "with 95 % intervals by slide: no patient is known, and if patients have several slides, " +
  "folds leak and intervals are too narrow";

// Grades or types come first: they are what the model was asked for.
function classTables(own, metrics) {
  if (!own?.truth.some((value) => value !== null)) return [];
  const plural = `${own.word}s`;
  const tables = [figure(`Calls of ${plural}`, "true ones by row", classConfusion(own))];
  if (!metrics) return tables;
  const words = `${own.word}s are counted from 0, ${own.names[0]}`;
  return [...tables, metricTable(`Metrics of ${plural}`, words, metrics)];
}

function metricTables({ metrics, patient_metrics: ofPatients, patients_known: known }) {
  const note = known ? "with 95 % intervals by patient" : BY_SLIDE;
  const tables = metrics ? [metricTable("Metrics", note, metrics)] : [];
  if (ofPatients) {
    const all = "all slides of a patient together; positive where any slide is";
    tables.push(metricTable("Metrics per patient", all, ofPatients));
  }
  return tables;
}

// --- The page ------------------------------------------------------------------------------------
export class CohortPage {
  constructor(cohort, open) {
    this.cohort = cohort;
    this.open = open; // a slide
  }

  async show() {
    const { run } = get().panes[0];
    const [box, note] = [byId("curves"), byId("cohort-note")];
    const { name, model, learned } = this.cohort.runs[run];
    const title = [name, model].filter(Boolean);
    byId("cohort-title").textContent = title.join(", ");
    byId("cohort-settings").textContent = learned ? `Fitted with ${learned}.` : "";
    showPatients(this.cohort, run, this.open);
    if (!this.cohort.labels_known) {
      note.textContent = "No slide has a known label, so nothing can be compared with the truth.";
      return;
    }
    const ticket = (this.ticket = Symbol("curves"));
    if (!box.childElementCount) note.textContent = "loading curves \u2026";
    try {
      const found = await api.curves(run); // what slides are called by: the coupling of the fit
      if (ticket !== this.ticket) return;
      note.textContent = "Click a point or a cell to see its slides in the list.";
      // There is no ROC curve where all slides are of one class.
      const parts = classTables(classesOf(this.cohort, run), found.class_metrics);
      parts.push(confusion(found.confusion), found.roc && roc(found.roc));
      parts.push(reliability(found.reliability));
      parts.push(...metricTables(found));
      box.replaceChildren(...parts.filter(Boolean));
    } catch (error) {
      if (ticket !== this.ticket) return;
      box.replaceChildren();
      note.textContent = error.message;
    }
  }
}
