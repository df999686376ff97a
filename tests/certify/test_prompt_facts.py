"""The facts of a tokenizer that smd-certify tests: BOS, the template's system message, its generation prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from smd_jax.certify.causes import CAUSES, PromptFacts, prompt_facts
from smd_jax.certify.record import check_record
from smd_jax.testing import byte_tokenizer

MESSAGES = "{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}"
ASKED = "{% if add_generation_prompt %}<|im_start|>a{% endif %}"
# As Llama 3.2: BOS, a system message, and turns that begin with the same special token.
LLAMA = "{{ bos_token }}<|im_start|>s" + MESSAGES + ASKED
# As SmolLM2, whose BOS token begins each turn.
SMOLLM = "{{ bos_token }}s{% for m in messages %}{{ bos_token }}{{ m['content'] }}{% endfor %}" + ASKED
# As Phi-3: EOS where no answer is asked for.
PHI = MESSAGES + ASKED.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")


@pytest.mark.parametrize(
    ("template", "bos", "system"),
    [(LLAMA, "<s>", "<|im_start|>s"), (SMOLLM, "<|im_start|>", "<|im_start|>s"), (PHI, None, "")],
)
def test_system_message_and_generation_prompt(template: str, bos: str | None, system: str):
    tokenizer: Any = byte_tokenizer()
    if bos is not None:
        tokenizer.add_special_tokens({"bos_token": bos})
    tokenizer.chat_template = template
    facts = prompt_facts(tokenizer)
    assert tokenizer.decode(facts.system) == system
    assert tokenizer.decode(facts.generation) == "<|im_start|>a"


def test_a_system_message_follows_bos():
    prompts = np.array([[1, 20, 21, 22], [1, 30, 31, 32]])
    facts = PromptFacts(bos=1, system=(7, 8))
    (cause,) = (each for each in CAUSES if each.name == "chat template")

    def only_case(tokens: np.ndarray) -> tuple[str, np.ndarray, np.ndarray]:
        size = np.full(2, tokens.shape[1])
        arrays = {"tokens": tokens, "prompt_lengths": size - 1, "lengths": size}
        arrays["logprobs"] = np.full(tokens.shape, -1.0, np.float32)
        (case,) = cause.cases(check_record(arrays, 1, 1, 64, None), facts)
        return case.detail, case.conditions.tokens, case.conditions.positions

    with_system = np.insert(prompts, [1, 1], [7, 8], axis=1)
    detail, tokens, positions = only_case(prompts)
    assert "template's system message" in detail
    np.testing.assert_array_equal(tokens[:, :6], with_system)
    np.testing.assert_array_equal(positions[:, :6], np.tile(np.arange(6), (2, 1)))
    detail, tokens, positions = only_case(with_system)
    assert "no system message" in detail
    np.testing.assert_array_equal(tokens[:, :4], prompts)
    np.testing.assert_array_equal(positions[:, :4], np.tile(np.arange(4), (2, 1)))


def test_prompt_facts_of_tokenizers():
    facts = prompt_facts(byte_tokenizer())
    assert len(facts.generation) > 0
    assert prompt_facts(byte_tokenizer(chat=False)).generation == ()
    failing: Any = byte_tokenizer()
    failing.chat_template = "{{ raise_exception('no') }}"
    assert prompt_facts(failing) == PromptFacts(bos=failing.bos_token_id)


def test_a_chat_template_is_rendered_in_a_limited_process(monkeypatch: pytest.MonkeyPatch):
    """A record may come with an untrusted tokenizer."""
    tokenizer = byte_tokenizer()
    expected = prompt_facts(tokenizer)
    monkeypatch.setattr(type(tokenizer), "apply_chat_template", None)
    assert prompt_facts(tokenizer) == expected
