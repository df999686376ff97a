"""Chat templates: equal to transformers, limited in time and memory, rendered with a fixed date."""

import datetime
from typing import Any

import pytest

from smd_jax.commands.arguments import DataArgs, Grpo, ModelArgs, RunArgs
from smd_jax.commands.prepare import with_prompt_day
from smd_jax.tasks.task import prompt_text
from smd_jax.testing import byte_tokenizer
from smd_jax.text import chat_template
from smd_jax.text.chat_template import Renderer, TemplateError, render_messages
from smd_jax.text.template_process import Limits

DAY = datetime.date(2025, 3, 9)
DATED = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}: {% endif %}{{ messages[0]['content'] }}"


def with_template(template: str | dict[str, str] = DATED):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


TOOLS = (
    "{{ bos_token }}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
    "{{ m.role }}:{{ m.content }}{{ m.name }}{{ eos_token }}{% endfor %}{{ enable_thinking }}{{ pairs }}"
    "{% if add_generation_prompt %}>{% endif %}"
)
CHAT = [{"role": "system", "content": "Äé"}, {"role": "user", "content": "Hi ☃"}]


def weather(city: str) -> str:
    """Tells the weather.

    Args:
        city: where
    """
    return city


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"enable_thinking": False, "pairs": ((1, 2), {3: 4.5})},
        {"bos_token": "<mine>"},
        {"tools": [{"type": "function", "function": {"name": "f"}}, weather]},
    ],
    ids=["plain", "values", "token", "tools"],
)
@pytest.mark.parametrize("named", [False, True])
def test_rendered_messages_equal_transformers(variables, named):
    tokenizer = with_template({"default": TOOLS, "tool_use": f"with tools {TOOLS}"} if named else TOOLS)
    expected = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True, **variables)
    assert render_messages(CHAT, tokenizer, variables) == expected
    assert tokenizer.special_tokens_map["eos_token"] in expected and str(expected).endswith(">")


@pytest.mark.parametrize("generation_prompt", [False, True])
def test_none_fields_and_generation_prompt_equal_transformers(generation_prompt):
    """transformers drops fields that are None: Llama 3.1's template tests whether a message has tool_calls."""
    tokenizer = with_template(
        "{% for m in messages %}{{ m.role }}{% if 'tool_calls' in m %}{{ m.tool_calls | length }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    chat = [{"role": "user", "content": "hi", "tool_calls": None}]
    expected = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=generation_prompt)
    assert render_messages(chat, tokenizer, {}, add_generation_prompt=generation_prompt) == expected
    assert expected == "user" + ">" * generation_prompt


RENDERER = Renderer()
NESTED_LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED_TEXT = "{% set n = namespace(x='x') %}" + "{% set n.x = n.x + n.x %}" * 28
LARGE_POWER = "{{ 7 ** (10 ** 9) }}"


@pytest.mark.parametrize(
    ("template", "limits", "reason"),
    [
        (NESTED_LOOPS, Limits(seconds=0.3), r"it takes longer than (0\.3|1\.8) s"),
        (LARGE_POWER, Limits(seconds=0.3), r"it takes longer than (0\.3|1\.8) s"),
        ("{{ 'x' * 2 ** 28 }}", Limits(memory=2**27), "it needs more than 134,217,728 bytes of memory"),
        (DOUBLED_TEXT, Limits(memory=2**27), "it needs more than 134,217,728 bytes of memory"),
        ("{{ 'x' * 2000 }}", Limits(characters=1999), "it renders 2,000 characters, more than 1,999"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", Limits(), "RecursionError"),
    ],
    ids=["loop", "loop in C", "memory", "doubling", "length", "recursion"],
)
def test_a_template_is_limited(template, limits, reason):
    chat = [{"role": "user", "content": "Hi"}]
    with pytest.raises(TemplateError, match=reason):
        RENDERER.render(template, chat, {}, limits)
    assert RENDERER.render("{{ messages[0].content }}", chat, {}, Limits()) == "Hi"


def test_messages_nested_too_deeply_raise():
    arguments: Any = {}
    for _ in range(5000):
        arguments = {"a": arguments}
    with pytest.raises(TemplateError, match="its messages are nested too deeply"):
        RENDERER.render("x", [{"role": "user", "content": arguments}], {}, Limits())
    assert RENDERER.render("x", CHAT, {}, Limits()) == "x"


def test_variables_must_be_picklable():
    with pytest.raises(ValueError, match="expected values that can be pickled"):
        render_messages(CHAT, with_template(TOOLS), {"pairs": lambda: 1})


def test_a_row_may_set_the_date():
    row = {"prompt": "Hi", "chat_template_kwargs": {"strftime_now": "2025-03-09"}}
    assert prompt_text(row, with_template()) == "09 Mar 2025: Hi"
    assert prompt_text(row | {"chat_template_kwargs": {"strftime_now": DAY}}, with_template()) == "09 Mar 2025: Hi"
    assert prompt_text(row, with_template({"default": DATED, "tool_use": "x"})) == "09 Mar 2025: Hi"
    formats = "{% set f = '%Y' %}{{ strftime_now(f) }}{{ strftime_now(format='%H') }}"
    assert prompt_text(row, with_template(formats)) == "202500"
    with pytest.raises(ValueError, match="expected strftime_now as a day such as 2026-01-31; got 'soon'"):
        prompt_text({"prompt": "Hi", "chat_template_kwargs": {"strftime_now": "soon"}}, with_template())


def test_all_rows_of_a_process_have_the_same_date(monkeypatch):
    monkeypatch.setattr(chat_template, "first_day", lambda: DAY)
    assert prompt_text({"prompt": "Hi"}, with_template()) == "09 Mar 2025: Hi"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0]['content'] + none }}",
        "{{ 1 / 0 }}",
        "{{ messages[5]['content'].x.y }}",
        "{% for m in messages %}",
        "{{ raise_exception('x' * 5000) }}",
        "{{ '\\ud83d' }}",
    ],
)
def test_a_template_that_fails_names_the_roles(template):
    expected = r"expected messages that the tokenizer's chat template takes; got those of \['user'\], and it says: \w+"
    with pytest.raises(ValueError, match=expected) as error:
        prompt_text({"prompt": "Hi"}, with_template(template))
    assert len(str(error.value)) < 500


def test_a_resumed_run_keeps_its_date(tmp_path):
    plain = Grpo(
        model=ModelArgs(model="somewhere"),
        data=DataArgs(dataset="rows.jsonl"),
        run=RunArgs(output_dir=tmp_path / "run"),
    )
    assert with_prompt_day(plain, "{{ messages }}") == plain  # its template reads no date
    template = with_template().chat_template
    today = f"strftime_now={datetime.date.today().isoformat()}"
    assert with_prompt_day(plain, template).data.chat_template_kwargs == (today,)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("chat_template_kwargs: ['a=1', strftime_now=2025-03-09]\n")
    again = Grpo(model=plain.model, data=plain.data, run=RunArgs(output_dir=tmp_path / "run", resume=True))
    assert with_prompt_day(again, template).data.chat_template_kwargs == ("strftime_now=2025-03-09",)
    (tmp_path / "run" / "config.yaml").write_text("chat_template_kwargs: []\n")
    assert with_prompt_day(again, template) == again  # a run from before dates were saved
