// Puts the page together: cohort, state, controls, keys.

import * as api from "./api.js";
import { showClassControls, wireClassControls } from "./classes.js";
import { CohortPage, pickWords } from "./cohort.js";
import { Compare, usualCoupling } from "./compare.js";
import { byId } from "./dom.js";
import { copyLink, savePicture } from "./export.js";
import { SlideList, wireControls } from "./list.js";
import { decode } from "./map.js";
import { PatchPanel } from "./patch.js";
import * as state from "./state.js";
import { Teaching } from "./teach.js";

const { get, set } = state;
const NEAR = 40; // screen pixels of a patch that was jumped to
const LISTED = ["slide", "sort", "filter", "called", "search", "pick", "panes"]; // of the list

function say(text, failed = false) {
  const line = byId("status");
  line.textContent = text;
  line.classList.toggle("failed", failed);
  clearTimeout(say.timer);
  if (text && !failed) say.timer = setTimeout(() => say(""), 4000);
}

// A link may come from another set of runs: what does not exist here becomes what does.
function fitting(wanted, cohort) {
  const panes = wanted.panes.map((pane) => {
    const run = pane.run < cohort.runs.length ? pane.run : 0;
    const known = cohort.runs[run].couplings?.includes(pane.coupling);
    return { ...pane, run, coupling: known ? pane.coupling : usualCoupling(cohort.runs[run]) };
  });
  return { ...wanted, panes };
}

class Page {
  constructor(cohort) {
    this.cohort = cohort;
    this.tested = cohort.runs.some((run) => run.has_p_values);
    const open = (slide) => this.open(slide);
    this.list = new SlideList(cohort, open);
    this.panel = new PatchPanel(cohort, (...target) => this.goTo(...target), open);
    this.teaching = new Teaching(cohort, {
      changed: () => this.compare.teach(),
      goTo: (slide, index) => this.#goToPatch(slide, index),
      say,
    });
    const told = {
      hover: (part, index) => this.panel.hover(part, index),
      changed: () => this.#mapChanged(),
    };
    this.compare = new Compare(cohort, told, this.teaching);
    this.curves = new CohortPage(cohort, open);
  }

  open(slide) {
    const name = this.cohort.columns.name[slide];
    if (name !== get().slide) set({ slide: name, view: null, pinned: null, page: "slide" });
    else set({ page: "slide" });
  }

  // To a patch of any slide, near enough to see it.
  goTo(slide, index, x, y) {
    const map = this.compare.parts[0].pane.map;
    const zoom = map ? NEAR / map.cell[0] : 0.1;
    const view = { x, y, zoom: Math.max(zoom, get().view?.zoom ?? 0) };
    set({ slide: this.cohort.columns.name[slide], pinned: index, view, page: "slide" });
  }

  // Its place is known once its map is here.
  async #goToPatch(slide, index) {
    const { run, coupling } = get().panes[0];
    const map = decode(await api.mapBytes(run, slide, coupling));
    this.goTo(slide, index, ...map.centre(index));
  }

  #mapChanged() {
    this.panel.showPinned(this.compare.parts[0]);
    this.#showMarks();
  }

  // Everything follows the state from here.
  follow(current, changed) {
    if (changed.has("page")) this.#showPage(current.page);
    if (changed.has("theme")) document.documentElement.dataset.theme = current.theme;
    this.compare.follow(current, changed);
    if (changed.size === 1 && changed.has("view")) return; // panning: only the maps move
    this.teaching.follow(current, changed);
    if (LISTED.some((key) => changed.has(key))) this.list.update(current);
    if (changed.has("slide") || changed.has("panes")) this.panel.showSlide();
    this.#mapChanged();
    if (current.page === "cohort" && ["page", "panes", "pick"].some((key) => changed.has(key))) {
      this.curves.show();
    }
    this.#showControls(current);
  }

  #showPage(page) {
    byId("slide-page").hidden = page !== "slide";
    byId("cohort-page").hidden = page !== "cohort";
    for (const name of ["slide", "cohort"]) {
      byId(`tab-${name}`).setAttribute("aria-current", name === page ? "page" : "false");
    }
  }

  #showControls(current) {
    for (const id of ["sort", "filter", "search", "colours"]) {
      if (byId(id).value !== current[id]) byId(id).value = current[id];
    }
    byId("threshold").value = current.threshold;
    byId("threshold-value").textContent = current.threshold.toFixed(2);
    byId("outlines").checked = current.outlines;
    byId("picked").hidden = !current.pick;
    byId("pick-words").textContent = pickWords(current.pick);
    byId("add-pane").disabled = current.panes.length >= state.MOST_PANES;
    const words = { auto: "as the system", light: "light", dark: "dark" };
    byId("theme").textContent = { auto: "\u25d0", light: "\u2600", dark: "\u263e" }[current.theme];
    byId("theme").setAttribute("aria-label", `colours of the page: ${words[current.theme]}`);
    showClassControls(this.cohort);
    this.#showLinks(current);
  }

  // What depends on the map: its opacity, and how many patches are marked.
  #showMarks() {
    const { parts } = this.compare;
    const opacity = get().opacity ?? this.compare.usualOpacity(parts[0]);
    byId("opacity").value = opacity;
    byId("opacity-value").textContent = opacity.toFixed(2);
    const first = parts.find(({ pane }) => pane.map?.p_value) ?? parts[0];
    const map = first?.pane.map;
    const tested = Boolean(map?.p_value);
    // Fields keep their place where another map of the run has marks: the maps must not jump.
    this.tested ||= tested;
    byId("rate-field").hidden = byId("outlines-field").hidden = !this.tested;
    byId("rate").disabled = !tested;
    byId("outlines").disabled = !(tested || map?.flagged);
    byId("rate-value").textContent = map ? "no p-values here" : "";
    if (!tested) return;
    const rate = this.compare.rate(first.setting);
    const marked = this.compare.flags(first).reduce((sum, flag) => sum + flag, 0);
    const own = rate === this.cohort.runs[first.setting.run].rate;
    byId("rate").value = rate;
    byId("rate-value").textContent = `${rate}: ${marked} marked`;
    byId("rate-field").title = own ? "the rate that the run was made with" : "";
  }

  #showLinks(current) {
    const slide = this.cohort.columns.name.indexOf(current.slide);
    const { run, coupling } = current.panes[0];
    const there = slide >= 0 && this.cohort.runs[run].has_patches;
    byId("save-picture").disabled = !there;
    const link = byId("geojson");
    link.classList.toggle("disabled", !there);
    if (there) link.href = api.geojsonUrl(run, slide, coupling, "all");
    else link.removeAttribute("href");
  }

  // --- Controls and keys ------------------------------------------------------------------------
  wire() {
    wireControls();
    wireClassControls();
    const on = (id, type, act) => byId(id).addEventListener(type, act);
    on("colours", "change", (event) => set({ colours: event.target.value }));
    for (const id of ["opacity", "threshold", "rate"]) {
      on(id, "input", (event) => set({ [id]: Number(event.target.value) }));
    }
    on("outlines", "change", (event) => set({ outlines: event.target.checked }));
    on("fit", "click", () => set({ view: null }));
    on("add-pane", "click", () => this.compare.add());
    on("tab-slide", "click", () => set({ page: "slide" }));
    on("tab-cohort", "click", () => set({ page: "cohort" }));
    on("theme", "click", () => {
      const next = { auto: "dark", dark: "light", light: "auto" };
      set({ theme: next[get().theme] });
    });
    on("save-picture", "click", () => {
      savePicture(this.compare.parts, this.cohort).catch((error) => say(error.message, true));
    });
    on("copy-link", "click", async () => say(await copyLink()));
    on("help", "click", () => byId("help-dialog").showModal());
    addEventListener("keydown", (event) => this.#key(event));
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", () => this.compare.prepare());
  }

  #key(event) {
    if (event.altKey || document.querySelector("dialog[open]")) return;
    const typing = event.target.closest("input:not([type=checkbox]), select, textarea");
    const teaches = get().page === "slide" && !typing;
    if (teaches && this.teaching.key(event, this.compare.pointed())) return event.preventDefault();
    if (event.ctrlKey || event.metaKey) return;
    const pressing = event.key === "Enter" && event.target.closest("button, a, summary");
    if (typing || pressing) return;
    const layer = state.LAYER_NAMES[Number(event.key) - 1];
    const panes = get().panes;
    if (event.key === "/") byId("search").focus();
    else if (event.key === "Escape") set({ pinned: null });
    else if (event.key === "?") byId("help-dialog").showModal();
    else if (layer) set({ panes: panes.map((pane, k) => (k ? pane : { ...pane, layer })) });
    else if (!this.list.key(event)) return;
    event.preventDefault();
  }
}

async function start() {
  say("loading the cohort \u2026");
  const cohort = await api.cohort();
  say("");
  document.title = cohort.title ? `${cohort.title} \u2013 gpmil` : "gpmil";
  byId("title").textContent = cohort.title || "gpmil";
  const page = new Page(cohort);
  page.wire();
  const wanted = fitting(state.fromHash(location.hash), cohort);
  state.set(wanted); // without listeners yet: one pass over everything follows
  state.subscribe((current, changed) => page.follow(current, changed));
  state.keepInAddress((hash) => fitting(state.fromHash(hash), cohort));
  page.follow(get(), new Set(Object.keys(get())));
  if (!get().slide) set({ slide: cohort.columns.name[page.list.order[0] ?? 0] ?? "" });
  page.list.reveal(true);
  document.body.dataset.ready = "true";
}

start().catch((error) => say(error.message, true));
