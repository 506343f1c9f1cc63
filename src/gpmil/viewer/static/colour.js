// Colours that colour-blind readers can order: three maps of rising lightness, and a few signals.

// Every sixteenth colour of the map, between which colours are interpolated.
const ANCHORS = {
  viridis:
    "440154 48186a 472d7b 424086 3b528b 33638d 2c728e 26828e 21918c " +
    "1fa088 28ae80 3fbc73 5ec962 84d44b addc30 d8e219 fde725",
  cividis:
    "00224e 002e6a 1a386f 32436d 434e6c 535a6d 61656f 6f7073 7d7c78 " +
    "8c8878 9b9476 aba072 bcae6c cdbb63 dec958 f0d846 fee838",
  magma:
    "000004 0a0822 1d1147 36106b 51127c 6a1c81 832681 9c2e7f b73779 " +
    "d0416f e75263 f56b5c fc8961 fea772 fec488 fde2a3 fcfdbf",
  // of suspicion, as in the heat maps
  flame: "ffffcc ffeda0 fed976 feb24c fd8d3c fc4e2a e31a1c bd0026 800026",
};
export const SIZE = 256;
export const MARKED = [213, 94, 0]; // as in the GeoJSON for QuPath

// Four bytes as ImageData has them in a little-endian word, which all browsers' machines are.
export const packed = (r, g, b, a = 255) => ((a << 24) | (b << 16) | (g << 8) | r) >>> 0;

const channels = (hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));

function interpolate(anchors, fading) {
  const table = new Uint32Array(SIZE);
  for (let i = 0; i < SIZE; i++) {
    const at = (i / (SIZE - 1)) * (anchors.length - 1);
    const left = Math.min(Math.floor(at), anchors.length - 2);
    const mix = (v, c) => Math.round(v + (at - left) * (anchors[left + 1][c] - v));
    const opaque = fading ? Math.min(1, (fading * i) / (SIZE - 1)) : 1;
    table[i] = packed(...anchors[left].map(mix), Math.round(255 * opaque));
  }
  return table;
}

const tables = {};

// 256 packed colours from low to high; with `fading` low values are transparent, opaque from
// 1 / fading of the scale on, so that tissue is seen where there is nothing to see.
export function table(name, fading = 0) {
  const key = `${name} ${fading}`;
  tables[key] ??= interpolate(ANCHORS[name].split(" ").map(channels), fading);
  return tables[key];
}

export function css(word) {
  const opaque = (word >>> 24) / 255;
  return `rgb(${word & 255} ${(word >> 8) & 255} ${(word >> 16) & 255} / ${opaque})`;
}
