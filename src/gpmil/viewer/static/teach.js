// Teaching: marks on patches, what the model makes of them, and where the next click tells most.
// Marks belong to the run of the first map and are kept by the server; this file only shows them.

import * as api from "./api.js";
import { byId, make } from "./dom.js";
import { rounded } from "./list.js";
import { get, set } from "./state.js";

const SIGNS = { 1: "+", 0: "\u2212" };
const FILLS = { 1: "#b3125f", 0: "#ffffff" };
const INKS = { 1: "#ffffff", 0: "#14171c" };
const KEYS = { t: 1, n: 0, x: -1 };
const TINY = 9; // pixels of a patch: signs in smaller ones cannot be read
const LISTED = 200; // marks in the list, the latest first

// A number of this window that outlives a reload: undo is about its own strokes.
function windowName() {
  const made = () => Array.from(crypto.getRandomValues(new Uint8Array(8)), (b) => b.toString(16));
  const known = sessionStorage.getItem("gpmil-window") ?? made().join("");
  sessionStorage.setItem("gpmil-window", known);
  return known;
}

export class Teaching {
  // `told`: changed() when marks have changed, goTo(slide, index, x, y), say(text, failed)
  constructor(cohort, told) {
    this.cohort = cohort;
    this.told = told;
    this.window = windowName();
    this.brush = null; // what a click marks: 1, 0, -1 (erase), or null: clicks pin patches
    this.run = null;
    this.state = null; // as the server says it
    this.suggested = [];
    const positive = cohort.positive_class ?? "tumour";
    this.words = { 1: positive, 0: `not ${positive}`, "-1": "erase" };
    this.#wire();
  }

  // --- What maps ask for ------------------------------------------------------------------------
  // The version of the taught maps, null where there is nothing taught to show.
  version(run) {
    if (run !== this.run || !this.state?.learns || !get().taught) return null;
    return this.state.version && this.state.marks.length ? this.state.version : null;
  }

  brushOn(run) {
    return run === this.run && this.state ? this.brush : null;
  }

  // Marks and suggestions of a slide, as lists of [patch, label].
  extras(run, slide) {
    if (run !== this.run || !this.state) return { marks: [], suggested: [] };
    const here = (found) => found.slide === slide;
    return {
      marks: this.state.marks.filter(here).map(({ index, label }) => [index, label]),
      suggested: this.suggested.filter(here).map(({ index }) => index),
    };
  }

  // --- Following --------------------------------------------------------------------------------
  async follow(current, changed) {
    if (changed.has("taught")) byId("taught").checked = current.taught;
    if (current.panes[0].run === this.run) return this.#show();
    this.run = current.panes[0].run;
    this.state = null;
    this.suggested = [];
    await this.#act(() => api.marks(this.run, this.window));
  }

  // Any request about marks: its answer becomes the state, its failure is said.
  async #act(request) {
    const run = this.run;
    try {
      const answer = await request();
      if (run !== this.run) return;
      this.state = answer;
      this.suggested = this.suggested.filter(
        (s) => !answer.marks.some((m) => m.slide === s.slide && m.index === s.index),
      );
      if (answer.note) this.told.say(answer.note, true);
    } catch (error) {
      this.told.say(error.message, true);
    }
    this.#show();
    this.told.changed();
  }

  mark(slide, indices, label) {
    const body = { slide, indices, label, who: byId("who").value, window: this.window };
    return this.#act(() => api.mark(this.run, body));
  }

  turn(what) {
    const body = { who: byId("who").value, window: this.window };
    return this.#act(() => api.turnMarks(this.run, what, body));
  }

  // The slide by the taught model, as its map has arrived.
  learned(facts, failure) {
    this.facts = facts ?? { version: this.version(this.run) };
    if (failure) this.told.say(failure.message, true);
    this.#show();
  }

  // --- The panel --------------------------------------------------------------------------------
  #show() {
    const { state } = this;
    byId("teach").hidden = !state || get().page !== "slide";
    if (!state) return;
    const { marks } = state;
    byId("undo").disabled = !state.can_undo;
    byId("redo").disabled = !state.can_redo;
    for (const label of [1, 0, -1]) {
      byId(`brush${label}`).setAttribute("aria-pressed", String(this.brush === label));
    }
    if (!byId("who").value) byId("who").value = localStorage.getItem("gpmil-who") ?? state.who;
    byId("taught-field").hidden = !state.learns || !marks.length;
    byId("suggest").hidden = byId("save-taught").hidden = !state.learns;
    byId("save-taught").disabled = !marks.length;
    byId("teach-why").hidden = state.learns;
    byId("teach-why").textContent =
      `The model cannot learn here: ${state.why} Marks are kept, and saved as a label file.`;
    const link = byId("label-file");
    link.href = api.labelFileUrl(this.run);
    link.classList.toggle("disabled", !marks.length);
    byId("teach-result").textContent = this.#result(marks);
    this.#showMarks(marks);
    this.#showSuggestions();
  }

  #result(marks) {
    if (!marks.length) return "No marks yet.";
    const sum = (label) => marks.filter((mark) => mark.label === label).length;
    const words = `${sum(1)} ${this.words[1]}, ${sum(0)} ${this.words[0]}.`;
    const { facts } = this;
    const version = this.version(this.run);
    if (version === null) return words;
    if (facts?.version !== version) return `${words} Learning \u2026`;
    const slide = this.cohort.columns.name.indexOf(get().slide);
    if (facts.slide !== slide || !facts.probability) return words;
    const [old, now] = [facts.before, facts.probability].map((p) => rounded(Number(p)));
    const kind = facts.calibrated ? ", not calibrated" : "";
    return `${words} This slide: ${old} before, ${now} after${kind} (${facts.seconds} s).`;
  }

  #entry(found, words) {
    const { name } = this.cohort.columns;
    const go = () => this.told.goTo(found.slide, found.index);
    const sign = make("span", { class: `sign sign${found.label ?? "s"}` }, SIGNS[found.label] ?? "?");
    const where = make("span", { class: "name" }, `${name[found.slide]}, patch ${found.index}`);
    const more = make("span", { class: "number" }, words);
    const title = `${name[found.slide]}, patch ${found.index}`;
    const button = { type: "button", class: "similar", onclick: go, title };
    return make("li", {}, make("button", button, sign, where, more));
  }

  #showMarks(marks) {
    byId("marks-count").textContent = `Marks (${marks.length})`;
    const latest = marks.slice(-LISTED).reverse();
    byId("marks").replaceChildren(
      ...latest.map((mark) => {
        const when = new Date(mark.when).toLocaleString([], { dateStyle: "short", timeStyle: "short" });
        return this.#entry(mark, [mark.who, when].filter(Boolean).join(", "));
      }),
    );
  }

  #showSuggestions() {
    byId("suggestions").replaceChildren(
      ...this.suggested.map((s) => this.#entry(s, "")),
    );
    byId("suggest-note").hidden = !this.suggested.length;
  }

  async suggest() {
    byId("suggest").disabled = true;
    try {
      const { patches, how } = await api.suggestions(this.run);
      this.suggested = patches;
      byId("suggest-note").textContent = patches.length ? how : "";
      if (!patches.length) this.told.say("no patch is left to ask about");
    } catch (error) {
      this.told.say(error.message, true);
    }
    byId("suggest").disabled = false;
    this.#show();
    this.told.changed();
  }

  async save() {
    this.told.say("saving \u2026");
    try {
      const { model, labels } = await api.saveTaught(this.run);
      this.told.say(`saved: ${[model, labels].filter(Boolean).join(" and ")}`);
    } catch (error) {
      this.told.say(error.message, true);
    }
  }

  choose(label) {
    this.brush = this.brush === label ? null : label;
    document.body.classList.toggle("marking", this.brush !== null);
    this.#show();
  }

  #wire() {
    byId("brush1").lastElementChild.textContent = this.words[1];
    byId("brush0").lastElementChild.textContent = this.words[0];
    for (const label of [1, 0, -1]) {
      byId(`brush${label}`).addEventListener("click", () => this.choose(label));
    }
    for (const what of ["undo", "redo"]) {
      byId(what).addEventListener("click", () => this.turn(what));
    }
    // Another window may have marked meanwhile.
    addEventListener("focus", () => {
      if (this.state) this.#act(() => api.marks(this.run, this.window));
    });
    byId("taught").addEventListener("change", (event) => set({ taught: event.target.checked }));
    byId("suggest").addEventListener("click", () => this.suggest());
    byId("save-taught").addEventListener("click", () => this.save());
    byId("who").addEventListener("change", (event) => {
      localStorage.setItem("gpmil-who", event.target.value);
    });
  }

  // `at`: slide and patch under the hand, else the pinned one. Whether the key was one of ours.
  key(event, at) {
    if (!this.state) return false;
    const key = event.key.toLowerCase();
    const command = event.ctrlKey || event.metaKey;
    if (command ? key === "z" || key === "y" : key === "z") {
      this.turn(key === "y" || event.shiftKey ? "redo" : "undo");
    } else if (!command && key in KEYS && !event.shiftKey) {
      if (at) this.mark(at.slide, [at.index], KEYS[key]);
      else this.told.say("point at a patch, or pin one, to mark it");
    } else if (!command && key === "b") set({ taught: !get().taught });
    else if (!command && key === "escape" && this.brush !== null) this.choose(this.brush);
    else return false;
    return true;
  }
}

// --- On the map -----------------------------------------------------------------------------------
// A disc with its sign; where patches are too small for signs, a disc alone. Rings are suggestions.
export function drawMarks(context, map, { marks, suggested }, zoom) {
  for (const [index, label] of marks) disc(context, map, index, zoom, FILLS[label], SIGNS[label], INKS[label]);
  context.setLineDash([3 / zoom, 3 / zoom]);
  for (const index of suggested) disc(context, map, index, zoom, null, "?", "#ffffff");
  context.setLineDash([]);
}

function disc(context, map, index, zoom, fill, sign, ink) {
  const [left, top, width, height] = map.box(index);
  const [x, y, radius] = [left + width / 2, top + height / 2, 0.36 * Math.min(width, height)];
  context.beginPath();
  context.arc(x, y, Math.max(radius, 3 / zoom), 0, 2 * Math.PI);
  context.fillStyle = fill ?? "rgb(20 23 28 / 55%)";
  context.fill();
  for (const [colour, wide] of [["#14171c", 3], ["#ffffff", 1.5]]) {
    context.strokeStyle = colour;
    context.lineWidth = wide / zoom;
    context.stroke();
  }
  if (Math.min(width, height) * zoom < TINY) return;
  context.fillStyle = ink;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.font = `bold ${1.5 * radius}px system-ui, sans-serif`;
  context.fillText(sign, x, y + 0.06 * radius);
}
