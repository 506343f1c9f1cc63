// Numbers as people read them.

// Three significant digits; no probability is rounded to certainty.
export function rounded(p) {
  if (p < 0.001) return "< 0.001";
  return p >= 0.9995 ? "> 0.999" : String(Number(p.toPrecision(3)));
}
