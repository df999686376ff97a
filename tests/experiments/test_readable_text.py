"""A real model's text under the default eviction policy is text: needs SmolLM2, which `make smollm2` fetches."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from transformers import AutoTokenizer

import readable_text
import smd_jax as smd
from tests.paths import ROOT

pytestmark = pytest.mark.study

MODEL = ROOT / "runs" / "smollm2"
USUAL = readable_text.SamplerArgs()
DEFAULT = readable_text.Case(USUAL.eviction, USUAL.sinks, USUAL.budget, USUAL.buffer)


@pytest.mark.skipif(not MODEL.is_dir(), reason="expected SmolLM2 under runs/smollm2: make smollm2")
def test_text_stays_text_under_the_default_policy():
    """The dense model finds it as likely as text of its own, and tokens in another order impossible."""
    args = readable_text.Args(prompts=1, prompt_tokens=600, response_tokens=48)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    shape, params = smd.load_checkpoint(MODEL)
    model = smd.Decoder(shape)
    prompts = readable_text.long_prompts(tokenizer, 1, args.prompt_tokens)
    trajectory = readable_text.write(model, params, prompts, tokenizer.eos_token_id, DEFAULT, 0.0, args)
    assert readable_text.evicted_share(trajectory) > 0.1
    texts = np.asarray(trajectory.response).tolist()
    found = readable_text.measure(model, params, prompts, texts)
    garbage = [np.random.default_rng(0).permutation(text).tolist() for text in texts]
    assert found.perplexity < 10 < 50 < readable_text.measure(model, params, prompts, garbage).perplexity


def test_the_default_case_is_that_of_smd_train():
    assert DEFAULT in readable_text.cases(readable_text.Args())
    assert dataclasses.replace(DEFAULT, sinks=0) in readable_text.cases(readable_text.Args())
