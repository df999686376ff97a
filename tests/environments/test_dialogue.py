"""Prompts and answers of a conversation under chat templates, and templates that are refused."""

from typing import Any

import pytest
from tokenizers import normalizers, pre_tokenizers

from smd_jax.environments.dialogue import Dialogue
from smd_jax.testing import END, byte_tokenizer
from smd_jax.text.chat_template import TemplateError
from tests.stop_tokenizers import sentencepiece_tokenizer

# Like Qwen3's: removes the thinking of the turns before the last user message.
STRIPS_THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOL_TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}{% for m in messages %}"
    "[{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}]{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# Like Qwen3's: without thinking, the generation prompt ends with an empty thinking block.
EMPTY_THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)


def new_dialogue(template: Any = None, chat: bool = True) -> Dialogue:
    tokenizer: Any = byte_tokenizer(chat=chat)
    if template is not None:
        tokenizer.chat_template = template
    return Dialogue(tokenizer)


def test_written_turns_equal_the_template_of_the_whole_conversation():
    tokenizer: Any = byte_tokenizer()
    dialogue = Dialogue(tokenizer)
    turns = [dialogue.prompt("2 + 2?"), f"<think>hm</think>4{END}", dialogue.answer("And 3 + 3?", END), f"6{END}"]
    messages = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "<think>hm</think>4"},
        {"role": "user", "content": "And 3 + 3?"},
        {"role": "assistant", "content": "6"},
    ]
    assert "".join(turns) + "\n" == tokenizer.apply_chat_template(messages, tokenize=False)
    # A turn without an end token, as after a stop string, gets the template's end of message.
    assert dialogue.answer("And?", "call>") == END + dialogue.answer("And?", END)


def test_tools_are_in_the_prompt_and_their_results_are_messages():
    dialogue = new_dialogue(TOOL_TEMPLATE)
    schema = {"type": "function", "function": {"name": "add"}}
    assert dialogue.prompt([{"role": "user", "content": "2 + 2?"}], [schema]) == f"add\n[user]2 + 2?{END}[assistant]"
    result = [{"role": "tool", "name": "add", "content": "4"}]
    assert dialogue.answer(result, END) == f"[tool add]4{END}[assistant]"


def test_a_template_that_ignores_tools_is_refused():
    dialogue, schema = new_dialogue(), {"type": "function", "function": {"name": "add"}}
    with pytest.raises(TemplateError, match="expected a chat template that writes the tools' schemas.*ignores `tools`"):
        dialogue.prompt("2 + 2?", [schema])
    assert dialogue.prompt("2 + 2?").endswith("assistant\n")


# Skips tool messages. Gemma 4's template writes results into the assistant message.
DROPS_RESULTS = TOOL_TEMPLATE.replace("for m in messages %}", "for m in messages if m.role != 'tool' %}")
# Writes the header of every role, but the content only of known roles.
HEADERS_ONLY = TOOL_TEMPLATE.replace("{{ m.content }}", "{{ m.content if m.role in ('user', 'assistant') }}")


@pytest.mark.parametrize("template", [DROPS_RESULTS, HEADERS_ONLY])
@pytest.mark.parametrize("content", ["4", "", [{"type": "text", "text": "4"}]])
def test_a_template_that_ignores_the_results_of_tools_is_refused(template: str, content: Any):
    dialogue, schema = new_dialogue(template), {"type": "function", "function": {"name": "add"}}
    result = [{"role": "tool", "name": "add", "content": content}]
    for _ in range(2):
        with pytest.raises(TemplateError, match="that writes messages of role 'tool'") as raised:
            dialogue.answer([{"role": "user", "content": "Read:"}, *result], END, [schema])
    assert len(str(raised.value)) < 300, "a failure keeps 300 characters"
    assert dialogue.answer("And?", END) == f"[user]And?{END}[assistant]"


@pytest.mark.parametrize("template", [DROPS_RESULTS, HEADERS_ONLY])
def test_a_prompt_with_a_role_that_the_template_ignores_is_refused(template: str):
    dialogue, question = new_dialogue(template), {"role": "user", "content": "2 + 2?"}
    with pytest.raises(TemplateError, match="that writes messages of role 'tool' in a prompt"):
        dialogue.prompt([question, {"role": "tool", "content": "4"}])
    template = "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}{% endfor %}"
    parts_dialogue = new_dialogue(template)
    parts = [{"role": "system", "content": [{"type": "text", "text": "Add."}]}, question]
    assert parts_dialogue.prompt(parts) == "Add.2 + 2?"
    tool_call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
    assert dialogue.prompt([question, tool_call]) == f"[user]2 + 2?{END}[assistant]{END}[assistant]"


def test_a_role_is_checked_once_per_template(monkeypatch: pytest.MonkeyPatch):
    dialogue = new_dialogue({"default": TOOL_TEMPLATE, "tool_use": TOOL_TEMPLATE + "{# #}"})
    renders = list[Any]()
    after = Dialogue._after

    def counting(self: Any, *arguments: Any) -> str:
        renders.append(arguments)
        return after(self, *arguments)

    monkeypatch.setattr(Dialogue, "_after", counting)
    counts = []
    for tools in ((), (), ({"function": {"name": "add"}},)):
        for role in ("tool", "user"):
            dialogue.answer([{"role": role, "content": "4"}, {"role": role}], END, tools)
        counts.append(len(renders))
    assert counts == [4, 6, 10]


def test_tool_results_use_the_tool_use_template():
    tool_use = TOOL_TEMPLATE.replace("[{{ m.role }}", "[{{ 'result of ' if m.role == 'tool' }}{{ m.role }}")
    dialogue = new_dialogue({"default": TOOL_TEMPLATE, "tool_use": tool_use})
    result, schema = [{"role": "tool", "name": "add", "content": "4"}], {"function": {"name": "add"}}
    assert dialogue.answer(result, END, [schema]) == f"[result of tool add]4{END}[assistant]"
    assert dialogue.answer(result, END) == f"[tool add]4{END}[assistant]"


def test_a_generation_prompt_may_end_with_empty_thinking():
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = EMPTY_THINKING
    plain, without = Dialogue(tokenizer), Dialogue(tokenizer, {"enable_thinking": False})
    assert without.prompt("a") == plain.prompt("a") + "<think>\n\n</think>\n\n"
    assert without.answer("c", END) == plain.answer("c", END) + "<think>\n\n</think>\n\n"
    assert plain.answer("c", END, variables={"enable_thinking": False}) == without.answer("c", END)
    assert plain.prompt("a", variables={"enable_thinking": False}) == without.prompt("a")


def test_a_template_that_changes_earlier_turns_is_refused():
    with pytest.raises(TemplateError, match="leaves the turns before it as they were") as raised:
        new_dialogue(STRIPS_THINKING)
    assert "'<think>" in str(raised.value) and "Edit the template" in str(raised.value)
    assert len(str(raised.value)) < 500


def test_without_a_template_texts_are_concatenated():
    dialogue = new_dialogue(chat=False)
    assert (dialogue.prompt("a="), dialogue.answer("b=", "x")) == ("a=", "b=")
    for refused in (lambda: dialogue.prompt([{"role": "user", "content": "a"}]), lambda: dialogue.prompt("a", [{}])):
        with pytest.raises(TemplateError, match="expected a text as prompt without a chat template"):
            refused()
    with pytest.raises(TemplateError, match="expected a text as answer"):
        dialogue.answer([{"role": "tool", "content": "4"}], "x")


@pytest.mark.parametrize("kind", ["Prepend", "always", "first"])
def test_an_answer_gets_no_leading_space(kind: str):
    """Sentencepiece tokenizers prepend a space to every text."""
    tokenizer: Any = sentencepiece_tokenizer()
    if kind != "Prepend":
        tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([])
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind)
    dialogue = Dialogue(tokenizer)

    def tokens(text: str, last: str) -> list[str]:
        return tokenizer.convert_ids_to_tokens(dialogue.answer_tokens(text, last))

    assert tokens(")b", "a") == ["<0x29>", "b"] and tokens("b", "a") == ["b"]
    assert tokens(" a", "a") == ["▁a"] and tokens("", "a") == []
    # After an end token the tokens are those of the whole text.
    whole = tokenizer.tokenize("a</s>)b")
    assert tokens(")b", "</s>") == whole[whole.index("</s>") + 1 :]
