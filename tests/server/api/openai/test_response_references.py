"""Input that names stored items instead of repeating them."""

from __future__ import annotations

import pytest

from server.api.openai.responses.items import ID_PREFIX, ItemReference, Json, Note
from server.api.openai.responses.stored import MAX_RESPONSES, ResponseTurn, referred
from server.errors import InvalidRequest
from tests.server.api.openai.responding import PROMPT, ask, asked, error_of, get, text_of
from tests.server.harness import Running, running

pytestmark = pytest.mark.process

HI = {"role": "user", "content": "hi"}


def reference(id: str) -> dict[str, str]:
    return {"type": "item_reference", "id": id}


async def test_items_of_input_and_output_are_read_by_their_names(server: Running) -> None:
    first = await asked(server)
    (said,) = first["output"]
    (question,) = (await get(server, first["id"], "/input_items")).json()["data"]
    items = [reference(question["id"]), {"id": said["id"]}, HI]
    second = await asked(server, input=items)
    spelled = f"{PROMPT}{text_of(first).strip()}\n\n{PROMPT}"
    assert second["usage"]["input_tokens"] == len(spelled.encode())
    listed = (await get(server, second["id"], "/input_items", order="asc")).json()["data"]
    assert listed[:2] == [question, said]


async def test_reference_to_a_reference_is_resolved(server: Running) -> None:
    first = await asked(server)
    named = reference(first["output"][0]["id"])
    second = await asked(server, input=[HI, named, HI])
    third = await asked(server, input="hi", previous_response_id=second["id"], instructions="x")
    assert third["usage"]["input_tokens"] > second["usage"]["total_tokens"]


@pytest.mark.parametrize("id", ["msg_1", f"msg_{'0' * 48}_0", f"fc_{'0' * 48}_in_3"])
async def test_unknown_item_is_a_400_with_its_index(server: Running, id: str) -> None:
    answer = await ask(server, input=[HI, reference(id)])
    assert await error_of(answer) == (400, "invalid_value", "input[1].id")
    assert id in answer.json()["error"]["message"]


async def test_item_of_an_unstored_or_deleted_response_is_unknown(server: Running) -> None:
    loose, gone = await asked(server, store=False), await asked(server)
    await server.http.delete(f"/v1/responses/{gone['id']}")
    for response in (loose, gone):
        answer = await ask(server, input=[reference(response["output"][0]["id"])])
        assert await error_of(answer) == (400, "invalid_value", "input[0].id")


async def test_item_of_another_tenant_is_unknown() -> None:
    async with running(api_keys=["a" * 32, "b" * 32]) as server:
        server.http.headers["authorization"] = f"Bearer {'a' * 32}"
        (said,) = (await asked(server))["output"]
        server.http.headers["authorization"] = f"Bearer {'b' * 32}"
        answer = await ask(server, input=[reference(said["id"])])
        assert await error_of(answer) == (400, "invalid_value", "input[0].id")


async def test_one_input_reads_a_bounded_number_of_responses_each_once() -> None:
    read: list[str] = []

    async def nothing() -> list[Json]:
        return []

    async def find(id: str) -> ResponseTurn:
        read.append(id)
        return ResponseTurn(Note(id, {}, [{"id": f"msg_{id.removeprefix(ID_PREFIX)}_0"}]), nothing)

    given = [ItemReference(id=f"msg_{index:048x}_0") for index in range(MAX_RESPONSES)]
    found = await referred(find, [*given, *given])
    assert found.keys() == {item.id for item in given}
    assert len(read) == MAX_RESPONSES
    one_more = ItemReference(id=f"msg_{MAX_RESPONSES:048x}_0")
    with pytest.raises(InvalidRequest) as refused:
        await referred(find, [*given, one_more])
    assert refused.value.param == f"input[{MAX_RESPONSES}].id"


async def test_input_without_anything_to_read_is_refused(server: Running) -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": []}
    answer = await ask(server, input=[thought])
    assert await error_of(answer) == (400, "invalid_value", "input")
    response = await asked(server, input=[thought, HI])
    assert response["usage"]["input_tokens"] == len(PROMPT)
