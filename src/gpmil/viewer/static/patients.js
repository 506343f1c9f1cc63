// Patients: all slides of one taken together, where any has several.

import { byId, make } from "./dom.js";
import { isWrong, rounded } from "./list.js";

const MOST = 200; // rows; all of them are in patients.csv

const middle = (p) => Math.abs(p - 0.5);

// Which patient of a run a slide is of, by its place in the table; -1 where patients are not there.
function patientOf(patients, slide) {
  return patients ? patients.slides.findIndex((own) => own.includes(slide)) : -1;
}

// What is said of a patient, beside what is said of its slide.
export function patientFacts(cohort, run, slide) {
  const patients = cohort.patients[run];
  const k = patientOf(patients, slide);
  if (k < 0) return [];
  const [p, call, label] = [patients.probability[k], patients.call[k], patients.label[k]];
  const facts = [["patient's probability", rounded(p)]];
  if (call !== null) {
    const wrong = isWrong(call, label) ? " (wrong)" : "";
    facts.push(["patient called", cohort.class_words[call] + wrong]);
  }
  return facts;
}

function slideButton(cohort, run, slide, open) {
  const p = cohort.columns.runs[run].probability[slide];
  const words = p === null ? "not predicted" : `probability ${rounded(p)}`;
  const name = cohort.columns.name[slide];
  const how = { type: "button", class: "quiet", title: `${name}: ${words}` };
  return make("button", { ...how, onclick: () => open(slide) }, name);
}

// The other slides of the patient, to go to.
export function showSiblings(cohort, run, slide, open) {
  const patients = cohort.patients[run];
  const k = patientOf(patients, slide);
  const others = k < 0 ? [] : patients.slides[k].filter((other) => other !== slide);
  byId("siblings").hidden = others.length === 0;
  byId("sibling-slides").replaceChildren(
    ...others.map((other) => make("li", {}, slideButton(cohort, run, other, open))),
  );
}

// The least certain first, as in the list of slides; wrong ones stand out.
export function showPatients(cohort, run, open) {
  const patients = cohort.patients[run];
  byId("patients").hidden = !patients;
  if (!patients) return;
  const { name, probability } = patients;
  const order = name.map((_, k) => k).sort((a, b) => middle(probability[a]) - middle(probability[b]));
  const more = order.length > MOST ? `; ${order.length - MOST} more are in patients.csv` : "";
  byId("patients-note").textContent =
    `${name.length} patients, all slides of each taken together, the least certain first${more}.`;
  byId("patient-rows").replaceChildren(
    ...order.slice(0, MOST).map((k) => patientRow(cohort, run, k, open)),
  );
}

function patientRow(cohort, run, k, open) {
  const { name, probability, call, label, slides } = cohort.patients[run];
  const word = (value) => (value === null ? "" : cohort.class_words[value]);
  const wrong = isWrong(call[k], label[k]);
  return make(
    "tr",
    {},
    make("th", { scope: "row" }, name[k]),
    make("td", { class: "number" }, rounded(probability[k])),
    make("td", {}, word(call[k])),
    make("td", { class: wrong ? "label wrong" : "" }, (wrong ? "\u2717 is " : "") + word(label[k])),
    make("td", {}, ...slides[k].map((slide) => slideButton(cohort, run, slide, open))),
  );
}
