// One to four maps of the opened slide, side by side. They share view, hand and controls; each has
// its run, its coupling and its layer.

import { classesOf, hiddenNames } from "./classes.js";
import { ask, byId, options } from "./dom.js";
import { LAYERS, NO_P_VALUES, available, niceTop, three, titleOf, valuesOf } from "./layers.js";
import { predicted } from "./list.js";
import { rounded } from "./numbers.js";
import { LAYER_NAMES, MOST_PANES, get, set } from "./state.js";
import { Pane, fit } from "./view.js";

// Fields of the state that the pictures of the patches depend on.
const BAKED = ["panes", "colours", "opacity", "threshold", "rate", "top", "sdTop", "outlines"].concat(
  ["pinned", "theme", "hide"],
);

const LEAST_TOP = 0.01; // of a scale of probabilities: next to nothing is to look like it

// The coupling that a run was fitted with, where it has several.
export function usualCoupling(run) {
  if (!run.couplings) return null;
  return run.couplings.find((c) => Number(c) === run.fitted_coupling) ?? run.couplings[0];
}

function replaced(panes, at, changes) {
  return panes.map((pane, k) => (k === at ? { ...pane, ...changes } : pane));
}

// What another map would show: a coupling or a run that is not shown yet, else the uncertainty.
export function another(runs, panes) {
  const last = panes[panes.length - 1];
  const shown = (run, coupling) => panes.some((p) => p.run === run && p.coupling === coupling);
  for (const coupling of runs[last.run].couplings ?? []) {
    if (!shown(last.run, coupling)) return { ...last, coupling };
  }
  for (let run = 0; run < runs.length; run++) {
    const coupling = usualCoupling(runs[run]);
    if (!shown(run, coupling)) return { ...last, run, coupling };
  }
  return { ...last, layer: last.layer === "doubt" ? "suspicion" : "doubt" };
}

export class Compare {
  // `told`: hover(pane, index) and changed(pane) for the panel beside the maps
  constructor(cohort, told, teaching) {
    this.cohort = cohort;
    this.teaching = teaching;
    this.told = told;
    this.box = byId("panes");
    this.parts = []; // {element, pane, loaded, controls}
  }

  // --- What the panes ask for -------------------------------------------------------------------
  view() {
    const first = this.parts.find(({ pane }) => pane.map)?.pane;
    if (!first) return null;
    const { clientWidth: width, clientHeight: height } = first.stage;
    return get().view ?? (width ? fit(first.map.extent(), width, height) : null);
  }

  rate(pane) {
    return get().rate ?? this.cohort.runs[pane.run].rate ?? 0.1;
  }

  // Marked patches at the present rate; the same array while neither map nor rate change.
  flags(part) {
    const { map } = part.pane;
    const rate = this.rate(part.setting);
    if (part.flagsOf !== map || part.flagsAt !== rate) {
      Object.assign(part, { flagsOf: map, flagsAt: rate, flagged: map.flags(rate) });
    }
    return part.flagged;
  }

  look(part) {
    const { colours, opacity, threshold, top, sdTop, outlines } = get();
    const layer = this.#layer(part);
    const tops = { top: top || 1, sdTop: sdTop || 1 };
    const drawn = { opacity: opacity ?? this.usualOpacity(part), ...tops };
    const hidden = hiddenNames(get());
    return { layer, colours, threshold, outlines, hidden, ...drawn, ...this.inks() };
  }

  // What is drawn: what was asked for where the map has it, probability in place of suspicion.
  #layer({ pane, setting: { layer } }) {
    if (!pane.map || available(pane.map)[layer]) return layer;
    return layer === "suspicion" ? "probability" : "none";
  }

  // Tissue is to be seen below; without an image the colours are to be those of the legend.
  usualOpacity(part) {
    return part?.pane.image ? 0.5 : 1;
  }

  // Colours of the style sheet, which canvases do not know.
  inks() {
    const { color, backgroundColor } = getComputedStyle(byId("tissue"));
    const tissue = backgroundColor.match(/[\d.]+/g).slice(0, 3).map(Number);
    return { tissue, ink: color, paper: getComputedStyle(document.body).backgroundColor };
  }

  legend(part, look, flagged) {
    const { positive_class: positive } = this.cohort;
    if (look.layer === "flags") {
      const marked = flagged.reduce((sum, f) => sum + f, 0);
      return `${marked} of ${flagged.length} marked at rate ${this.rate(part.setting)}`;
    }
    const title = titleOf(part.pane.map, look.layer);
    const named = look.layer === "probability" && positive ? `${title} of ${positive}` : title;
    const instead = look.layer !== part.setting.layer ? ` (${NO_P_VALUES})` : "";
    const words = named + instead;
    if (!look.threshold) return words;
    const what = look.layer === "probability" ? "" : "where probability ";
    return `${words}, ${what}\u2265 ${look.threshold}`;
  }

  // --- Following the state ----------------------------------------------------------------------
  follow(current, changed) {
    if (changed.has("panes")) this.#arrange(current.panes);
    if (["panes", "slide", "taught"].some((key) => changed.has(key))) this.#load(current);
    if (BAKED.some((key) => changed.has(key))) this.prepare();
    if (changed.has("view")) this.draw();
  }

  #arrange(panes) {
    while (this.parts.length > panes.length) this.#remove(this.parts.pop());
    while (this.parts.length < panes.length) this.parts.push(this.#add());
    this.box.dataset.count = panes.length;
    this.parts.forEach((part, k) => {
      part.setting = panes[k];
      this.#fillControls(part);
    });
  }

  #add() {
    const element = byId("pane").content.firstElementChild.cloneNode(true);
    this.box.append(element);
    const part = { element, loaded: null };
    const at = () => this.parts.indexOf(part);
    const change = (changes) => set({ panes: replaced(get().panes, at(), changes) });
    part.pane = new Pane(ask(element, ".stage"), {
      view: () => this.view(),
      move: (view) => set({ view }),
      hover: (point) => this.hover(part, point),
      pin: (pane, index) => this.#pin(pane, index),
      changed: () => this.#arrived(part),
      brush: () => this.teaching.brushOn(part.setting.run) !== null,
      marked: (pane, indices) => {
        this.teaching.mark(pane.slide, indices, this.teaching.brushOn(part.setting.run));
      },
      learned: (facts, failure) => this.teaching.learned(facts, failure),
    });
    part.run = ask(element, ".run");
    part.coupling = ask(element, ".coupling");
    part.layer = ask(element, ".layer");
    part.run.addEventListener("change", () => {
      const run = Number(part.run.value);
      change({ run, coupling: usualCoupling(this.cohort.runs[run]) });
    });
    part.coupling.addEventListener("input", () => {
      change({ coupling: this.cohort.runs[part.setting.run].couplings[part.coupling.value] });
    });
    part.layer.addEventListener("change", () => change({ layer: part.layer.value }));
    ask(element, ".close").addEventListener("click", () => {
      set({ panes: get().panes.filter((_, k) => k !== at()) });
    });
    return part;
  }

  #remove(part) {
    part.pane.destroy();
    part.element.remove();
  }

  #fillControls(part) {
    const { runs } = this.cohort;
    const { run, coupling } = part.setting;
    ask(part.element, ".run-field").hidden = runs.length < 2;
    options(part.run, runs.map(({ name }, k) => [k, name]), run);
    const { couplings, fitted_coupling: fitted } = runs[run];
    ask(part.element, ".coupling-field").hidden = !couplings;
    if (couplings) {
      part.coupling.max = couplings.length - 1;
      part.coupling.value = couplings.indexOf(coupling);
      const note = Number(coupling) === fitted ? " (fitted)" : "";
      ask(part.element, ".coupling-value").textContent = coupling + note;
    }
    this.#fillLayers(part);
    ask(part.element, ".close").hidden = this.parts.length < 2 && get().panes.length < 2;
    part.pane.canvas.setAttribute("aria-label", this.#words(part));
  }

  #fillLayers(part) {
    const has = part.pane.map ? available(part.pane.map) : {};
    const entry = (name) => [name, LAYERS[name].name, part.pane.map ? !has[name] : false];
    const graded = (name) => name !== "grade" || classesOf(this.cohort, part.setting.run);
    options(part.layer, LAYER_NAMES.filter(graded).map(entry), this.#layer(part));
  }

  #words({ setting }) {
    const lambda = setting.coupling ? ` at coupling ${setting.coupling}` : "";
    const what = LAYERS[setting.layer].title;
    const { name } = this.cohort.runs[setting.run];
    return `${what} of ${name}${lambda}. Arrows pan, plus and minus zoom, 0 fits.`;
  }

  #load(current) {
    const { name, image } = this.cohort.columns;
    const slide = name.indexOf(current.slide);
    for (const part of this.parts) {
      const { run, coupling } = part.setting;
      const version = this.teaching.version(run);
      const wanted = `${slide} ${run} ${coupling} ${version}`;
      if (part.loaded === wanted) continue;
      part.loaded = wanted;
      delete part.element.dataset.loaded;
      const missing = this.#missing(slide, part.setting);
      if (missing) {
        part.pane.clear(missing);
        part.element.dataset.loaded = wanted;
      } else {
        part.pane.load(slide, current.slide, run, coupling, image[slide], version);
      }
    }
  }

  // Why there is no map to ask for.
  #missing(slide, setting) {
    const run = this.cohort.runs[setting.run];
    if (!get().slide) return "Choose a slide from the list.";
    if (slide < 0) return `no slide is called ${get().slide}`;
    if (!run.has_patches) return `run ${run.name} holds no predictions of patches`;
    const p = predicted(this.cohort, setting).probability[slide];
    return p === null ? `run ${run.name} has no predictions of this slide` : "";
  }

  #arrived(part) {
    const { map } = part.pane;
    if (map?.n) {
      // One scale for all slides that were looked at; it only grows.
      const most = (values) => values?.reduce((most, v) => (v > most ? v : most), 0) ?? 0;
      const stated = Math.max(most(map.probability), most(map.unlike), LEAST_TOP);
      const tops = { top: Math.min(niceTop(stated), 1) };
      if (available(map).doubt) tops.sdTop = niceTop(most(valuesOf(map, "doubt")) || 1);
      for (const key of Object.keys(tops)) if (!(tops[key] > get()[key])) delete tops[key];
      set(tops);
    }
    part.element.dataset.loaded = part.loaded;
    this.#fillLayers(part);
    this.prepare();
    this.told.changed(part);
  }

  prepare() {
    for (const part of this.parts) {
      const { pane } = part;
      if (!pane.map) continue;
      const [flagged, look] = [this.flags(part), this.look(part)];
      const pinned = this.#pinnedIn(pane);
      const neighbours = pinned === null ? [] : pane.map.neighbours(pinned);
      const legend = look.layer === "none" ? "" : this.legend(part, look, flagged);
      const marks = this.teaching.extras(part.setting.run, pane.slide);
      pane.prepare(look, flagged, { pinned, neighbours, legend, ...marks });
    }
  }

  // The state counts patches as the first map does; runs may hold other patches of a slide, so
  // that elsewhere the patch at the same place is meant.
  #pin(pane, index) {
    const first = this.parts[0].pane.map;
    const found = index < 0 || !first ? -1 : first.at(...pane.map.centre(index));
    set({ pinned: found < 0 ? null : found });
  }

  #pinnedIn(pane) {
    const { pinned } = get();
    const first = this.parts[0].pane.map;
    if (pinned === null || !first || pinned >= first.n) return null;
    const found = pane.map === first ? pinned : pane.map.at(...first.centre(pinned));
    return found < 0 ? null : found;
  }

  // Marks have changed: taught maps, and what is drawn on them.
  teach() {
    this.#load(get());
    this.prepare();
  }

  // Slide and patch under the hand, else those of the pin; null without either.
  pointed() {
    const { pane } = this.parts[0];
    const index = pane.pointer >= 0 && pane.pointer !== null ? pane.pointer : get().pinned;
    return index === null || !pane.map ? null : { slide: pane.slide, index };
  }

  draw() {
    for (const { pane } of this.parts) pane.draw();
  }

  // --- The hand ---------------------------------------------------------------------------------
  hover(from, point) {
    for (const part of this.parts) {
      const { pane } = part;
      const index = point && pane.map ? pane.map.at(...point) : -1;
      if (pane.pointer === index) continue;
      pane.pointer = index;
      ask(part.element, ".readout").textContent = index < 0 ? "" : this.#value(part, index);
      pane.draw();
    }
    this.told.hover(from, from.pane.pointer ?? -1);
  }

  #value({ pane }, index) {
    const layer = pane.look.layer;
    if (layer === "flags") return pane.flagged[index] ? "marked" : "not marked";
    if (layer === "grade") {
      const { word, names } = pane.map.classes;
      return `${word} ${names[pane.map.class_code[index]] ?? "unknown"}`;
    }
    if (layer === "suspicion") return `p-value ${three(pane.map.p_value[index])}`;
    const name = layer === "none" ? "probability" : layer;
    const value = valuesOf(pane.map, name)[index];
    return `${name} ${name === "probability" ? rounded(value) : three(value)}`;
  }

  add() {
    const { panes } = get();
    if (panes.length < MOST_PANES) set({ panes: [...panes, another(this.cohort.runs, panes)] });
  }
}
