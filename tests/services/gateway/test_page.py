"""The files of the live page: headers, caching, no inline code, nothing from other hosts."""

import re
from importlib.resources import files
from pathlib import Path

import pytest

from tests.services.gateway.conftest import OpenSite, Site

PAGE = files("services.gateway") / "page"
NAMES = sorted(file.name for file in PAGE.iterdir())


async def test_page_is_served_with_a_strict_content_policy(site: Site) -> None:
    response = await site.http.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"].split("; ")
    assert policy[0] == "default-src 'none'"
    assert "unsafe" not in str(policy)
    assert {"script-src 'self'", "connect-src 'self'", "frame-ancestors 'none'"} <= set(policy)
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"


async def test_every_file_is_served_and_revalidated(site: Site) -> None:
    assert {"index.html", "style.css", "app.js", "icon.svg"} <= set(NAMES)
    for name in NAMES:
        path = "/" if name == "index.html" else f"/page/{name}"
        first = await site.http.get(path)
        assert (first.status_code, first.content) == (200, (PAGE / name).read_bytes())
        assert first.headers["cache-control"] == "no-cache"
        etag = first.headers["etag"]
        for given in (etag, f"W/{etag}", f'"other", {etag}'):
            again = await site.http.get(path, headers={"if-none-match": given})
            assert (again.status_code, again.content) == (304, b"")
        changed = await site.http.get(path, headers={"if-none-match": '"other"'})
        assert changed.status_code == 200
        head = await site.http.head(path)
        assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", etag)


@pytest.mark.parametrize("path", ["/page/index.html", "/page/absent.js", "/page/..%2flive.py"])
async def test_other_paths_are_not_found(site: Site, path: str) -> None:
    response = await site.http.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_page_can_be_turned_off_and_is_not_documented(open_site: OpenSite) -> None:
    site: Site = await open_site(page=False)
    for path in ("/", "/page/app.js", "/page/state"):
        assert (await site.http.get(path)).status_code == 404
    on: Site = await open_site()
    documents = [(await s.http.get("/openapi.json")).json() for s in (site, on)]
    assert documents[0] == documents[1]


def test_files_refer_to_each_other_and_to_the_gateway_only() -> None:
    """References are relative, so that the page also works below a path of a proxy."""
    routes = {"../", "../openapi.json", "metrics"}
    for name in NAMES:
        text = (PAGE / name).read_text()
        urls = set(re.findall(r"https?://[^\s\"']+", text))
        assert urls <= {"http://www.w3.org/2000/svg"}, name
        references = re.findall(r"""(?:from |import |src=|href=|\burl\()["']([^"']+)["']""", text)
        references += re.findall(r"\burl\((?![\"'])([^)]+)\)", text)
        for reference in references:
            if not reference.startswith("#") and reference not in routes:
                target = reference.removeprefix("page/").removeprefix("./")
                assert target in NAMES, (name, reference)


def test_images_of_the_documentation_exist_and_are_small() -> None:
    document = Path(str(PAGE)).parent / "PAGE.md"
    images = re.findall(r"!\[[^\]]+\]\(([^)]+\.png)\)", document.read_text())
    assert images
    for image in images:
        assert (document.parent / image).stat().st_size < 150_000


def test_html_has_no_inline_code_and_scripts_insert_no_html() -> None:
    for name in NAMES:
        if name.endswith(".html"):
            text = (PAGE / name).read_text()
            assert not re.search(r"\son\w+=|<style|style=|<script(?![^>]*src=)", text)
        if name.endswith(".js"):
            text = (PAGE / name).read_text()
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|eval\(|localStorage", text
            )
