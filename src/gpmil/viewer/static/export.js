// What leaves the page: a picture of the maps as they are seen, a link that restores them.

import { byId, download } from "./dom.js";
import { get, toHash } from "./state.js";

const TITLE = 34; // pixels above each map
const GAP = 8;

// Slide pixels, map and legend of every pane, side by side with a title each.
function compose(parts, cohort) {
  const dense = devicePixelRatio || 1;
  const boxes = parts.map(({ pane }) => pane.stage.getBoundingClientRect());
  const left = Math.min(...boxes.map((box) => box.left));
  const top = Math.min(...boxes.map((box) => box.top));
  const right = Math.max(...boxes.map((box) => box.right));
  const bottom = Math.max(...boxes.map((box) => box.bottom));
  const canvas = document.createElement("canvas");
  canvas.width = Math.round((right - left + 2 * GAP) * dense);
  canvas.height = Math.round((bottom - top + TITLE + GAP) * dense);
  const context = canvas.getContext("2d");
  context.scale(dense, dense);
  const page = getComputedStyle(document.body);
  context.fillStyle = page.backgroundColor;
  context.fillRect(0, 0, canvas.width, canvas.height);
  parts.forEach((part, k) => {
    const { pane } = part;
    const [x, y] = [boxes[k].left - left + GAP, boxes[k].top - top + TITLE];
    const { width, height } = boxes[k];
    context.fillStyle = getComputedStyle(pane.stage).backgroundColor;
    context.fillRect(x, y, width, height);
    pane.drawNow();
    const slide = pane.viewer?.drawer.canvas;
    if (slide?.width) context.drawImage(slide, x, y, width, height);
    context.drawImage(pane.canvas, x, y, width, height);
    context.fillStyle = page.color;
    context.font = "13px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillText(title(part, cohort), x + 4, y - TITLE / 2, width - 8);
  });
  return canvas;
}

function title({ setting }, cohort) {
  const lambda = setting.coupling ? `, coupling ${setting.coupling}` : "";
  return `${get().slide} \u2013 ${cohort.runs[setting.run].name}${lambda}`;
}

// Letters that every file system takes.
export const fileName = (text) => text.replace(/[^\w.-]+/g, "_").slice(0, 80) || "slide";

export async function savePicture(parts, cohort) {
  const canvas = compose(parts, cohort);
  const blob = await new Promise((done) => canvas.toBlob(done, "image/png"));
  if (!blob) throw new Error("The browser could not make the picture.");
  download(blob, `${fileName(get().slide)}.png`);
}

// To the clipboard; where the browser refuses that, into a field to copy it from.
export async function copyLink() {
  const link = `${location.origin}${location.pathname}#${toHash(get())}`;
  try {
    await navigator.clipboard.writeText(link);
    return "link copied";
  } catch {
    const dialog = byId("link-dialog");
    byId("link").value = link;
    dialog.showModal();
    byId("link").select();
    return "";
  }
}
