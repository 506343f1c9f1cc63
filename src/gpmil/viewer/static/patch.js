// The panel beside the maps: the slide in words, the patch under the hand, the pinned patch.

import * as api from "./api.js";
import { classFacts, classWords } from "./classes.js";
import { byId, make } from "./dom.js";
import { three } from "./layers.js";
import { decisionWords, isWrong, predictions } from "./list.js";
import { rounded } from "./numbers.js";
import { patientFacts, showSiblings } from "./patients.js";
import { get, set } from "./state.js";

const FIELDS = [
  ["x", "x"],
  ["y", "y"],
  ["probability", "probability"],
  ["sd", "sd"],
  ["p_value", "p-value"],
  ["doubt", "doubt"],
  ["unlike", "unlike"],
  ["novelty", "novelty"],
  ["flagged", "flagged"],
  ["label", "label"],
];
const TILE = 256;

const WHOLE = ["x", "y", "flagged", "label"];

// Three digits to read; the title has the number as the tables have it.
function short(field, text) {
  if (WHOLE.includes(field)) return text;
  return field === "probability" ? rounded(Number(text)) : three(Number(text));
}

// A number as the tables have it: JavaScript writes the shortest text that reads as the number.
function shown(part, index, field) {
  const { map, flagged } = part.pane;
  if (field === "flagged") return flagged ? String(flagged[index]) : null;
  const values = map[field];
  if (!values || Number.isNaN(values[index])) return null;
  return field === "label" && values[index] < 0 ? null : String(values[index]);
}

function fillNumbers(table, part, index) {
  const rows = [["patch", String(index)]];
  for (const [field, title] of FIELDS) {
    const text = shown(part, index, field);
    if (text !== null) rows.push([title, text, field]);
  }
  const { map } = part.pane;
  map.classes?.names.forEach((name, k) => {
    const p = map[`class${k}`][index];
    if (!Number.isNaN(p)) rows.push([`${map.classes.word} ${name}`, String(p), "probability"]);
  });
  table.replaceChildren(
    ...rows.map(([title, text, field]) =>
      make(
        "tr",
        {},
        make("th", { scope: "row" }, title),
        make("td", { "data-field": field, title: text }, field ? short(field, text) : text),
      ),
    ),
  );
}

export class PatchPanel {
  constructor(cohort, goTo, open) {
    this.cohort = cohort;
    this.open = open; // a slide
    this.goTo = goTo; // (slide, index, x, y)
    byId("unpin").addEventListener("click", () => set({ pinned: null }));
  }

  showSlide() {
    const { slide, panes } = get();
    const i = this.cohort.columns.name.indexOf(slide);
    byId("summary").hidden = i < 0;
    byId("hand").hidden = i < 0;
    if (i < 0) return;
    const { patient, label, patches } = this.cohort.columns;
    const own = predictions(this.cohort, panes[0]);
    const { probability, low, high, decision } = own;
    const [p, truth, call] = [probability[i], label[i], own.call[i]];
    const facts = [];
    const run = this.cohort.runs[panes[0].run];
    const none = run.couplings ? "maps only, no call" : "not predicted";
    const said = classWords(this.cohort, panes[0].run, i);
    if (said) facts.push(...classFacts(this.cohort, panes[0].run, said));
    else if (call !== null) facts.push(["called", this.cohort.class_words[call]]);
    facts.push([said ? said.above : "probability", p === null ? none : rounded(p)]);
    const level = Math.round(100 * (run.level ?? 0.9));
    if ((low[i] ?? null) !== null) {
      facts.push([`${level} % interval`, `${rounded(low[i])} to ${rounded(high[i])}`]);
    }
    const [byPatches, bySlide] = [own.evidence_patches?.[i], own.evidence_slide?.[i]];
    if ((bySlide ?? null) !== null) {
      const [first, second] = [byPatches, bySlide].map((v) => v.toFixed(2));
      facts.push(["log odds", `${first} by patches, ${second} by the slide as a whole`]);
    }
    if (decision[i]) facts.push(["decision", decisionWords(this.cohort, decision[i], call)]);
    if (truth !== null && !said) {
      const word = this.cohort.class_words[truth];
      facts.push(["label", isWrong(call, truth) ? `${word} (prediction is wrong)` : word]);
    }
    if (patches[i] !== null) facts.push(["patches", String(patches[i])]);
    if (patient[i]) facts.push(["patient", patient[i]]);
    facts.push(...patientFacts(this.cohort, panes[0].run, i));
    showSiblings(this.cohort, panes[0].run, i, this.open);
    byId("slide-name").textContent = slide;
    byId("facts").replaceChildren(
      ...facts.map(([title, text]) =>
        make("tr", {}, make("th", { scope: "row" }, title), make("td", {}, text)),
      ),
    );
  }

  hover(part, index) {
    byId("hand-note").hidden = index >= 0;
    const table = byId("hand-numbers");
    if (index < 0) table.replaceChildren();
    else fillNumbers(table, part, index);
  }

  showPinned(part) {
    const { pinned, slide } = get();
    const map = part?.pane.map;
    const there = Boolean(map) && pinned !== null && pinned < map.n;
    byId("pinned").hidden = !there;
    if (!there) {
      this.shownPatch = null;
      return;
    }
    fillNumbers(byId("pinned-numbers"), part, pinned);
    this.#showNeighbours(part, pinned);
    const { run, coupling } = part.setting;
    const key = [slide, run, coupling, pinned].join("\n");
    if (key === this.shownPatch) return; // sliders do not ask for pictures again
    this.shownPatch = key;
    this.#showTile(this.cohort.columns.name.indexOf(slide), run, coupling, pinned);
    this.#showSimilar(this.cohort.columns.name.indexOf(slide), part.setting, pinned, key);
  }

  #showNeighbours(part, index) {
    const { map } = part.pane;
    const entries = map.neighbours(index).map((j) => {
      const text = `${j}: probability ${rounded(map.probability[j])}`;
      const pin = { type: "button", class: "quiet", onclick: () => set({ pinned: j }) };
      return make("li", {}, make("button", pin, text));
    });
    byId("neighbours").replaceChildren(...entries);
    byId("neighbours-title").textContent = entries.length
      ? `${entries.length} neighbour${entries.length > 1 ? "s" : ""}`
      : "no neighbours";
  }

  #showTile(slide, run, coupling, index) {
    const tile = byId("tile");
    tile.hidden = !this.cohort.columns.image[slide];
    if (!tile.hidden) tile.src = api.patchUrl(slide, run, index, coupling, TILE);
  }

  async #showSimilar(slide, setting, index, key) {
    const [box, note] = [byId("similar"), byId("similar-note")];
    byId("similar-section").hidden = !this.cohort.similar;
    box.replaceChildren();
    if (!this.cohort.similar) return;
    note.textContent = "looking for similar patches \u2026";
    try {
      const { patches } = await api.similar(slide, setting.run, index);
      if (key !== this.shownPatch) return;
      note.textContent = patches.length ? "" : "none found";
      box.replaceChildren(...patches.map((found) => this.#similarEntry(found, setting)));
    } catch (error) {
      if (key === this.shownPatch) note.textContent = error.message;
    }
  }

  #similarEntry(found, { run, coupling }) {
    const { name, image } = this.cohort.columns;
    const words = `${name[found.slide]}, patch ${found.index}`;
    const button = make("button", {
      type: "button",
      class: "similar",
      title: `${words}, distance ${found.distance}`,
      onclick: () => this.goTo(found.slide, found.index, found.x, found.y),
    });
    if (image[found.slide]) {
      const src = api.patchUrl(found.slide, run, found.index, coupling, 96);
      button.append(make("img", { src, alt: "", width: 56, height: 56 }));
    }
    button.append(make("span", { class: "name" }, words));
    button.append(make("span", { class: "number" }, Number(found.distance).toPrecision(3)));
    return make("li", {}, button);
  }
}
