// From numbers to pixels: what each layer shows, the baked map, hatched marks, the legend.

import { packedColours } from "./classes.js";
import { MARKED, SIZE, css, packed, table } from "./colour.js";

// p-values are looked at by their order of magnitude; below this all are as small as can be.
const SMALLEST_P = 1e-3;
const FEW = 3000; // patches off the lattice that are drawn one by one
const TINY = 5; // pixels of a patch: lines through smaller ones are thin
const SMALL = 340; // pixels: lower stages have a short legend
const FONT = "12px system-ui, sans-serif";

export const three = (value) => String(Number(value.toPrecision(3)));
const upTo = (top) => [[0, "0"], [0.5, three(top / 2)], [1, three(top)]];

// The layers by their names, the same as in heat maps, on pages and in QuPath.
export const LAYERS = {
  suspicion: {
    name: "Suspicion",
    title: "Suspicion: p-value, how unlike tissue of negative slides",
    column: "p_value",
    colours: "flame",
    fading: 3,
    ticks: () => [[0, "1"], [1 / 3, "0.1"], [2 / 3, "0.01"], [1, "0.001"]],
    unit: (p) => Math.log10(Math.max(p, SMALLEST_P)) / Math.log10(SMALLEST_P),
  },
  probability: {
    name: "Probability",
    title: "Probability",
    column: "probability",
    fading: 4,
    ticks: ({ top }) => upTo(top),
    unit: (p, { top }) => p / top,
  },
  doubt: {
    name: "Doubt",
    title: "Doubt left, of that before any slide was seen",
    column: "doubt",
    ticks: ({ sdTop }) => upTo(sdTop),
    unit: (value, { sdTop }) => value / sdTop,
  },
  unlike: {
    name: "Unlike negative slides",
    title: "Probability, by slide labels alone, of being unlike negative slides",
    column: "unlike",
    fading: 4,
    ticks: ({ top }) => upTo(top),
    unit: (p, { top }) => p / top,
  },
  flags: { name: "Marked patches", title: "Marked patches" },
  none: { name: "No map", title: "No map" },
  grade: { name: "Grade or type", title: "Grade or type" },
};
export const NO_P_VALUES = "no p-values: fitted without flags, at another coupling, or taught and not saved yet";
const ONLY_SD = "Standard deviation, mostly the number of neighbours";

// Which layers a map has numbers for.
export function available(map) {
  const has = { probability: true, none: true, doubt: Boolean(map.doubt ?? map.sd) };
  has.suspicion = Boolean(map.p_value);
  has.unlike = Boolean(map.unlike);
  has.flags = Boolean(map.p_value || map.flagged);
  has.grade = Boolean(map.classes);
  return has;
}

// The numbers of a layer; runs of earlier versions have deviations in place of doubts.
export const valuesOf = (map, layer) =>
  layer === "doubt" ? (map.doubt ?? map.sd) : map[LAYERS[layer].column];

export function titleOf(map, layer) {
  if (layer === "grade" && map?.classes) return map.classes.word;
  return layer === "doubt" && map && !map.doubt ? ONLY_SD : LAYERS[layer].title;
}

// 1, 2 or 5 times a power of ten, no smaller than the value: a scale that slides can share.
export function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((k) => k * power).find((top) => top >= value * (1 - 1e-9)) ?? 1;
}

function shades(look) {
  const { colours, fading } = LAYERS[look.layer];
  return table(colours ?? look.colours, fading);
}

// The packed colour of a patch, 0 where it is not shown: as the layer has it, and where patches of
// its grade or type are shown.
function painter(map, look, flagged) {
  const paint = layerPainter(map, look, flagged);
  if (!map.classes || !look.hidden.size) return paint;
  const gone = map.classes.names.map((name) => look.hidden.has(name));
  return (i) => (gone[map.class_code[i]] ? 0 : paint(i));
}

function layerPainter(map, look, flagged) {
  const { unit } = LAYERS[look.layer];
  const colours = shades(look);
  if (look.layer === "flags") {
    const marked = packed(...MARKED);
    return (i) => (flagged?.[i] && map.probability[i] >= look.threshold ? marked : 0);
  }
  if (look.layer === "grade") {
    const own = packedColours(map.classes);
    return (i) => (map.probability[i] >= look.threshold ? (own[map.class_code[i]] ?? 0) : 0);
  }
  const values = valuesOf(map, look.layer);
  return (i) => {
    const at = unit(values[i], look);
    if (!(at >= 0) || map.probability[i] < look.threshold) return 0;
    return colours[Math.min(SIZE - 1, Math.floor(at * SIZE))];
  };
}

// One pixel a cell, all colours opaque: drawn scaled and without smoothing.
export function bake(map, paint) {
  const { width, height, column, row, cover } = map.raster;
  const picture = new ImageData(width, height);
  const pixels = new Uint32Array(picture.data.buffer);
  for (let i = 0; i < map.n; i++) {
    const colour = paint(i);
    if (!colour) continue;
    for (let r = row[i]; r < Math.min(row[i] + cover[1], height); r++) {
      for (let c = column[i]; c < Math.min(column[i] + cover[0], width); c++) {
        pixels[r * width + c] = colour;
      }
    }
  }
  const canvas = new OffscreenCanvas(width, height);
  canvas.getContext("2d").putImageData(picture, 0, 0);
  return canvas;
}

const struck = new WeakMap(); // lines by their marks, which most sliders leave as they are

export function prepare(map, look, flagged) {
  const tissue = packed(...look.tissue);
  map.tissue ??= {};
  const ground = () => tissue;
  map.tissue[tissue] ??= bake(map, ground);
  const shown = { tissue: map.tissue[tissue], ground, picture: null, outlines: null };
  if (look.layer !== "none" && map.n) {
    shown.paint = painter(map, look, flagged);
    shown.picture = bake(map, shown.paint);
  }
  if (look.outlines && flagged) {
    if (!struck.has(flagged)) struck.set(flagged, hatching(map, flagged));
    shown.outlines = struck.get(flagged);
  }
  return shown;
}

// Patches off the lattice, where so few are in sight that each can be drawn where it is exactly.
function fewIn(map, visible) {
  if (map.grid) return null;
  const near = [];
  for (const i of map.within(...visible)) if (near.push(i) > FEW) return null;
  return near;
}

// In the slide's units; `visible` is left, top, right, bottom of what can be seen.
export function drawPicture(context, map, picture, paint, visible) {
  const { width, height, left, top, pixel } = map.raster;
  context.imageSmoothingEnabled = false;
  const near = fewIn(map, visible);
  if (!near) return context.drawImage(picture, left, top, width * pixel[0], height * pixel[1]);
  drawBoxes(context, map, near, paint);
}

// On whole screen pixels, because half covered ones would draw a seam between neighbours.
function drawBoxes(context, map, indices, paint) {
  const { a: zoom, e: right, f: down } = context.getTransform();
  context.save();
  context.resetTransform();
  for (const i of indices) {
    const colour = paint(i);
    if (!colour) continue;
    const [left, top, wide, high] = map.box(i);
    const [x0, x1] = [left, left + wide].map((x) => Math.round(x * zoom + right));
    const [y0, y1] = [top, top + high].map((y) => Math.round(y * zoom + down));
    context.fillStyle = css(colour);
    context.fillRect(x0, y0, x1 - x0, y1 - y0);
  }
  context.restore();
}

export function drawOutlines(context, map, flagged, lines, visible, zoom) {
  if (map.cell[0] * zoom < TINY) {
    // two lines would hide what they mark
    context.strokeStyle = "#ffffff";
    context.lineWidth = 1 / zoom;
    return context.stroke(lines);
  }
  const near = fewIn(map, visible);
  if (!near) return strokeTwice(context, lines, zoom, 1);
  const path = new Path2D();
  for (const i of near) if (flagged[i]) strike(path, ...map.box(i));
  strokeTwice(context, path, zoom, 1);
}

function strike(path, left, top, width, height) {
  path.moveTo(left, top + height);
  path.lineTo(left + width, top);
}

// Diagonals through marked pixels, from the lower left to the upper right, in pieces as long as
// they get, because a long line costs as much as a short one.
export function hatching(map, flagged) {
  const { width, height, left, top, pixel, column, row, cover } = map.raster;
  const wide = width + 2; // an empty border saves conditions
  const marked = new Uint8Array(wide * (height + 2));
  for (let i = 0; i < map.n; i++) {
    if (!flagged[i]) continue;
    for (let r = row[i]; r < Math.min(row[i] + cover[1], height); r++) {
      const start = (r + 1) * wide + column[i] + 1;
      marked.fill(1, start, start + Math.min(cover[0], width - column[i]));
    }
  }
  const path = new Path2D();
  const next = 1 - wide; // one to the right, one up
  for (let r = 1; r <= height; r++) {
    for (let c = 1; c <= width; c++) {
      const at = r * wide + c;
      if (!marked[at] || marked[at - next]) continue;
      let long = 1;
      while (marked[at + long * next]) long++;
      strike(path, left + (c - 1) * pixel[0], top + (r - long) * pixel[1],
        long * pixel[0], long * pixel[1]);
    }
  }
  return path;
}

// White between dark edges is seen on every colour and on tissue.
export function strokeTwice(context, path, zoom, width = 2) {
  context.lineJoin = "round";
  context.lineCap = "square";
  for (const [colour, wide] of [["#14171c", width + 2], ["#ffffff", width]]) {
    context.strokeStyle = colour;
    context.lineWidth = wide / zoom;
    context.stroke(path);
  }
}

// Pixels at the foot of a stage that a fitted slide leaves free.
export const legendRoom = (height) => (height < SMALL ? 34 : 76);

// Drawn on the map itself, so that an exported picture has it too. Small maps have one line.
export function drawLegend(context, look, words, colours, width, height, classes) {
  const scale = LAYERS[look.layer].ticks;
  context.font = FONT;
  if (look.layer === "grade") return drawClasses(context, words, colours, width, height, classes);
  if (scale && height >= SMALL) return drawScale(context, look, words, colours, width, height);
  const [pad, tall, ramp] = [8, 24, scale ? Math.min(90, width / 4) : 14];
  const labels = scale ? [scale(look)[0][1], scale(look).at(-1)[1]] : ["", ""];
  const [low, high, full] = [...labels, words].map((word) => context.measureText(word).width);
  const [x, y] = [6, height - tall - 5];
  const rest = pad + low + 4 + ramp + 4 + high + 10 + pad;
  const text = Math.min(full, width - 2 * x - rest);
  frame(context, colours, x, y, rest + text, tall);
  const [left, middle] = [x + pad + low + 4, y + tall / 2];
  context.fillText(labels[0], x + pad, middle);
  context.fillText(labels[1], left + ramp + 4, middle);
  context.fillText(words, left + ramp + high + 14, middle, text);
  if (scale) return drawRamp(context, look, left, middle - 5, ramp);
  context.fillStyle = css(packed(...MARKED));
  context.fillRect(left, middle - 7, 14, 14);
}

// A swatch per class.
function drawClasses(context, words, colours, width, height, { names, colours: own }) {
  const [pad, tall, side, gap] = [8, 24, 12, 10];
  const texts = [words, ...names];
  const wide = texts.map((word) => context.measureText(word).width);
  const total = wide.reduce((sum, w) => sum + w + gap, 0) + names.length * (side + 4) + 2 * pad;
  const [x, y] = [6, height - tall - 5];
  frame(context, colours, x, y, Math.min(total, width - 2 * x), tall);
  let at = x + pad;
  const middle = y + tall / 2;
  texts.forEach((word, k) => {
    if (k) {
      context.fillStyle = own[k - 1];
      context.fillRect(at, middle - side / 2, side, side);
      at += side + 4;
      context.fillStyle = colours.ink;
    }
    context.fillText(word, at, middle);
    at += wide[k] + gap;
  });
}

function drawScale(context, look, words, colours, width, height) {
  const [pad, tall, x] = [10, 58, Math.min(12, width / 40)];
  const most = width - 2 * (x + pad);
  const [wide, y] = [Math.min(196, most), height - tall - 10];
  const text = Math.min(context.measureText(words).width, most);
  frame(context, colours, x, y, Math.max(wide, text) + 2 * pad, tall);
  context.fillText(words, x + pad, y + 14, text);
  for (const [at, label] of LAYERS[look.layer].ticks(look)) {
    context.textAlign = at === 0 ? "left" : at === 1 ? "right" : "center";
    context.fillText(label, x + pad + at * wide, y + 46);
  }
  drawRamp(context, look, x + pad, y + 25, wide);
}

// A background for words, which leaves the context ready to write them.
function frame(context, colours, x, y, width, height) {
  context.globalAlpha = 0.9;
  context.fillStyle = colours.paper;
  context.beginPath();
  context.roundRect(x, y, width, height, 6);
  context.fill();
  context.globalAlpha = 1;
  context.fillStyle = colours.ink;
  context.textBaseline = "middle";
  context.textAlign = "left";
}

function drawRamp(context, look, x, y, wide) {
  const ramp = shades(look);
  for (let k = 0; k < wide; k++) {
    context.fillStyle = css(ramp[Math.floor((k / wide) * SIZE)]);
    context.fillRect(x + k, y, 1.5, 10);
  }
}

// A round length of about 120 pixels; `microns` is the length of one screen pixel.
export function drawScaleBar(context, microns, colours, width, height) {
  const raw = 120 * microns;
  const power = 10 ** Math.floor(Math.log10(raw));
  const length = [5, 2, 1].map((k) => k * power).find((l) => l <= raw) ?? raw;
  const label = length >= 1000 ? `${length / 1000} mm` : `${length} \u00b5m`;
  const [right, bottom, pixels] = [width - 16, height - 16, length / microns];
  context.font = FONT;
  context.textAlign = "right";
  context.textBaseline = "bottom";
  const box = Math.max(pixels, context.measureText(label).width) + 16;
  context.globalAlpha = 0.85;
  context.fillStyle = colours.paper;
  context.fillRect(right - box + 8, bottom - 22, box, 30);
  context.globalAlpha = 1;
  context.fillStyle = colours.ink;
  context.fillText(label, right, bottom - 4);
  context.fillRect(right - pixels, bottom, pixels, 3);
}
