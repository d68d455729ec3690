"""The sandbox in its process: what templates get, and what they do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from server.chat.renderer import Renderer
from server.errors import InvalidRequest

pytestmark = pytest.mark.process

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
async def renderer() -> AsyncIterator[Renderer]:
    made = Renderer(timeout_s=120, max_chars=1000, clock=lambda: 86_400.0)
    yield made
    await made.close()


async def text_of(renderer: Renderer, source: str, **variables: object) -> str:
    return (await renderer.render(source, variables)).text


async def said(renderer: Renderer, source: str, **variables: object) -> str:
    with pytest.raises(InvalidRequest) as refused:
        await renderer.render(source, variables)
    assert refused.value.param == "messages"
    return refused.value.message.removeprefix("messages: the model's chat template says: ")


async def test_templates_are_read_as_their_authors_tools_read_them(renderer: Renderer) -> None:
    source = """\
{% for message in messages %}
    {% if loop.index0 == 2 %}{% break %}{% endif %}
[{{ message.role }}] {{ message['content'] | trim }}
{% endfor %}
{% generation %}{{ x | tojson }}{% endgeneration %} {{ strftime_now('%Y-%m-%d') }}"""
    messages = [{"role": role, "content": f" <{role}> "} for role in ("user", "tool", "late")]
    text = await text_of(renderer, source, messages=messages, x={"é": "<&'"})
    assert text == '[user] <user>\n[tool] <tool>\n{"é": "<&\'"} 1970-01-02'


async def test_json_may_be_indented_and_plain_ascii(renderer: Renderer) -> None:
    source = "{{ x | tojson(indent=1) }}{{ x | tojson(ensure_ascii=True, sort_keys=True) }}"
    text = await text_of(renderer, source, x={"b": "é", "a": 1})
    assert text == '{\n "b": "é",\n "a": 1\n}{"a": 1, "b": "\\u00e9"}'


async def test_error_raised_by_a_template_is_returned(renderer: Renderer) -> None:
    assert await said(renderer, "{{ raise_exception('no é') }}") == "no é"
    assert (
        await said(renderer, "{% for %}")
        == "line 1: Expected an expression, got 'end of statement block'"
    )
    assert (await said(renderer, "{{ 1 // 0 }}")).startswith("ZeroDivisionError")
    assert "'nothing' is undefined" in await said(renderer, "{{ nothing.at.all }}")
    assert len(await said(renderer, "{{ raise_exception('a' * 100000) }}")) == 1000


@pytest.mark.parametrize(
    "source",
    [
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ x.append(3) }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
async def test_sandbox_cannot_be_escaped(renderer: Renderer, source: str) -> None:
    assert await said(renderer, source, x=[1])


async def test_endless_template_ends_only_its_process() -> None:
    renderer = Renderer(timeout_s=2)
    try:
        assert await said(renderer, ENDLESS) == "it takes longer than 2 seconds"
        renderer._timeout_s = 120
        assert await text_of(renderer, "{{ x }}", x=1) == "1"
        renderer._timeout_s = 2
        assert await said(renderer, "{{ 10 ** (10 ** 10) }}") == "it takes longer than 2 seconds"
    finally:
        await renderer.close()


async def test_output_and_memory_are_bounded(renderer: Renderer) -> None:
    assert await text_of(renderer, "{{ 'a' * 1000 }}") == "a" * 1000
    assert await said(renderer, "{{ 'a' * 1001 }}") == "it writes more than 1000 characters"
    assert await said(renderer, "{{ 'a' * 10**12 }}") == "it needs too much memory"
    long = "{% for i in range(2000) %}a{% endfor %}"
    assert await said(renderer, long) == "it writes more than 1000 characters"
    assert "Range too big" in await said(renderer, "{{ range(10**9) }}")


async def test_template_writes_twice_what_it_is_given_and_some_of_its_own() -> None:
    renderer = Renderer(timeout_s=120)
    try:
        own = await text_of(renderer, "{{ 'a' * 260000 }}{{ x }}{{ x }}", x="b" * 500_000)
        assert len(own) == 1_260_000
        refused = await said(renderer, "{{ 'a' * 300000 }}")
        assert refused.startswith("it writes more than 262")
    finally:
        await renderer.close()


async def test_more_messages_are_compared_with_the_first_ones(renderer: Renderer) -> None:
    source = (
        "{% for message in messages %}{% if message == 'no' %}{{ raise_exception('no') }}"
        "{% endif %}{{ message }},{% endfor %}{{ 'now' if opens else '' }}"
    )
    others = [{"following": ["c"], "opens": False}, {"following": ["no"]}, {"following": []}]
    found = await renderer.render(source, {"messages": ["a", "b"], "opens": True}, others)
    assert found.text == "a,b,now"
    assert found.shared == [(4, "c,"), (7, "")]


async def test_slow_template_delays_no_other_one(renderer: Renderer) -> None:
    slow = asyncio.create_task(renderer.render(ENDLESS, {}, owner="slow"))
    found = [await text_of(renderer, "{{ x }}", x=index) for index in range(3)]
    assert found == ["0", "1", "2"]
    assert not slow.done()
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)


async def test_renderings_at_once_do_not_mix(renderer: Renderer) -> None:
    found = await asyncio.gather(*(text_of(renderer, "{{ x }}", x=i) for i in range(20)))
    assert found == [str(i) for i in range(20)]
