// The server's routes. Answers that cost something are kept; errors are one readable line.

const KEPT_MAPS = 12; // 100,000 patches are some 5 MB

async function ask(path, how) {
  let answer;
  try {
    answer = await fetch(path, how);
  } catch {
    throw new Error("The server does not answer. Is `gpmil view` still running?");
  }
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => ({}));
  throw new Error(told.detail || `The server answered ${answer.status} to ${path}.`);
}

const json = async (path) => (await ask(path)).json();

const post = async (path, body) => {
  const headers = { "content-type": "application/json" };
  return (await ask(path, { method: "POST", headers, body: JSON.stringify(body) })).json();
};

function query(words) {
  const given = Object.entries(words).filter(([, value]) => value !== null && value !== undefined);
  return given.length ? "?" + new URLSearchParams(given) : "";
}

// At most `most` answers, the least recently used one goes first; failures are not kept.
function remember(most, make) {
  const kept = new Map();
  return (...key) => {
    const name = JSON.stringify(key);
    const found = kept.get(name) ?? make(...key);
    kept.delete(name);
    kept.set(name, found);
    if (kept.size > most) kept.delete(kept.keys().next().value);
    found.catch(() => kept.delete(name));
    return found;
  };
}

export const cohort = () => json("api/cohort");

export const mapBytes = remember(KEPT_MAPS, async (run, slide, coupling) =>
  (await ask(`api/map/${run}/${slide}` + query({ coupling }))).arrayBuffer(),
);

export const slideImage = remember(200, (slide) => json(`api/slide/${slide}`));

export const curves = remember(20, (run) => json(`api/curves/${run}`));

export const similar = remember(100, (slide, run, index) =>
  json(`api/similar/${slide}/${run}/${index}?count=12`),
);

// --- Teaching ---
export const marks = (run, window) => json(`api/marks/${run}` + query({ window }));
export const mark = (run, body) => post(`api/marks/${run}`, body);
export const turnMarks = (run, what, body) => post(`api/marks/${run}/${what}`, body);
export const saveTaught = (run) => post(`api/marks/${run}/save`, {});
export const labelFileUrl = (run) => `api/marks/${run}/patch_labels.csv`;
export const suggestions = (run) => json(`api/suggest/${run}`);

// The map by the model as it is taught now, and what is said of the slide.
export const taughtMap = remember(KEPT_MAPS, async (run, slide, version) => {
  const answer = await ask(`api/taught/${run}/${slide}`);
  const said = (name) => answer.headers.get(`x-gpmil-${name}`);
  const facts = { slide, version, calibrated: said("calibrated") === "1" };
  for (const name of ["before", "probability", "seconds"]) facts[name] = said(name);
  return { bytes: await answer.arrayBuffer(), facts };
});

export const thumbnailUrl = (run, slide, coupling) =>
  `api/thumbnail/${run}/${slide}.png` + query({ coupling });

export const patchUrl = (slide, run, index, coupling, size) =>
  `api/patch/${slide}/${run}/${index}.jpg` + query({ coupling, size });

export const geojsonUrl = (run, slide, coupling, layer) =>
  `api/qupath/${run}/${slide}.geojson` + query({ coupling, layer });
