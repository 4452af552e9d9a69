"""API keys: authentication, tenants with their weights, priorities of requests."""

import hashlib
from pathlib import Path

import pytest

from services.common.errors import SettingsError
from services.gateway.keys import ApiKeys, Tenant
from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.fakes import say

DIGEST = hashlib.sha256(b"sk-right").hexdigest()
RIGHT = "Bearer sk-right"


async def test_api_keys(open_site: OpenSite, tmp_path: Path) -> None:
    digest = hashlib.sha256(b"sk-right").hexdigest()
    file = tmp_path / "keys"
    file.write_text(f"# keys\n{digest} team-a\n")
    site: Site = await open_site(keys=ApiKeys.load(file))
    site.worker.script = say(5)
    for headers in ({}, {"authorization": "Bearer sk-wrong"}, {"authorization": "sk-right"}):
        response = await site.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert (await site.http.get("/v1/models", headers=headers)).status_code == 401
    right = {"authorization": "Bearer sk-right"}
    response = await site.http.post("/v1/completions", json={"prompt": "x"}, headers=right)
    assert response.status_code == 200
    placed = site.router.places[0]
    assert (placed.tenant, placed.weight, placed.priority) == (Tenant("team-a").id, 1, 0)
    assert "team-a" not in placed.model_dump_json(), "routers get a hash of the name"
    for path in ("/health", "/ready", "/metrics", "/version"):
        assert (await site.http.get(path)).status_code == 200


@pytest.mark.parametrize(
    "content",
    [
        "",
        "# none\n",
        "not-a-hash\n",
        f"{DIGEST} name weight=0\n",
        f"{DIGEST} name weight=1001\n",
        f"{DIGEST} name share=2\n",
        f"{DIGEST} name priority=101\n",
        f"{DIGEST} name priority=-101\n",
        f"{DIGEST} name priority=high\n",
        f"{DIGEST} name priority=1 weight=2\n",
        f"{DIGEST} a weight=2\n{'0' * 64} a weight=3\n",
    ],
)
def test_invalid_key_file_is_a_settings_error(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(SettingsError):
        ApiKeys.load(file)


@pytest.mark.parametrize(
    ("line", "tenant"),
    [
        (DIGEST, Tenant(f"key-{DIGEST[:8]}", 1)),
        (f"{DIGEST} team-a # comment", Tenant("team-a", 1)),
        (f"{DIGEST} team-a weight=10", Tenant("team-a", 10)),
        (f"{DIGEST} weight=10", Tenant(f"key-{DIGEST[:8]}", 10)),
    ],
)
def test_key_file_gives_names_and_weights(tmp_path: Path, line: str, tenant: Tenant) -> None:
    file = tmp_path / "keys"
    file.write_text(line)
    assert ApiKeys.load(file).tenant(RIGHT) == tenant


def test_keys_with_the_same_name_are_one_tenant(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    second = hashlib.sha256(b"sk-second").hexdigest()
    file.write_text(f"{DIGEST} team-a weight=2\n{second} team-a weight=2\n")
    keys = ApiKeys.load(file)
    assert keys.tenant(RIGHT) == keys.tenant("Bearer sk-second") == Tenant("team-a", 2)


async def test_weight_and_priority_travel_to_the_router(open_site: OpenSite) -> None:
    keys = ApiKeys({hashlib.sha256(b"sk-right").digest(): Tenant("team-a", 7)})
    site: Site = await open_site(keys=keys)
    site.worker.script = say(5)
    for priority in (-3, 0, 3):
        body = {"prompt": "x", "priority": priority}
        await site.http.post("/v1/completions", json=body, headers={"authorization": RIGHT})
    assert [call.weight for call in site.router.places] == [7, 7, 7]
    assert [call.priority for call in site.router.places] == [3, 0, -3], "lower values are first"


async def test_priority_is_limited_by_the_key(open_site: OpenSite, tmp_path: Path) -> None:
    """Two keys of one tenant have different limits."""
    file = tmp_path / "keys"
    other = hashlib.sha256(b"sk-other").hexdigest()
    file.write_text(f"{DIGEST} team priority=5\n{other} team weight=1 priority=-2\n")
    site: Site = await open_site(keys=ApiKeys.load(file))
    site.worker.script = say(5)
    for key in ("sk-right", "sk-other"):
        for priority in (-100, 0, 7, None):
            headers = {"authorization": f"Bearer {key}"}
            body = {"prompt": "x", "priority": priority}
            await site.http.post("/v1/completions", json=body, headers=headers)
    assert [-call.priority for call in site.router.places] == [5, 5, 7, 5, -2, 0, 7, 0]
    assert len({call.tenant for call in site.router.places}) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", -100), ("team priority=0", 0), ("weight=2 priority=-7", -7), ("priority=100", 100)],
)
def test_key_has_its_priority(tmp_path: Path, text: str, expected: int) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{DIGEST} {text}\n")
    tenant = ApiKeys.load(file).tenant(RIGHT)
    assert tenant is not None
    assert tenant.first_priority == expected


@pytest.mark.parametrize("priority", [-101, 101, 1.5, "high"])
async def test_invalid_priority_is_400(site: Site, priority: object) -> None:
    response = await site.http.post("/v1/completions", json={"prompt": "x", "priority": priority})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "priority"
