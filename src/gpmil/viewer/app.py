"""The routes of the viewer; those that write are in lessons.py.

Slides and runs are named by their numbers in /api/cohort: no file name ever comes from the client.
"""

import gzip
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from anyio.to_thread import current_default_thread_limiter
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from gpmil import __version__
from gpmil.viewer import cohort as cohorts
from gpmil.viewer import lessons, maps
from gpmil.viewer.classes import slide_classes
from gpmil.viewer.cohort import Missing, ShownCohort
from gpmil.viewer.maps import Maps, PatchMap
from gpmil.viewer.security import App, Door, Guard
from gpmil.viewer.similar import Similar
from gpmil.viewer.store import Store
from gpmil.viewer.teach import Refused
from gpmil.viewer.tiles import Tiles

logger = logging.getLogger("gpmil")

STATIC = Path(__file__).parent / "static"
THUMBNAILS = 30_000_000  # bytes that are kept
MOST_SIMILAR, LARGEST_PATCH = 100, 2048
THREADS = 8


def build(cohort: ShownCohort, entrance: Door) -> App:
    """The application, guarded."""
    return Guard(routes(cohort), entrance)


def routes(cohort: ShownCohort) -> FastAPI:
    """All routes over one cohort."""
    app = FastAPI(
        title="gpmil", docs_url=None, redoc_url=None, openapi_url=None, lifespan=_few_threads
    )
    found, tiles = Maps(cohort), Tiles(cohort)
    similar = Similar(cohort, found)
    _page(app)
    _cohort(app, cohort, similar.possible)
    _patches(app, found)
    _slides(app, cohort, found, tiles)
    _questions(app, cohort, found, tiles, similar)
    lessons.routes(app, cohort, found)
    _errors(app)
    return app


@asynccontextmanager
async def _few_threads(app: FastAPI) -> AsyncIterator[None]:
    """More threads than cores answer no sooner, and each keeps memory of its own."""
    current_default_thread_limiter().total_tokens = THREADS
    yield


def _get(app: FastAPI, path: str) -> Any:
    return app.api_route(path, methods=["GET", "HEAD"], response_model=None)


# --- Page and cohort ------------------------------------------------------------------------------
def _page(app: FastAPI) -> None:
    files = StaticFiles(directory=STATIC, check_dir=False)
    app.mount("/static", files)

    @_get(app, "/")
    async def index(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    @_get(app, "/api/health")
    def health() -> dict[str, bool]:
        return {"ok": True}


def _cohort(app: FastAPI, cohort: ShownCohort, similar: bool) -> None:
    told = cohorts.as_json(cohort, similar)
    told["classes"] = [slide_classes(run, cohort.names) for run in cohort.runs]
    plain = json.dumps(told, separators=(",", ":"), allow_nan=False).encode()
    packed = gzip.compress(plain, 6, mtime=0)

    @_get(app, "/api/cohort")
    def columns(request: Request) -> Response:
        fits = "gzip" in request.headers.get("accept-encoding", "")
        head = {"vary": "accept-encoding"} | ({"content-encoding": "gzip"} if fits else {})
        return Response(packed if fits else plain, headers=head, media_type="application/json")


# --- Maps -----------------------------------------------------------------------------------------
def _patches(app: FastAPI, found: Maps) -> None:
    pictures: Store[bytes] = Store(THUMBNAILS, len)

    @_get(app, "/api/map/{run}/{slide}")
    def patch_map(request: Request, run: int, slide: int, coupling: str | None = None) -> Response:
        own = found.get(run, slide, coupling)
        if (known := _unchanged(request, own)) is not None:
            return known
        return Response(maps.encode(own), 200, _tagged(own), "application/octet-stream")

    @_get(app, "/api/thumbnail/{run}/{slide}.png")
    def thumbnail(request: Request, run: int, slide: int, coupling: str | None = None) -> Response:
        own = found.get(run, slide, coupling)
        if (known := _unchanged(request, own)) is not None:
            return known
        png = pictures.get(own.tag, lambda: maps.thumbnail(own))
        return Response(png, 200, _tagged(own), "image/png")


def _tagged(own: PatchMap) -> dict[str, str]:
    return {"etag": f'"{__version__}-{own.tag}"'}


def _unchanged(request: Request, own: PatchMap) -> Response | None:
    """304 where the browser has the same content."""
    tags = [tag.strip() for tag in request.headers.get("if-none-match", "").split(",")]
    headers = _tagged(own)
    return Response(status_code=304, headers=headers) if headers["etag"] in tags else None


# --- Slides ---------------------------------------------------------------------------------------
def _slides(app: FastAPI, cohort: ShownCohort, found: Maps, tiles: Tiles) -> None:
    @_get(app, "/api/slide/{slide}")
    def describe(slide: int) -> dict[str, Any]:
        info = tiles.scan(slide).info
        scale, note = _fit(cohort, found, slide, info)
        return {
            "width": info.size[0],
            "height": info.size[1],
            "mpp": None if info.mpp is None else info.mpp[0],
            "scale": scale[0],
            "scales": list(scale),
            "offset": [0, 0],  # positions count from the corner of the whole canvas, as tiles do
            "note": note,
            "tiles": f"/api/tiles/{slide}.dzi",
        }

    @_get(app, "/api/tiles/{slide}.dzi")
    def dzi(slide: int) -> Response:
        return Response(tiles.dzi(slide), media_type="application/xml")

    @_get(app, "/api/tiles/{slide}_files/{level}/{column}_{row}.jpeg")
    def tile(slide: int, level: int, column: int, row: int) -> Response:
        return Response(tiles.tile(slide, level, column, row), media_type="image/jpeg")


def _fit(cohort: ShownCohort, found: Maps, slide: int, info: Any) -> tuple[maps.Pair, str | None]:
    """From positions to pixels by the first run with patches, and what is odd about them."""
    for run in range(len(cohort.runs)):
        try:
            own = found.get(run, slide)
            scale = maps.scales(own, info)
        except Missing as error:
            logger.debug("%s", error)
            continue
        left, top, right, bottom = maps.bounds(own)
        over = right * scale[0] > info.size[0] + own.sides[0] * scale[0]
        over |= bottom * scale[1] > info.size[1] + own.sides[1] * scale[1]
        if over or right <= 0 or bottom <= 0:
            return scale, (
                f"patches lie at x {left:g} to {right:g}, y {top:g} to {bottom:g}, outside the "
                f"slide file of {info.size[0]} x {info.size[1]} pixels: another slide, or other "
                "units?"
            )
        return scale, None
    return (1.0, 1.0), None


# --- One patch, one run ---------------------------------------------------------------------------
def _questions(
    app: FastAPI, cohort: ShownCohort, found: Maps, tiles: Tiles, similar: Similar
) -> None:
    @_get(app, "/api/patch/{slide}/{run}/{index}.jpg")
    def patch(
        slide: int, run: int, index: int, coupling: str | None = None, size: int = 256
    ) -> Response:
        info = tiles.scan(slide).info
        own = found.get(run, slide, coupling)
        _check_patch(own, index)
        scale = maps.scales(own, info)
        corner = own.corners[index] * scale
        sides = own.sides[0] * scale[0], own.sides[1] * scale[1]
        longest = min(max(size, 1), LARGEST_PATCH)
        jpeg = tiles.patch(slide, (float(corner[0]), float(corner[1])), sides, longest)
        return Response(jpeg, media_type="image/jpeg")

    @_get(app, "/api/similar/{slide}/{run}/{index}")
    def alike(
        slide: int, run: int, index: int, count: int = 12, same_slide: int = 1
    ) -> dict[str, Any]:
        _check_patch(found.get(run, slide), index)
        count = min(max(count, 1), MOST_SIMILAR)
        return {"patches": similar.nearest(run, slide, index, count, bool(same_slide))}

    @_get(app, "/api/curves/{run}")
    def judged(run: int, coupling: str | None = None) -> dict[str, Any]:
        from gpmil.viewer import curves  # half of the time to start, for a page asked for later

        return curves.curves(cohort.run(run), coupling)

    @_get(app, "/api/qupath/{run}/{slide}.geojson")
    def geojson(run: int, slide: int, coupling: str | None = None, layer: str = "all") -> Response:
        if layer not in ("all", "flagged"):
            raise Missing(f"there is no layer {layer!r}: expected all or flagged.")
        name = cohort.slide(slide)
        info = tiles.scan(slide).info if name in cohort.files else None
        pieces = maps.geojson(found.get(run, slide, coupling), info, layer == "flagged")
        file = quote(f"{name}.geojson", safe="")
        return StreamingResponse(
            pieces,
            headers={"content-disposition": f"attachment; filename*=UTF-8''{file}"},
            media_type="application/geo+json",
        )


def _check_patch(own: PatchMap, index: int) -> None:
    if not 0 <= index < len(own):
        raise Missing(f"there is no patch {index}: there are {len(own)}, counted from 0.")


# --- Errors ---------------------------------------------------------------------------------------
def _errors(app: FastAPI) -> None:
    """Every error is JSON with one readable line."""

    @app.exception_handler(Missing)
    def missing(request: Request, error: Missing) -> Response:
        return JSONResponse({"detail": " ".join(str(error).split())}, 404)

    @app.exception_handler(Refused)
    def refused(request: Request, error: Refused) -> Response:
        return JSONResponse({"detail": " ".join(str(error).split())}, 409)

    @app.exception_handler(RequestValidationError)
    def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return JSONResponse({"detail": f"{first['loc'][-1]}: {first['msg']}."}, 404)

    @app.exception_handler(HTTPException)
    def http(request: Request, error: HTTPException) -> Response:
        detail = "there is no such page." if error.status_code == 404 else str(error.detail)
        return JSONResponse({"detail": detail}, error.status_code)

    @app.exception_handler(Exception)
    def failed(request: Request, error: Exception) -> Response:
        logger.error("the viewer could not answer %s", request.url.path, exc_info=error)
        return JSONResponse({"detail": "the server failed; its terminal says why."}, 500)
