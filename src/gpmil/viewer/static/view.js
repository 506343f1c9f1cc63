// One map of a slide: the slide's tiles (or neutral tissue) below, the patches above.
// OpenSeadragon only draws tiles here. Pan and zoom belong to the state, so that several maps of
// a slide move together, with an image or without.

import * as api from "./api.js";
import { decode } from "./map.js";
import * as layers from "./layers.js";
import { ask } from "./dom.js";
import { drawMarks } from "./teach.js";

const CLICK = 4; // pixels that a hand may move while it clicks
const ZOOM_STEP = 1.25;
const MARGIN = 0.06; // of the stage, around a slide that is fitted into it
const KEPT_TIMES = 512;

// Milliseconds of the latest drawings: what benchmarks/viewer_page.py reads.
export const drawTimes = [];

// An element that OpenSeadragon takes for its own style sheet: that one would be refused by the
// page's security policy. Without a namespace it is no style sheet to the browser.
function forestallInlineStyle() {
  if (document.querySelector("style[data-openseadragon-mobile-css]")) return;
  const none = document.createElementNS(null, "style");
  none.setAttribute("data-openseadragon-mobile-css", "true");
  document.head.append(none);
}

// The whole slide, above the legend.
export function fit([left, top, right, bottom], width, height) {
  const foot = layers.legendRoom(height);
  const room = 1 - 2 * MARGIN;
  const zoom = Math.min((width * room) / (right - left), ((height - foot) * room) / (bottom - top));
  return { x: (left + right) / 2, y: (top + bottom) / 2 + foot / 2 / zoom, zoom };
}

export function zoomAt(view, factor, dx, dy) {
  const zoom = view.zoom * factor;
  // the point under the cursor stays there: x + dx / zoom is the same before and after
  return { x: view.x + dx / view.zoom - dx / zoom, y: view.y + dy / view.zoom - dy / zoom, zoom };
}

export class Pane {
  // `events`: view(), move(view), hover(point | null), pin(pane, index) and changed(pane);
  // brush() says whether a hand that moves marks patches, marked(pane, indices) which they were,
  // learned(facts, failure) what came with a taught map
  constructor(stage, events) {
    this.stage = stage;
    this.events = events;
    this.canvas = ask(stage, "canvas");
    this.tiles = ask(stage, ".tiles");
    this.message = ask(stage, ".message");
    this.map = null;
    this.image = null;
    this.shown = null;
    this.pointer = null; // what the hand points at: the number of a patch, or -1
    this.#listen();
    this.watch = new ResizeObserver(() => this.draw());
    this.watch.observe(stage);
  }

  // --- Loading ----------------------------------------------------------------------------------
  // `version` is that of a taught map, null for the map of the run.
  async load(slide, name, run, coupling, hasImage, version) {
    // Another coupling replaces the map when it is there; another slide must not be mistaken.
    if (slide !== this.slide) this.clear("");
    this.slide = slide;
    this.pointer = null;
    const ticket = (this.ticket = Symbol("load")); // an answer that comes too late is dropped
    if (!this.map) this.say(`loading map of slide ${name} \u2026`);
    try {
      const [bytes, image] = await Promise.all([
        this.#bytes(run, slide, coupling, version),
        hasImage ? api.slideImage(slide) : null,
      ]);
      if (ticket !== this.ticket) return;
      this.map = decode(bytes);
      this.#openImage(image);
      if (!this.map.n) this.say(`slide ${name} has no patches`);
      else this.say(image?.note ?? "", Boolean(image?.note));
    } catch (error) {
      if (ticket !== this.ticket) return;
      this.clear(error.message, true);
    }
    this.events.changed(this);
  }

  // Where the model cannot learn, the map of the run stays.
  async #bytes(run, slide, coupling, version) {
    if (version === null) return api.mapBytes(run, slide, coupling);
    try {
      const { bytes, facts } = await api.taughtMap(run, slide, version);
      this.events.learned(facts, null);
      return bytes;
    } catch (error) {
      this.events.learned(null, error);
      return api.mapBytes(run, slide, coupling);
    }
  }

  clear(text, failed = false) {
    this.ticket = null;
    this.map = this.shown = null;
    this.#openImage(null);
    this.say(text, failed);
    this.draw();
  }

  say(text, failed = false) {
    this.message.textContent = text;
    this.message.hidden = !text;
    this.message.classList.toggle("failed", failed);
  }

  #openImage(image) {
    if (this.image?.tiles === image?.tiles) return;
    this.viewer?.destroy();
    this.viewer = null;
    this.image = image;
    this.tiles.replaceChildren();
    if (!image) return;
    forestallInlineStyle();
    this.viewer = OpenSeadragon({
      element: this.tiles,
      tileSources: image.tiles,
      drawer: "canvas", // its pixels can be read for the exported picture
      showNavigationControl: false,
      mouseNavEnabled: false,
      keyboardShortcuts: [],
      tabIndex: "",
      animationTime: 0,
      visibilityRatio: 0,
      minZoomLevel: 1e-9,
      minZoomImageRatio: 1e-9,
      maxZoomPixelRatio: 1e9,
    });
    this.viewer.addHandler("open", () => this.draw());
    this.viewer.addHandler("open-failed", () => this.say("the slide's image cannot be read", true));
  }

  // --- Drawing ----------------------------------------------------------------------------------
  prepare(look, flagged, extras) {
    this.look = look;
    this.flagged = flagged;
    this.extras = extras;
    this.shown = this.map ? layers.prepare(this.map, look, flagged) : null;
    this.draw();
  }

  // At most once a frame, whatever asks for it.
  draw() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      const start = performance.now();
      this.drawNow();
      drawTimes.push(performance.now() - start);
      if (drawTimes.length > KEPT_TIMES) drawTimes.shift();
    });
  }

  drawNow() {
    const { canvas } = this;
    const [width, height] = [this.stage.clientWidth, this.stage.clientHeight];
    const dense = devicePixelRatio || 1;
    const [wide, high] = [Math.round(width * dense), Math.round(height * dense)];
    // even setting the same size would clear the canvas and cost a frame
    if (canvas.width !== wide) canvas.width = wide;
    if (canvas.height !== high) canvas.height = high;
    const context = canvas.getContext("2d");
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, canvas.width, canvas.height);
    const view = this.events.view();
    if (!this.shown || !view || !width) return;
    this.#moveTiles(view, width, height);
    const { zoom } = view;
    const k = zoom * dense;
    const [left, top] = [width / 2 - view.x * zoom, height / 2 - view.y * zoom];
    context.setTransform(k, 0, 0, k, left * dense, top * dense);
    const [dx, dy] = [width / 2 / zoom, height / 2 / zoom];
    this.#drawPatches(context, [view.x - dx, view.y - dy, view.x + dx, view.y + dy], zoom);
    context.setTransform(dense, 0, 0, dense, 0, 0);
    this.#drawKeys(context, zoom, width, height);
  }

  #drawPatches(context, visible, zoom) {
    const { map, shown, look } = this;
    if (!this.image) layers.drawPicture(context, map, shown.tissue, shown.ground, visible);
    if (shown.picture) {
      context.globalAlpha = look.opacity;
      layers.drawPicture(context, map, shown.picture, shown.paint, visible);
      context.globalAlpha = 1;
    }
    if (shown.outlines) {
      layers.drawOutlines(context, map, this.flagged, shown.outlines, visible, zoom);
    }
    drawMarks(context, map, this.extras, zoom);
    this.#drawPointers(context, zoom);
  }

  // The pinned patch, its neighbours and the patch under the hand.
  #drawPointers(context, zoom) {
    const { map, extras } = this;
    const boxes = (indices) => {
      const path = new Path2D();
      for (const i of indices) path.rect(...map.box(i));
      return path;
    };
    if (extras.pinned !== null) {
      context.setLineDash([4 / zoom, 4 / zoom]);
      layers.strokeTwice(context, boxes(extras.neighbours), zoom, 1.5);
      context.setLineDash([]);
      layers.strokeTwice(context, boxes([extras.pinned]), zoom, 3.5);
    }
    if (this.stroke) layers.strokeTwice(context, boxes(this.stroke), zoom, 2.5);
    if (this.pointer !== null && this.pointer >= 0) {
      layers.strokeTwice(context, boxes([this.pointer]), zoom, 1.5);
    }
  }

  #drawKeys(context, zoom, width, height) {
    const colours = { paper: this.look.paper, ink: this.look.ink };
    if (this.look.layer !== "none") {
      const { legend } = this.extras;
      layers.drawLegend(context, this.look, legend, colours, width, height, this.map.classes);
    }
    const { mpp, scale } = this.image ?? {};
    if (mpp) layers.drawScaleBar(context, (mpp * (scale ?? 1)) / zoom, colours, width, height);
  }

  // The same rectangle for OpenSeadragon, which counts in widths of the image.
  #moveTiles(view, width, height) {
    if (!this.viewer?.isOpen()) return;
    const { scale = 1, offset = [0, 0], width: full } = this.image;
    const [wide, high] = [(width / view.zoom) * scale, (height / view.zoom) * scale];
    const left = view.x * scale + offset[0] - wide / 2;
    const top = view.y * scale + offset[1] - high / 2;
    const rectangle = new OpenSeadragon.Rect(left / full, top / full, wide / full, high / full);
    this.viewer.viewport.fitBounds(rectangle, true);
  }

  // --- Hand and keys ----------------------------------------------------------------------------
  #listen() {
    const { canvas } = this;
    let last = null;
    let travelled = 0;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      canvas.setPointerCapture(event.pointerId);
      [last, travelled] = [event, 0];
      if (this.map && !event.shiftKey && this.events.brush()) this.#paint(event, new Set());
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!last) return this.events.hover(this.point(event));
      const [dx, dy] = [event.clientX - last.clientX, event.clientY - last.clientY];
      travelled += Math.abs(dx) + Math.abs(dy);
      last = event;
      if (this.stroke) return this.#paint(event, this.stroke);
      if (travelled > CLICK) this.#pan(-dx, -dy);
    });
    canvas.addEventListener("pointerup", (event) => {
      const stroke = this.stroke;
      this.stroke = null;
      if (stroke?.size) this.events.marked(this, [...stroke]);
      else if (!stroke && last && travelled <= CLICK && this.map) {
        const point = this.point(event);
        this.events.pin(this, point ? this.map.at(...point) : -1);
      }
      last = null;
    });
    canvas.addEventListener("pointercancel", () => (last = this.stroke = null));
    canvas.addEventListener("pointerleave", () => this.events.hover(null));
    canvas.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.#key(event));
  }

  // The patch under the hand becomes part of the stroke.
  #paint(event, stroke) {
    this.stroke = stroke;
    const point = this.point(event);
    const index = point ? this.map.at(...point) : -1;
    if (index >= 0) stroke.add(index);
    this.draw();
  }

  // Where in the slide an event happened.
  point(event) {
    const view = this.events.view();
    if (!view) return null;
    const [dx, dy] = this.#fromMiddle(event);
    return [view.x + dx / view.zoom, view.y + dy / view.zoom];
  }

  #fromMiddle(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left - box.width / 2, event.clientY - box.top - box.height / 2];
  }

  #pan(dx, dy) {
    const view = this.events.view();
    if (view) this.events.move({ ...view, x: view.x + dx / view.zoom, y: view.y + dy / view.zoom });
  }

  #wheel(event) {
    const view = this.events.view();
    if (!view) return;
    event.preventDefault();
    const lines = event.deltaMode === 1 ? 40 : 1;
    this.events.move(zoomAt(view, 1.0015 ** (-event.deltaY * lines), ...this.#fromMiddle(event)));
  }

  #key(event) {
    const view = this.events.view();
    const pan = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (!view || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in pan) this.#pan(...pan[event.key].map((d) => 60 * d));
    else if ("+=".includes(event.key)) this.events.move(zoomAt(view, ZOOM_STEP, 0, 0));
    else if (event.key === "-") this.events.move(zoomAt(view, 1 / ZOOM_STEP, 0, 0));
    else if (event.key === "0") this.events.move(null);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  destroy() {
    this.ticket = null;
    this.watch.disconnect();
    cancelAnimationFrame(this.frame);
    this.viewer?.destroy();
  }
}
