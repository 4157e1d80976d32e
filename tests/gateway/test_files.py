"""Files over HTTP, with the official client where it matters."""

from __future__ import annotations

import io
from typing import Any

import httpx
import openai
import pytest

from gateway.filestore import PIECE_BYTES, Files

pytestmark = pytest.mark.redis


async def upload(http: httpx.AsyncClient, content: bytes, **fields: Any) -> httpx.Response:
    headers = fields.pop("headers", None)
    form = {"purpose": "batch", **fields}
    return await http.post("/v1/files", files={"file": ("in.jsonl", content)}, data=form, headers=headers)


async def test_a_files_life(gateway: Any, db: Any) -> None:
    content = b"line\n" * (PIECE_BYTES // 2)
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as client:
        made = await client.files.create(
            file=("in.jsonl", io.BytesIO(content)),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        assert (made.bytes, made.filename, made.purpose, made.object) == (
            len(content), "in.jsonl", "batch", "file",
        )  # fmt: skip
        assert made.expires_at is not None
        assert 3590 <= made.expires_at - made.created_at <= 3610
        assert await client.files.retrieve(made.id) == made
        assert (await client.files.content(made.id)).content == content
        other = await client.files.create(file=("b.jsonl", b"x"), purpose="user_data")
        assert [file.id async for file in client.files.list()] == [other.id, made.id]
        assert [file.id async for file in client.files.list(limit=1, order="asc")] == [made.id, other.id]
        assert [file.id async for file in client.files.list(purpose="batch")] == [made.id]
        for key in await db.keys("hr:{files}*"):
            assert await db.pttl(key) > 0, key
        for file in (made, other):
            assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(made.id)
        assert await db.keys("hr:{files}*") == []


async def test_ceilings(start_gateway: Any, db: Any) -> None:
    gateway = await start_gateway(max_file_bytes=1000, max_tenant_bytes=2500)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as http:
        large = await upload(http, b"x" * 1001)
        assert (large.status_code, large.json()["error"]["code"]) == (413, "too_large")
        assert (await upload(http, b"x" * 100_000)).status_code == 413
        for _ in range(2):
            assert (await upload(http, b"x" * 1000)).status_code == 200
        assert (await upload(http, b"x" * 1000)).status_code == 413
        assert (await upload(http, b"x" * 500)).status_code == 200
    assert len(await db.keys("hr:{files}:data:*")) == 3


@pytest.mark.parametrize(
    ("form", "param"),
    [({"purpose": "fine-tune"}, "purpose"), ({"expires_after[seconds]": "x"}, "expires_after[seconds]")],
)
async def test_refusals(http: httpx.AsyncClient, form: dict[str, str], param: str) -> None:
    response = await upload(http, b"x", **form)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_body_that_is_no_form(http: httpx.AsyncClient) -> None:
    bodies: list[dict[str, Any]] = [{"json": {}}, {"content": b"x"}, {"data": {"purpose": "batch"}}]
    for options in bodies:
        response = await http.post("/v1/files", **options)
        assert response.status_code == 400, response.text


async def test_tenants_see_their_own(start_gateway: Any) -> None:
    gateway = await start_gateway(api_keys=("a:key-a", "b:key-b"))
    mine, theirs = ({"Authorization": f"Bearer key-{name}"} for name in "ab")
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as http:
        file_id = (await upload(http, b"x", headers=mine)).json()["id"]
        assert (await http.get(f"/v1/files/{file_id}/content", headers=mine)).content == b"x"
        for path in (file_id, f"{file_id}/content"):
            assert (await http.get(f"/v1/files/{path}", headers=theirs)).status_code == 404
        assert (await http.delete(f"/v1/files/{file_id}", headers=theirs)).status_code == 404
        assert (await http.get("/v1/files", headers=theirs)).json()["data"] == []


async def test_lines_from_any_offset(http: httpx.AsyncClient, db: Any) -> None:
    lines = [b"x" * (7 * index) for index in range(1, 500)] + ["Ω\r".encode()]
    content = b"\n\n".join(lines)
    files = Files(db)
    file_id = (await upload(http, content)).json()["id"]
    found = [pair async for pair in files.lines(file_id)]
    assert [line for line, _ in found] == lines
    for index in (0, 100, 498):
        rest = [pair async for pair in files.lines(file_id, found[index][1])]
        assert rest == found[index + 1 :]
