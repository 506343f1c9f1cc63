// What the page shows, in one plain object. Controls change it, everything is drawn from it, and
// location.hash holds it, so that a link restores the whole view.

export const LAYER_NAMES = ["suspicion", "probability", "doubt", "unlike", "flags", "none", "grade"];
const EARLIER = { p_value: "suspicion", sd: "doubt" }; // in links of earlier versions
export const SORTS = ["attention", "probability", "name", "label", "wrong"];
export const FILTERS = ["all", "refer", "accept", "positive", "negative", "wrong"];
export const MOST_PANES = 4;

// Every field knows its default and how it is read from text; what cannot be read is the default.
const text = () => ({ start: "", read: (word) => word });
const oneOf = (...words) => ({
  start: words[0],
  read: (word) => (words.includes(word) ? word : words[0]),
});
const number = (start, low, high) => ({
  start,
  read: (word) => {
    const value = Number(word);
    return word !== "" && value >= low && value <= high ? value : start;
  },
});

const FIELDS = {
  page: oneOf("slide", "cohort"),
  slide: text(), // by name: numbers of slides change when runs are added
  sort: oneOf(...SORTS),
  filter: oneOf(...FILTERS),
  called: text(), // the grade or type that slides are called; "": any
  search: text(),
  pick: text(), // what was clicked on the cohort page, see cohort.js
  panes: {
    start: [{ run: 0, coupling: null, layer: "suspicion" }],
    read: readPanes,
    write: writePanes,
  },
  colours: oneOf("viridis", "cividis", "magma"),
  opacity: number(null, 0, 1), // null: tissue shows through where there is an image
  threshold: number(0, 0, 1),
  rate: number(null, 0, 1), // null: the rate that the run was made with
  top: number(0, 0, 1), // upper end of the scale of probabilities; 0: not known yet
  sdTop: number(0, 0, Infinity), // the same of doubts, or of standard deviations
  hide: text(), // grades or types whose patches are not shown, a line each
  outlines: { start: true, read: (word) => word !== "0", write: (on) => (on ? "1" : "0") },
  view: { start: null, read: readView, write: (v) => [v.x, v.y, v.zoom].join(",") }, // null: fit
  pinned: number(null, 0, Infinity),
  taught: { start: true, read: (word) => word !== "0", write: (on) => (on ? "1" : "0") },
  theme: oneOf("auto", "light", "dark"),
};

function writePanes(panes) {
  return panes.map((p) => [p.run, p.coupling ?? "", p.layer].join("~")).join("!");
}

function readPanes(word) {
  const panes = word.split("!").slice(0, MOST_PANES).map((part) => {
    const [run, coupling, layer] = part.split("~");
    return {
      run: Math.max(0, Math.trunc(Number(run)) || 0),
      coupling: coupling || null,
      layer: LAYER_NAMES.includes(layer) ? layer : (EARLIER[layer] ?? "suspicion"),
    };
  });
  return panes.length ? panes : FIELDS.panes.start;
}

function readView(word) {
  const [x, y, zoom] = word.split(",").map(Number);
  return [x, y, zoom].every(Number.isFinite) && zoom > 0 ? { x, y, zoom } : null;
}

export function defaults() {
  return Object.fromEntries(Object.entries(FIELDS).map(([key, field]) => [key, field.start]));
}

export function toHash(state) {
  const words = new URLSearchParams();
  for (const [key, field] of Object.entries(FIELDS)) {
    const value = state[key];
    if (value === null || JSON.stringify(value) === JSON.stringify(field.start)) continue;
    words.set(key, field.write ? field.write(value) : String(value));
  }
  return words.toString();
}

export function fromHash(hash) {
  const state = defaults();
  for (const [key, word] of new URLSearchParams(hash.replace(/^#/, ""))) {
    if (key in FIELDS) state[key] = FIELDS[key].read(word);
  }
  return state;
}

let current = defaults();
const listeners = [];

export const get = () => current;

// Listeners get the state and the names of the fields that differ from before.
export function set(changes) {
  const differ = Object.keys(changes).filter((key) => changes[key] !== current[key]);
  if (!differ.length) return;
  current = { ...current, ...changes };
  for (const listener of listeners) listener(current, new Set(differ));
}

export function subscribe(listener) {
  listeners.push(listener);
}

// The address follows the state, but not at every step of a slider: browsers limit the changes.
export function keepInAddress(read) {
  let timer = null;
  let written = location.hash;
  subscribe(() => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      written = "#" + toHash(current);
      history.replaceState(null, "", written);
    }, 250);
  });
  addEventListener("hashchange", () => {
    if (location.hash !== written) set(read(location.hash));
  });
}
