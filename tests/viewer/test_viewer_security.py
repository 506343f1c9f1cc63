"""Who may ask the viewer what: names, token, methods, paths, headers."""

import json

import pytest
from viewer_runs import NASTY, patches, write_run

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
from fastapi.testclient import TestClient

from gpmil.viewer import cohort as cohorts
from gpmil.viewer import security
from gpmil.viewer.app import build

PATHS = ["/", "/api/cohort", "/api/map/0/0", "/api/map/0/99", "/static/none.js", "/nothing"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("viewer-security")
    (place / "secret.csv").write_text("secret")
    return write_run(place / "run", {"s": patches(9, 1), NASTY: patches(4, 2)})


def client(folder, host="127.0.0.1", token=None, name="127.0.0.1:8000", **options) -> TestClient:
    app = build(cohorts.open_cohort([folder], **options), security.door(host, token, 8000))
    return TestClient(app, base_url=f"http://{name}")


# --- Headers and methods --------------------------------------------------------------------------
@pytest.mark.parametrize("path", PATHS)
def test_every_answer_has_the_headers(folder, path):
    answers = [client(folder).get(path), client(folder).post(path), client(folder).head(path)]
    answers.append(client(folder, name="evil.example").get(path))
    answers.append(client(folder, token="t").get(path))
    for answer in answers:
        head = answer.headers
        assert "default-src 'self'" in head["content-security-policy"]
        assert "unsafe" not in head["content-security-policy"]
        assert head["x-content-type-options"] == "nosniff"
        assert head["referrer-policy"] == "no-referrer"
        assert head["cross-origin-opener-policy"] == "same-origin"
        assert head["cross-origin-resource-policy"] == "same-origin"
        assert "private" in head["cache-control"]
        assert "access-control-allow-origin" not in head


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
def test_nothing_but_reading(folder, method):
    answer = client(folder).request(method, "/api/cohort")
    assert answer.status_code == 405 and "only reads" in answer.json()["detail"]
    assert answer.headers["allow"] == "GET, HEAD"


def test_head_is_get_without_the_body(folder):
    for path in ("/api/cohort", "/api/map/0/0", "/api/health"):
        assert client(folder).head(path).status_code == 200


# --- The name of the server -----------------------------------------------------------------------
@pytest.mark.parametrize("name", ["127.0.0.1:8000", "localhost:8000", "LOCALHOST", "[::1]:8000"])
def test_own_names_are_let_in(folder, name):
    headers = {"host": name}
    assert client(folder).get("/api/health", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "name", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil", ""]
)
def test_other_names_are_not(folder, name):
    answer = client(folder).get("/api/cohort", headers={"host": name})
    assert answer.status_code == 400 and "does not go by that name" in answer.json()["detail"]


def test_beyond_this_computer_numbers_are_let_in_but_names_are_not(folder):
    own = client(folder, host="0.0.0.0", token="right")
    for name, status in (("10.1.2.3:8000", 200), ("evil.example", 400)):
        answer = own.get("/api/health?token=right", headers={"host": name})
        assert answer.status_code == status
    only = client(folder, host="10.1.2.3", token="right")
    assert only.get("/api/health?token=right", headers={"host": "10.9.9.9"}).status_code == 400


# --- The token ------------------------------------------------------------------------------------
def test_beyond_this_computer_there_is_always_a_token():
    for host in ("0.0.0.0", "::", "10.1.2.3", "example.org"):
        made = [security.door(host).token for _ in range(2)]
        assert len(made[0]) >= 24 and made[0] != made[1]
    assert security.door("127.0.0.1").token is None
    assert security.door("::1").token is None and security.door("localhost").token is None
    assert security.door("127.0.0.1", "given").token == "given"


def test_the_token_opens_once_and_the_cookie_from_then_on(folder):
    own = client(folder, host="0.0.0.0", token="rIght-token")
    for path in PATHS:
        answer = own.get(path)
        assert answer.status_code == 401 and "token is missing" in answer.json()["detail"]
    for wrong in ("", "x", "right-token", "rIght-token%00", "rIght-toke", "%C3%A9"):
        answer = own.get(f"/api/cohort?token={wrong}")
        assert answer.status_code == 401 and "set-cookie" not in answer.headers
    answer = own.get("/?token=rIght-token")
    kept = answer.headers["set-cookie"]
    assert "HttpOnly" in kept and "SameSite=Strict" in kept and kept.startswith("gpmil-8000=")
    assert own.get("/api/cohort").status_code == 200  # the client keeps cookies, as a browser does
    own.cookies.clear()
    assert own.get("/api/cohort").status_code == 401
    for cookie in ("gpmil-8000=wrong", "gpmil-9000=rIght-token", "=;;", 'gpmil-8000="'):
        assert own.get("/api/cohort", headers={"cookie": cookie}).status_code == 401


def test_a_token_may_be_asked_for_on_this_computer(folder):
    assert client(folder, token="t").get("/api/cohort").status_code == 401
    assert client(folder, token="t").get("/api/cohort?token=t").status_code == 200


# --- Paths ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2fapp.py",
        "/static/..%5capp.py",
        "/static//etc/passwd",
        "/static/%2fetc%2fpasswd",
        "/static/....//app.py",
        "/..%2f..%2fetc/passwd",
        "/api/map/0/..%2f..%2fsecret.csv",
        "/api/map/0/0?coupling=..%2f..",
        "/api/map/..%2f/0",
        "/api/tiles/..%2fsecret_files/0/0_0.jpeg",
        "/api/thumbnail/0/%00.png",
    ],
)
def test_no_way_out_of_the_folders(folder, path):
    answer = client(folder).get(path)
    assert answer.status_code == 404 and set(answer.json()) == {"detail"}
    assert "secret" not in answer.text.replace("secret_files", "") and "root:" not in answer.text


def test_a_link_out_of_the_run_is_not_followed(tmp_path):
    folder = write_run(tmp_path / "run", {"s": patches(9, 1), "inside": patches(9, 1)})
    outside = (folder / "patches" / "s.csv.gz").rename(tmp_path / "elsewhere.csv.gz")
    (folder / "patches" / "s.csv.gz").symlink_to(outside)
    (folder / "patches" / "kept.gz").write_bytes(outside.read_bytes())
    (folder / "patches" / "inside.csv.gz").unlink()
    (folder / "patches" / "inside.csv.gz").symlink_to(folder / "patches" / "kept.gz")
    own = client(folder)
    for path in ("map/0/0", "thumbnail/0/0.png", "qupath/0/0.geojson"):
        answer = own.get(f"/api/{path}")
        assert answer.status_code == 404 and "link out of its folder" in answer.json()["detail"]
    assert own.get("/api/map/0/1").status_code == 200
    (tmp_path / "metrics.json").write_text(json.dumps({"slides": {"metrics": {"auc": None}}}))
    (folder / "metrics.json").symlink_to(tmp_path / "metrics.json")
    assert own.get("/api/curves/0").status_code == 404


def test_a_run_that_is_itself_a_link_is_shown(tmp_path):
    folder = write_run(tmp_path / "run", {"s": patches(9, 1)})
    (tmp_path / "link").symlink_to(folder)
    assert client(tmp_path / "link").get("/api/map/0/0").status_code == 200


def test_a_coupling_in_a_table_is_no_path(tmp_path):
    folder = write_run(tmp_path / "run", {"s": patches(4, 1)}, couplings=("0",))
    table = folder / "predictions.csv"
    table.write_text(table.read_text().replace(",0,", ",0/../../../secret,", 1))
    with pytest.raises(ValueError, match=r"predictions.csv: .* in column 'coupling'.*by hand"):
        client(folder)


def test_a_name_that_is_a_script_stays_text(folder):
    own = client(folder)
    answer = own.get("/api/cohort")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["columns"]["name"] == ["s", NASTY]
    assert own.get("/api/thumbnail/0/1.png").headers["content-type"] == "image/png"
    said = own.get("/api/slide/1")
    assert said.headers["content-type"] == "application/json" and NASTY in said.json()["detail"]
