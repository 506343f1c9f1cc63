"""The routes by which the viewer is taught: marks, undo and redo, taught maps, saving.

What changes something is a POST with a JSON body, which the guard lets in from this page alone.
"""

import time
from typing import Annotated, Any

from fastapi import Body, FastAPI
from fastapi.responses import Response

from gpmil.runs.marks import LABELS
from gpmil.viewer import maps
from gpmil.viewer.cohort import Missing, ShownCohort
from gpmil.viewer.maps import Maps
from gpmil.viewer.teach import LABEL_FILE, Refused, Teacher

LONGEST_WINDOW = 40

Said = Annotated[dict[str, Any], Body()]


def routes(app: FastAPI, cohort: ShownCohort, found: Maps) -> None:
    """All of them."""
    teachers = {k: Teacher(cohort, k, found) for k in range(len(cohort.runs))}

    def teacher(run: int) -> Teacher:
        if run not in teachers:
            raise Missing(f"there is no run {run}: there are {len(teachers)}, counted from 0.")
        return teachers[run]

    @app.get("/api/marks/{run}", response_model=None)
    def marks(run: int, window: str = "") -> dict[str, Any]:
        return teacher(run).as_json(teacher(run).history(), window)

    @app.post("/api/marks/{run}", response_model=None)
    def mark(run: int, said: Said) -> dict[str, Any]:
        who, window = text(said, "who"), text(said, "window")
        slide, label = number(said, "slide"), number(said, "label")
        indices = said.get("indices")
        if not isinstance(indices, list) or not all(type(i) is int for i in indices):
            raise Refused("expected indices of patches.")
        if label not in LABELS:
            raise Refused("expected a label 1, 0 or -1.")
        history = teacher(run).mark(slide, indices, label, who, window)
        return teacher(run).as_json(history, window)

    @app.post("/api/marks/{run}/{what}", response_model=None)
    def turn(run: int, what: str, said: Said) -> dict[str, Any]:
        if what == "save":
            return teacher(run).save()
        if what not in ("undo", "redo"):
            raise Missing("there is no such page.")
        window = text(said, "window")
        history = teacher(run).turn(what, text(said, "who"), window)
        return teacher(run).as_json(history, window)

    _answers(app, teacher)


def _answers(app: FastAPI, teacher: Any) -> None:
    @app.get(f"/api/marks/{{run}}/{LABEL_FILE}", response_model=None)
    def labels(run: int) -> Response:
        head = {"content-disposition": f"attachment; filename={LABEL_FILE}"}
        return Response(teacher(run).label_file(), headers=head, media_type="text/csv")

    @app.get("/api/suggest/{run}", response_model=None)
    def suggest(run: int) -> dict[str, Any]:
        return teacher(run).suggest()

    @app.get("/api/taught/{run}/{slide}", response_model=None)
    def taught(run: int, slide: int) -> Response:
        start = time.perf_counter()
        drawn, facts = teacher(run).map(slide)
        facts["x-gpmil-seconds"] = f"{time.perf_counter() - start:.3f}"
        return Response(maps.encode(drawn), 200, facts, "application/octet-stream")


def text(said: dict[str, Any], name: str) -> str:
    """A short text of a request."""
    found = said.get(name, "")
    if not isinstance(found, str) or (name == "window" and len(found) > LONGEST_WINDOW):
        raise Refused(f"expected a short text as {name}.")
    return found


def number(said: dict[str, Any], name: str) -> int:
    """A whole number of a request."""
    found = said.get(name)
    if type(found) is not int:
        raise Refused(f"expected a number as {name}.")
    return found
