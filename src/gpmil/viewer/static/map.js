// The patches of one slide as the server sends them, and where they lie.

const ARRAYS = {
  float64: Float64Array,
  float32: Float32Array,
  uint32: Uint32Array,
  int32: Int32Array,
  uint16: Uint16Array,
  uint8: Uint8Array,
  int8: Int8Array,
};
const FINE = 4; // pixels a patch where patches lie off a lattice
const LARGEST_RASTER = 2048; // pixels of its longer side
const NEAR = 1.1; // steps: neighbours off the lattice
// p-values are fractions that often meet their limit exactly, and tables hold nine digits of them.
const ROUNDING = 1e-8;

// "GPM1", length of the header, header (JSON), arrays one after the other; little endian.
export function decode(buffer) {
  const bytes = new Uint8Array(buffer);
  if (String.fromCharCode(...bytes.subarray(0, 4)) !== "GPM1") {
    throw new Error("The server sent no map of patches. Are page and server of one version?");
  }
  const length = new DataView(buffer).getUint32(4, true);
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + length)));
  const arrays = {};
  let at = 8 + length;
  for (const { name, dtype } of header.arrays) {
    const size = header.n * ARRAYS[dtype].BYTES_PER_ELEMENT;
    // A copy, because an array of bytes before may have moved this one off its alignment.
    arrays[name] = new ARRAYS[dtype](buffer.slice(at, at + size));
    at += size;
  }
  return new PatchMap(header, arrays);
}

const pair = (value) => (Array.isArray(value) ? value : [value, value]);

export class PatchMap {
  constructor(header, arrays) {
    Object.assign(this, arrays);
    this.n = header.n;
    this.grid = header.grid;
    this.bounds = header.bounds;
    this.classes = header.classes ?? null; // grades or types: word, names, colours
    const side = pair(header.side);
    const step = header.step ? pair(header.step) : side;
    // On a lattice a patch is drawn as its whole cell, so that no gaps or overlaps remain.
    this.cell = this.grid ? step : side;
    this.step = step;
    this.shift = header.anchor === "centre" ? this.cell.map((s) => s / 2) : [0, 0];
    this.raster = this.grid ? this.#lattice() : this.#fine();
    this.#sortIntoBins();
  }

  // One pixel a cell.
  #lattice() {
    const { columns, rows, x0, y0 } = this.grid;
    return {
      width: columns,
      height: rows,
      left: x0 - this.shift[0],
      top: y0 - this.shift[1],
      pixel: this.cell,
      cover: [1, 1],
      column: this.column,
      row: this.row,
    };
  }

  // Some pixels a patch, fewer where the slide is large.
  #fine() {
    const [left, top, right, bottom] = this.extent();
    const longer = Math.max(right - left, bottom - top);
    const pixel = this.cell.map((s) => Math.max(s / FINE, longer / LARGEST_RASTER) || 1);
    const [column, row] = [new Uint32Array(this.n), new Uint32Array(this.n)];
    for (let i = 0; i < this.n; i++) {
      column[i] = Math.round((this.x[i] - this.shift[0] - left) / pixel[0]);
      row[i] = Math.round((this.y[i] - this.shift[1] - top) / pixel[1]);
    }
    const cover = [0, 1].map((axis) => Math.max(1, Math.round(this.cell[axis] / pixel[axis])));
    const width = Math.ceil((right - left) / pixel[0]) + 1;
    const height = Math.ceil((bottom - top) / pixel[1]) + 1;
    return { width, height, left, top, pixel, cover, column, row };
  }

  // Left, top, right, bottom of everything that is drawn.
  extent() {
    if (this.grid) {
      const { left, top, width, height, pixel } = this.raster;
      return [left, top, left + width * pixel[0], top + height * pixel[1]];
    }
    let [left, top, right, bottom] = [Infinity, Infinity, -Infinity, -Infinity];
    for (let i = 0; i < this.n; i++) {
      left = Math.min(left, this.x[i]);
      top = Math.min(top, this.y[i]);
      right = Math.max(right, this.x[i]);
      bottom = Math.max(bottom, this.y[i]);
    }
    if (!this.n) return [0, 0, 1, 1];
    const [dx, dy] = this.shift;
    return [left - dx, top - dy, right - dx + this.cell[0], bottom - dy + this.cell[1]];
  }

  // Patches sorted by the bin that their corner lies in; a bin is no smaller than a patch.
  #sortIntoBins() {
    const [left, top, right, bottom] = this.extent();
    const size = this.cell.map((s, k) => Math.max(s, (k ? bottom - top : right - left) / 512));
    const wide = Math.floor((right - left) / size[0]) + 1;
    const high = Math.floor((bottom - top) / size[1]) + 1;
    const start = new Uint32Array(wide * high + 1);
    const bin = new Uint32Array(this.n);
    for (let i = 0; i < this.n; i++) {
      const c = Math.floor((this.x[i] - this.shift[0] - left) / size[0] + 1e-9);
      const r = Math.floor((this.y[i] - this.shift[1] - top) / size[1] + 1e-9);
      bin[i] = Math.min(r, high - 1) * wide + Math.min(c, wide - 1);
      start[bin[i] + 1]++;
    }
    for (let b = 0; b < wide * high; b++) start[b + 1] += start[b];
    const next = start.slice();
    const order = new Uint32Array(this.n);
    for (let i = 0; i < this.n; i++) order[next[bin[i]]++] = i;
    this.bins = { left, top, size, wide, high, start, order };
  }

  // Patches that may touch a rectangle, by their bins.
  *within(left, top, right, bottom) {
    const { size, wide, high, start, order, ...origin } = this.bins;
    const clip = (value, most) => Math.min(Math.max(value, 0), most - 1);
    const c0 = clip(Math.floor((left - origin.left) / size[0]) - 1, wide);
    const c1 = clip(Math.floor((right - origin.left) / size[0]), wide);
    const r0 = clip(Math.floor((top - origin.top) / size[1]) - 1, high);
    const r1 = clip(Math.floor((bottom - origin.top) / size[1]), high);
    for (let r = r0; r <= r1; r++) {
      for (let k = start[r * wide + c0]; k < start[r * wide + c1 + 1]; k++) yield order[k];
    }
  }

  // Left, top, width, height of a patch.
  box(i) {
    return [this.x[i] - this.shift[0], this.y[i] - this.shift[1], ...this.cell];
  }

  centre(i) {
    const [left, top, width, height] = this.box(i);
    return [left + width / 2, top + height / 2];
  }

  // The patch at a point, -1 where there is none; of overlapping ones that of the nearest centre.
  at(x, y) {
    let [found, nearest] = [-1, Infinity];
    for (const i of this.within(x, y, x, y)) {
      const [left, top, width, height] = this.box(i);
      if (x < left || y < top || x >= left + width || y >= top + height) continue;
      const away = Math.hypot(x - left - width / 2, y - top - height / 2);
      if (away < nearest) [found, nearest] = [i, away];
    }
    return found;
  }

  // On the lattice the four nearest cells, elsewhere patches at no more than 1.1 steps.
  neighbours(i) {
    const [sx, sy] = this.step;
    const [x, y] = [this.x[i], this.y[i]];
    const found = [];
    const [left, top, width, height] = this.box(i);
    for (const j of this.within(left - sx, top - sy, left + width + sx, top + height + sy)) {
      const [dx, dy] = [(this.x[j] - x) / sx, (this.y[j] - y) / sy];
      if (j !== i && Math.hypot(dx, dy) <= NEAR) found.push(j);
    }
    return found;
  }

  // Which patches are marked at a false discovery rate (Benjamini and Hochberg, 1995): the k
  // smallest p-values, k the largest i with p_(i) <= rate i / m. Without p-values as the run did.
  flags(rate) {
    if (!this.p_value) return this.flagged ?? null;
    this.sorted ??= this.p_value.filter((p) => !Number.isNaN(p)).sort();
    const m = this.sorted.length;
    let limit = -1;
    for (let i = m; i >= 1 && limit < 0; i--) {
      if (this.sorted[i - 1] <= ((rate * i) / m) * (1 + ROUNDING)) limit = this.sorted[i - 1];
    }
    return Uint8Array.from(this.p_value, (p) => (p <= limit ? 1 : 0));
  }
}
