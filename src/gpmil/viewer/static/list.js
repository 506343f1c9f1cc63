// The cohort as a list: what needs attention first. Only rows in sight exist as elements.

import * as api from "./api.js";
import { calledAs, classWords } from "./classes.js";
import { picked } from "./cohort.js";
import { ask, byId, make } from "./dom.js";
import { rounded } from "./numbers.js";
import * as state from "./state.js";

export { rounded };

const ROW = 66; // pixels; as in style.css
const AROUND = 4; // rows kept above and below those in sight
const REST = 90; // milliseconds of rest before pictures are asked for: fast scrolling asks for none
const HALF = 0.5;

// What slides are called by: the predictions of a run, with the coupling of the fit.
export const predictions = (cohort, { run }) => cohort.columns.runs[run];

// Whether there is a map: predictions of a run at a coupling, which may not be that of the fit.
export function predicted(cohort, { run, coupling }) {
  const own = cohort.columns.runs[run];
  return own.couplings?.[coupling] ?? own;
}

// Accepted as which class, or referred.
export function decisionWords(cohort, decision, call) {
  return decision === "accept" ? `accept: ${cohort.class_words[call]}` : decision;
}

// Calls are the model's, by its own threshold; null where there is none.
export function isWrong(call, label) {
  return call !== null && label !== null && call !== label;
}

const known = (value, otherwise) => value ?? otherwise;
const byText = new Intl.Collator(undefined, { numeric: true });

// Comparisons of slides a and b; equal ones keep the order of their names.
function comparison(sort, cohort, own) {
  const { name, label } = cohort.columns;
  const p = own.probability;
  const away = (i) => (p[i] === null ? 2 : Math.abs(p[i] - HALF));
  const width = (i) => (own.high[i] ?? NaN) - (own.low[i] ?? NaN) || 0;
  const calm = (i) => (own.decision[i] === "refer" ? 0 : 1);
  const right = (i) => (isWrong(own.call[i], label[i]) ? 0 : 1);
  const rules = {
    attention: [calm, away, (i) => -width(i)],
    probability: [(i) => -known(p[i], -1)],
    name: [],
    label: [(i) => -known(label[i], -1), (i) => -known(p[i], -1)],
    wrong: [right, (i) => -away(i)],
  };
  return (a, b) => {
    for (const rule of rules[sort]) {
      const difference = rule(a) - rule(b);
      if (difference) return difference;
    }
    return byText.compare(name[a], name[b]);
  };
}

function passes(cohort, own, { filter, search, pick, called, panes }) {
  const { name, patient, label } = cohort.columns;
  const p = own.probability;
  const word = search.trim().toLowerCase();
  const filters = {
    all: () => true,
    refer: (i) => own.decision[i] === "refer",
    accept: (i) => own.decision[i] === "accept",
    positive: (i) => own.call[i] === 1,
    negative: (i) => own.call[i] === 0,
    wrong: (i) => isWrong(own.call[i], label[i]),
  };
  const inPick = picked(pick);
  const asked = calledAs(cohort, panes[0].run, called);
  return (i) =>
    filters[filter](i) &&
    asked(i) &&
    inPick(p[i], label[i], own.call[i]) &&
    (!word || `${name[i]}\n${patient[i] ?? ""}`.toLowerCase().includes(word));
}

export function arrange(cohort, own, wanted) {
  const every = Array.from(cohort.columns.name, (_, i) => i);
  const pass = passes(cohort, own, wanted);
  return every.filter(pass).sort(comparison(wanted.sort, cohort, own));
}

export class SlideList {
  constructor(cohort, open) {
    this.cohort = cohort;
    this.open = open;
    this.box = byId("list");
    this.inner = make("div", { class: "rows", role: "presentation" });
    this.box.replaceChildren(this.inner);
    this.rows = []; // a pool of elements
    this.cursor = -1; // place in the order
    this.box.addEventListener("scroll", () => this.#soon(), { passive: true });
    this.inner.addEventListener("click", (event) => {
      const row = event.target.closest(".row");
      if (row) this.choose(Number(row.dataset.place));
    });
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  update(current) {
    const kept = this.order?.[this.cursor];
    this.first = current.panes[0];
    this.own = predictions(this.cohort, this.first);
    this.opened = this.cohort.columns.name.indexOf(current.slide);
    this.order = arrange(this.cohort, this.own, current);
    this.cursor = this.order.indexOf(kept ?? this.opened);
    this.inner.style.height = `${this.order.length * ROW}px`;
    const all = this.cohort.columns.name.length;
    const part = this.order.length === all ? "" : `${this.order.length} of `;
    byId("count").textContent = `${part}${all} slide${all === 1 ? "" : "s"}`;
    const { run, coupling } = this.first;
    const lambda = coupling ? `, \u03bb = ${coupling}` : "";
    byId("source").textContent = this.cohort.runs[run].name + lambda;
    byId("no-slides").hidden = this.order.length > 0;
    this.draw();
  }

  // --- Moving -----------------------------------------------------------------------------------
  move(by) {
    if (!this.order.length) return;
    const next = this.cursor < 0 ? 0 : this.cursor + by;
    this.cursor = Math.min(Math.max(next, 0), this.order.length - 1);
    this.reveal();
    this.draw();
  }

  choose(place) {
    if (!(place in this.order)) return;
    this.cursor = place;
    this.open(this.order[place]);
  }

  openCursor() {
    this.choose(this.cursor);
  }

  reveal(centred = false) {
    const [top, tall] = [this.cursor * ROW, this.box.clientHeight];
    if (this.cursor < 0) return;
    if (centred) this.box.scrollTop = top - (tall - ROW) / 2;
    else if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (top + ROW > this.box.scrollTop + tall) this.box.scrollTop = top + ROW - tall;
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.box.clientHeight / ROW) - 1);
    const moves = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: page, PageUp: -page };
    moves.Home = -this.order.length;
    moves.End = this.order.length;
    if (event.key in moves) this.move(moves[event.key]);
    else if (event.key === "Enter") this.openCursor();
    else return false;
    return true;
  }

  // --- Drawing ----------------------------------------------------------------------------------
  #soon() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  draw() {
    if (!this.order) return;
    const from = Math.max(0, Math.floor(this.box.scrollTop / ROW) - AROUND);
    const count = Math.ceil(this.box.clientHeight / ROW) + 2 * AROUND;
    const to = Math.min(this.order.length, from + count);
    while (this.rows.length < count) this.rows.push(this.#newRow());
    // A place keeps its element while it is in sight: place modulo pool, so few rows change.
    const used = new Set();
    for (let place = from; place < to; place++) {
      const row = this.rows[place % this.rows.length];
      used.add(row);
      this.#fill(row, place);
    }
    for (const row of this.rows) row.element.hidden = !used.has(row);
    this.box.setAttribute("aria-activedescendant", this.cursor < 0 ? "" : `row-${this.cursor}`);
    clearTimeout(this.rest);
    this.rest = setTimeout(() => this.#showPictures(), REST);
  }

  #newRow() {
    const element = byId("row").content.firstElementChild.cloneNode(true);
    this.inner.append(element);
    const part = (name) => ask(element, name);
    part("img").addEventListener("error", (event) => (event.target.hidden = true));
    return {
      element,
      picture: part("img"),
      name: part(".name"),
      patient: part(".patient"),
      number: part(".number"),
      range: part(".range"),
      dot: part(".dot"),
      decision: part(".decision"),
      label: part(".label"),
    };
  }

  #fill(row, place) {
    const i = this.order[place];
    const { name, patient } = this.cohort.columns;
    const { element } = row;
    element.style.transform = `translateY(${place * ROW}px)`;
    element.setAttribute("aria-selected", String(place === this.cursor));
    element.classList.toggle("opened", i === this.opened);
    if (row.slide === i && row.own === this.own && Number(element.dataset.place) === place) return;
    Object.assign(row, { slide: i, own: this.own });
    element.dataset.place = place;
    element.id = `row-${place}`;
    element.setAttribute("aria-setsize", this.order.length);
    element.setAttribute("aria-posinset", place + 1);
    row.name.textContent = row.name.title = name[i];
    row.patient.textContent = patient[i] && patient[i] !== name[i] ? patient[i] : "";
    this.#fillNumbers(row, i);
    row.picture.hidden = true;
  }

  #fillNumbers(row, i) {
    const { probability, low, high, decision, call } = this.own;
    const p = probability[i];
    const label = this.cohort.columns.label[i];
    const maps = this.cohort.runs[this.first.run].couplings ? "maps only" : "not predicted";
    row.number.textContent = p === null ? maps : rounded(p);
    row.dot.hidden = p === null;
    row.dot.style.left = `${100 * p}%`;
    row.range.hidden = (low[i] ?? null) === null;
    row.range.style.left = `${100 * low[i]}%`;
    row.range.style.width = `${100 * (high[i] - low[i])}%`;
    row.range.parentElement.hidden = p === null;
    row.decision.textContent = decisionWords(this.cohort, decision[i] || "", call[i]);
    row.decision.title = row.decision.textContent;
    row.decision.className = `decision ${decision[i] === "refer" ? "refer" : "accept"}`;
    const wrong = isWrong(call[i], label);
    const word = label === null ? "" : this.cohort.class_words[label];
    row.label.textContent = wrong ? `\u2717 is ${word}` : word;
    row.label.className = wrong ? "label wrong" : "label";
    const said = classWords(this.cohort, this.first.run, i);
    if (!said) return;
    row.decision.textContent = [said.said, decision[i]].filter(Boolean).join(", ");
    row.label.textContent = said.wrong ? `\u2717 ${said.truth}` : said.truth;
    row.label.className = said.wrong ? "label wrong" : "label";
  }

  #showPictures() {
    const { run, coupling } = this.first;
    if (!this.cohort.runs[run].has_patches) return;
    for (const row of this.rows) {
      const there = predicted(this.cohort, this.first).probability[row.slide] !== null;
      if (row.element.hidden || !there) continue;
      const address = api.thumbnailUrl(run, row.slide, coupling);
      if (row.picture.getAttribute("src") !== address) row.picture.src = address;
      row.picture.hidden = false;
    }
  }
}

// The controls above the list.
export function wireControls() {
  for (const id of ["sort", "filter"]) {
    byId(id).addEventListener("change", (event) => state.set({ [id]: event.target.value }));
  }
  byId("search").addEventListener("input", (event) => state.set({ search: event.target.value }));
  byId("unpick").addEventListener("click", () => state.set({ pick: "" }));
}
