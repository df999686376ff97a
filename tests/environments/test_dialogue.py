"""How conversations are written: what a chat template adds behind a turn, and templates that cannot."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import normalizers, pre_tokenizers

from smd_jax.environments.dialogue import Dialogue
from smd_jax.testing import END, byte_tokenizer
from smd_jax.text.chat_template import TemplateError
from tests.stop_tokenizers import sentencepiece_tokenizer

# What matters of Qwen3's: thinking stays only behind the last question of the user.
STRIPS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = (
    "{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}{% for m in messages %}"
    "[{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}]{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


# Every message as its content alone; without thinking the generation prompt ends with an empty one, as Qwen3's.
EMPTY_THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)


def dialogue(template: str | None = None, chat: bool = True) -> Dialogue:
    tokenizer: Any = byte_tokenizer(chat=chat)
    if template is not None:
        tokenizer.chat_template = template
    return Dialogue(tokenizer)


def test_what_is_written_equals_the_template_of_the_whole_conversation():
    tokenizer: Any = byte_tokenizer()
    written = Dialogue(tokenizer)
    said = [written.prompt("2 + 2?"), f"<think>hm</think>4{END}", written.answer("And 3 + 3?", END), f"6{END}"]
    messages = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "<think>hm</think>4"},
        {"role": "user", "content": "And 3 + 3?"},
        {"role": "assistant", "content": "6"},
    ]
    assert "".join(said) + "\n" == tokenizer.apply_chat_template(messages, tokenize=False)
    # A turn that another token ended, such as a stop string's, gets the end of its message from the template.
    assert written.answer("And?", "call>") == END + written.answer("And?", END)


def test_tools_are_in_the_prompt_and_their_results_are_messages():
    written = dialogue(TOOLS)
    schema = {"type": "function", "function": {"name": "add"}}
    assert written.prompt([{"role": "user", "content": "2 + 2?"}], [schema]) == f"add\n[user]2 + 2?{END}[assistant]"
    result = [{"role": "tool", "name": "add", "content": "4"}]
    assert written.answer(result, END) == f"[tool add]4{END}[assistant]"


def test_a_template_that_ignores_tools_is_refused():
    written, schema = dialogue(), {"type": "function", "function": {"name": "add"}}
    with pytest.raises(TemplateError, match="expected a chat template that writes the tools' schemas.*ignores `tools`"):
        written.prompt("2 + 2?", [schema])
    assert written.prompt("2 + 2?").endswith("assistant\n")


# Writes results beside the call of an assistant message only, as Gemma 4's.
DROPS_RESULTS = TOOLS.replace("for m in messages %}", "for m in messages if m.role != 'tool' %}")
# Writes the header of every role, but the content of known ones only.
HEADERS = TOOLS.replace("{{ m.content }}", "{{ m.content if m.role in ('user', 'assistant') }}")


@pytest.mark.parametrize("template", [DROPS_RESULTS, HEADERS])
@pytest.mark.parametrize("content", ["4", "", [{"type": "text", "text": "4"}]])
def test_a_template_that_ignores_the_results_of_tools_is_refused(template: str, content: Any):
    written, schema = dialogue(template), {"type": "function", "function": {"name": "add"}}
    result = [{"role": "tool", "name": "add", "content": content}]
    for _ in range(2):
        with pytest.raises(TemplateError, match="that writes messages of role 'tool'") as raised:
            written.answer([{"role": "user", "content": "Read:"}, *result], END, [schema])
    assert len(str(raised.value)) < 300, "a failure keeps 300 characters"
    assert written.answer("And?", END) == f"[user]And?{END}[assistant]"


@pytest.mark.parametrize("template", [DROPS_RESULTS, HEADERS])
def test_a_prompt_with_a_role_that_the_template_ignores_is_refused(template: str):
    written, question = dialogue(template), {"role": "user", "content": "2 + 2?"}
    with pytest.raises(TemplateError, match="that writes messages of role 'tool' in a prompt"):
        written.prompt([question, {"role": "tool", "content": "4"}])
    first_part = "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}{% endfor %}"
    of_first_part = dialogue(first_part)
    parts = [{"role": "system", "content": [{"type": "text", "text": "Add."}]}, question]
    assert of_first_part.prompt(parts) == "Add.2 + 2?"
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
    assert written.prompt([question, called]) == f"[user]2 + 2?{END}[assistant]{END}[assistant]"


def test_a_role_is_looked_at_once_per_template(monkeypatch: pytest.MonkeyPatch):
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = {"default": TOOLS, "tool_use": TOOLS + "{# #}"}
    written, rendered = Dialogue(tokenizer), list[Any]()
    after = Dialogue._after

    def counted(self: Any, *given: Any) -> str:
        rendered.append(given)
        return after(self, *given)

    monkeypatch.setattr(Dialogue, "_after", counted)
    counts = []
    for tools in ((), (), ({"function": {"name": "add"}},)):
        for role in ("tool", "user"):
            written.answer([{"role": role, "content": "4"}, {"role": role}], END, tools)
        counts.append(len(rendered))
    assert counts == [4, 6, 10]


def test_results_are_written_by_the_template_for_tools():
    tokenizer: Any = byte_tokenizer()
    of_tools = TOOLS.replace("[{{ m.role }}", "[{{ 'result of ' if m.role == 'tool' }}{{ m.role }}")
    tokenizer.chat_template = {"default": TOOLS, "tool_use": of_tools}
    written = Dialogue(tokenizer)
    result, schema = [{"role": "tool", "name": "add", "content": "4"}], {"function": {"name": "add"}}
    assert written.answer(result, END, [schema]) == f"[result of tool add]4{END}[assistant]"
    assert written.answer(result, END) == f"[tool add]4{END}[assistant]"


def test_a_generation_prompt_may_have_an_empty_thinking():
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = EMPTY_THINKING
    plain, without = Dialogue(tokenizer), Dialogue(tokenizer, {"enable_thinking": False})
    assert without.prompt("a") == plain.prompt("a") + "<think>\n\n</think>\n\n"
    assert without.answer("c", END) == plain.answer("c", END) + "<think>\n\n</think>\n\n"
    assert plain.answer("c", END, variables={"enable_thinking": False}) == without.answer("c", END)
    assert plain.prompt("a", variables={"enable_thinking": False}) == without.prompt("a")


def test_a_template_that_changes_earlier_turns_is_refused():
    with pytest.raises(TemplateError, match="leaves the turns before it as they were") as raised:
        dialogue(STRIPS)
    assert "'<think>" in str(raised.value) and "Edit the template" in str(raised.value)
    assert len(str(raised.value)) < 500


def test_without_a_template_texts_follow_each_other():
    written = dialogue(chat=False)
    assert (written.prompt("a="), written.answer("b=", "x")) == ("a=", "b=")
    for refused in (lambda: written.prompt([{"role": "user", "content": "a"}]), lambda: written.prompt("a", [{}])):
        with pytest.raises(TemplateError, match="expected a text as prompt without a chat template"):
            refused()
    with pytest.raises(TemplateError, match="expected a text as answer"):
        written.answer([{"role": "tool", "content": "4"}], "x")


@pytest.mark.parametrize("kind", ["Prepend", "always", "first"])
def test_an_answer_gets_no_blank_that_its_text_does_not_have(kind: str):
    """Tokenizers of the sentencepiece kind put a blank in front of every text."""
    tokenizer: Any = sentencepiece_tokenizer()
    if kind != "Prepend":
        tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([])
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind)
    written = Dialogue(tokenizer)

    def tokens(text: str, last: str) -> list[str]:
        return tokenizer.convert_ids_to_tokens(written.answer_tokens(text, last))

    assert tokens(")b", "a") == ["<0x29>", "b"] and tokens("b", "a") == ["b"]
    assert tokens(" a", "a") == ["▁a"] and tokens("", "a") == []
    # Behind an end token the tokenizer itself decides, as it does in the whole conversation.
    whole = tokenizer.tokenize("a</s>)b")
    assert tokens(")b", "</s>") == whole[whole.index("</s>") + 1 :]
