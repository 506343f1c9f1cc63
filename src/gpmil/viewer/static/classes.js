// Grades and types: what a run calls slides, which of them the list and the maps show.

import { packed } from "./colour.js";
import { byId, make, options } from "./dom.js";
import { rounded } from "./numbers.js";
import { get, set } from "./state.js";

// What a run says of grades or types of slides; null where it knows two classes alone.
export const classesOf = (cohort, run) => cohort.classes?.[run] ?? null;

const bytes = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
export const packedColours = ({ colours }) => colours.map((hex) => packed(...bytes(hex)));

// Names of the classes whose patches are hidden; in the state as text, so that a link keeps them.
export const hiddenNames = ({ hide }) => new Set(hide ? hide.split("\n") : []);

// Whether a slide is of the class that is asked for, by its call.
export function calledAs(cohort, run, wanted) {
  const own = classesOf(cohort, run);
  const code = own ? own.names.indexOf(wanted) : -1;
  return code < 0 ? () => true : (i) => own.call[i] === code;
}

// Call and truth of a slide in a few words; null where nothing is known.
export function classWords(cohort, run, i) {
  const own = classesOf(cohort, run);
  if (!own || own.call[i] === null) return null;
  const [call, truth] = [own.call[i], own.truth[i]];
  const wrong = truth !== null && truth !== call;
  const said = `${own.word} ${own.names[call]}`;
  const above = `not ${own.names[0]}`;
  return { said, above, wrong, truth: truth === null ? "" : `is ${own.names[truth]}`, p: own.p[i] };
}

// The same for the panel: the call with the truth, and a probability per class.
export function classFacts(cohort, run, { said, truth, wrong, p }) {
  const { names } = classesOf(cohort, run);
  const note = truth ? ` (${truth}${wrong ? ": wrong" : ""})` : "";
  return [["called", said + note], ...names.map((name, k) => [`P(${name})`, rounded(p[k])])];
}

// Who was called what, for the cohort page; a click on a column shows the slides in the list.
export function classConfusion(own) {
  const { names, call, truth, word } = own;
  const count = (t, c) => truth.filter((value, i) => value === t && call[i] === c).length;
  const pick = (name) => {
    const choose = () => set({ called: get().called === name ? "" : name });
    return make("button", { type: "button", class: "quiet", onclick: choose }, `called ${name}`);
  };
  const head = make("tr", {}, make("th", { scope: "col" }, ""));
  head.append(...names.map((name) => make("th", { scope: "col" }, pick(name))));
  const rows = names.map((name, t) => {
    const cells = names.map((_, c) => make("td", {}, String(count(t, c))));
    return make("tr", {}, make("th", { scope: "row" }, `${word} ${name}`), ...cells);
  });
  return make("table", { class: "metrics" }, make("thead", {}, head), make("tbody", {}, ...rows));
}

// The controls: slides by their call, patches by their class.
export function showClassControls(cohort) {
  const { panes, called } = get();
  const own = classesOf(cohort, panes[0].run);
  byId("called-field").hidden = byId("class-field").hidden = !own;
  if (!own) return;
  const entries = own.names.map((name) => [name, `called ${name}`, false]);
  options(byId("called"), [["", `any ${own.word}`, false], ...entries], called);
  const hidden = hiddenNames(get());
  const box = byId("class-field");
  const boxes = own.names.map((name, k) => {
    const input = make("input", { type: "checkbox", value: name });
    input.checked = !hidden.has(name);
    const swatch = make("span", { class: "swatch", "aria-hidden": "true" });
    swatch.style.backgroundColor = own.colours[k];
    return make("label", { class: "check" }, input, swatch, name);
  });
  if (box.dataset.shown === JSON.stringify([own.names, [...hidden]])) return;
  box.dataset.shown = JSON.stringify([own.names, [...hidden]]);
  box.replaceChildren(make("legend", {}, `Patches of ${own.word}`), ...boxes);
}

export function wireClassControls() {
  byId("called").addEventListener("change", (event) => set({ called: event.target.value }));
  byId("class-field").addEventListener("change", () => {
    const boxes = [...byId("class-field").querySelectorAll("input")];
    set({ hide: boxes.filter((b) => !b.checked).map((b) => b.value).join("\n") });
  });
}
