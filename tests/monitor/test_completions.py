"""Log of completions: its files, its table on a terminal, and the saved shadow masks."""

import io
from typing import Any

import jax.numpy as jnp
import numpy as np
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from smd_jax.environments.respondent import Conversation
from smd_jax.message.masks import NEVER, ShadowMask, dense_mask
from smd_jax.message.trajectory import Trajectory
from smd_jax.monitor.completions import (
    CompletionsLog,
    extract_mask,
    load_masks,
    print_completions,
    save_masks,
    shortened_text,
    token_pieces,
)
from smd_jax.testing import byte_tokenizer
from smd_jax.text.token_bytes import byte_alphabet
from smd_jax.text.visible_text import one_line, visible
from smd_jax.train.samples import Samples

TOKENIZER = byte_tokenizer(chat=False)
EOS, PAD = 258, 256
PROMPT, RESPONSE = 3, 4


def trajectory(responses: list[list[int]], prompts: list[list[int]], mask=None) -> Trajectory:
    """Rows of these tokens, padded to 3 + 4 columns; dense without a mask."""
    left = [[PAD] * (PROMPT - len(row)) + row for row in prompts]
    right = [row + [PAD] * (RESPONSE - len(row)) for row in responses]
    valid = jnp.array(
        [
            [False] * (PROMPT - len(p)) + [True] * (len(p) + len(r)) + [False] * (RESPONSE - len(r))
            for p, r in zip(prompts, responses, strict=True)
        ]
    )
    return Trajectory(
        tokens=jnp.array([a + b for a, b in zip(left, right, strict=True)]),
        valid=valid,
        logprobs=jnp.zeros((len(prompts), RESPONSE)),
        terminated=jnp.array([row[-1] == EOS for row in responses]),
        mask=dense_mask(valid) if mask is None else mask,
    )


def samples(texts: list[str], advantages: bool = True) -> Samples:
    """One completion per text of at most four bytes; shorter texts end with EOS."""
    responses = [list(text.encode()) + [EOS] * (len(text.encode()) < RESPONSE) for text in texts]
    rewards = np.arange(len(texts), dtype=np.float32) / 2
    return Samples(
        trajectory(responses, [[65, 66]] * len(texts)),
        rewards,
        [{"prompt": "AB"}] * len(texts),
        texts,
        np.ones(len(texts), bool),
        {},
        advantages=rewards - 1 if advantages else None,
    )


def test_completions_are_saved_as_parquet(tmp_path):
    log = CompletionsLog(tmp_path, TOKENIZER, table_rows=0)
    for step in (0, 5):
        log(step, samples(["yes", "none"]))
    assert sorted(path.name for path in (tmp_path / "completions").iterdir()) == [
        *("completions_00000.parquet", "completions_00005.parquet", "masks_00000.npz", "masks_00005.npz")
    ]
    table = pyarrow.parquet.read_table(tmp_path / "completions" / "completions_00005.parquet").to_pydict()
    assert table == {
        "step": [5, 5],
        "prompt": ["AB", "AB"],
        "completion": ["yes", "none"],
        "reward": [0.0, 0.5],
        "advantage": [-1.0, -0.5],
        "length": [4, 4],
        "truncated": [False, True],
    }


def test_each_reward_function_has_a_column(tmp_path):
    base = samples(["a", "b"], advantages=False)
    parts = {"format": np.array([1.0, np.nan]), "reward": np.array([0.0, 2.0])}
    log = CompletionsLog(tmp_path, TOKENIZER, table_rows=0, masks=0)
    log(0, base._replace(reward_parts=parts))
    table = pyarrow.parquet.read_table(tmp_path / "completions" / "completions_00000.parquet").to_pydict()
    assert list(table)[3:6] == ["reward", "rewards/format", "rewards/reward"] and "advantage" not in table
    assert table["rewards/reward"] == [0.0, 2.0] and np.isnan(table["rewards/format"][1])


def test_a_lone_surrogate_is_replaced(tmp_path):
    log = CompletionsLog(tmp_path, TOKENIZER, table_rows=1, file=io.StringIO())
    log(0, samples(["a"])._replace(completions=["x\ud800"]))
    table = pyarrow.parquet.read_table(tmp_path / "completions" / "completions_00000.parquet")
    assert table["completion"].to_pylist() == ["x?"]


def test_a_failed_write_does_not_stop_the_run(tmp_path, capsys):
    (tmp_path / "completions").write_text("a file where the folder should be")
    log = CompletionsLog(tmp_path, TOKENIZER, table_rows=0)
    for step in range(3):
        log(step, samples(["a"]))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("completions are no longer saved: ") and "completions" in line


def test_negative_options_are_refused(tmp_path):
    with pytest.raises(ValueError, match="expected table_rows and masks >= 0; got 2"):
        CompletionsLog(tmp_path, TOKENIZER, masks=-1)


# --- on a terminal

CONTROL_CHARACTERS = "a\x1b[31mred\x1b]0;title\x07 [bold]x[/bold] \x9b2J\u202eabc\r\x00\x7f"


def test_control_characters_become_visible():
    shown = visible(CONTROL_CHARACTERS + "\n")
    assert shown == "a␛[31mred␛]0;title␇ [bold]x[/bold] \\u009b2J\\u202eabc␍␀\\u007f\n"
    assert visible("日本語 👩‍🚀 é") == "日本語 👩‍🚀 é"
    assert one_line("a\nb" + "c" * 600).startswith("a⏎bc") and len(one_line("c" * 600)) == 500


def test_the_table_on_a_terminal_without_unicode(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    raw = io.BytesIO()
    columns = {"prompt": ["日本"], "completion": ["é\n"], "reward": [0.5], "length": [12]}
    file = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    print_completions(7, columns, 1, file=file)
    assert b"completions of rollout 7" in raw.getvalue()
    assert rb"\u65e5\u672c" in raw.getvalue() and rb"\xe9\u23ce" in raw.getvalue()


def test_long_texts_are_shortened_in_the_middle():
    text = shortened_text("b" * 300 + "m" * 500 + "e" * 300)
    assert text == "b" * 200 + " […] " + "e" * 200


# --- shadow masks

# The picture of `smd_jax.message.masks`: key 0 is padding, key 2 was evicted after query 3; head 1 never evicts.
EVICTED_AT = jnp.array([[[[0, NEVER, 4, NEVER, NEVER, NEVER, NEVER], [0, *[NEVER] * 6]]]], jnp.int32)


def test_extracted_masks_have_no_padding():
    sampled = trajectory([[67, 68, 69, EOS]], [[65, 66]], ShadowMask(EVICTED_AT))
    mask = extract_mask(sampled, 0, TOKENIZER, step=3, reward=0.5)
    assert mask.evicted_at.tolist() == [[[6, 3, 6, 6, 6, 6], [6] * 6]]
    assert mask.evicted_at.dtype == np.uint16 and mask.prompt_length == 2 and (mask.step, mask.row) == (3, 0)
    assert mask.pieces[:5] == list("ABCDE")
    for query in range(6):
        forgotten = mask.forgotten(query)
        assert np.flatnonzero(forgotten[0, 0]).tolist() == ([1] if query >= 3 else [])
        assert not forgotten[0, 1].any()


def test_masks_are_loaded_as_saved(tmp_path):
    sampled = trajectory([[67, EOS], [68, 69, 70, 71]], [[65], [65, 66, 0]])
    masks = [extract_mask(sampled, row, TOKENIZER, 5, row / 3) for row in range(2)]
    save_masks(tmp_path / "masks.npz", masks)
    for mask, loaded in zip(masks, load_masks(tmp_path / "masks.npz"), strict=True):
        np.testing.assert_array_equal(mask.evicted_at, loaded.evicted_at)
        assert (mask.pieces, mask.prompt_length, mask.row, mask.reward) == (
            *(loaded.pieces, loaded.prompt_length, loaded.row, loaded.reward),
        )
    np.savez(tmp_path / "other.npz", a=np.zeros(2))
    with pytest.raises(ValueError, match="expected a file of saved masks; got .*other.npz"):
        load_masks(tmp_path / "other.npz")


def test_token_pieces_join_to_the_text():
    text = "añ日👩 b"
    ids = list(text.encode())
    pieces = token_pieces(TOKENIZER, ids)
    assert "".join(pieces) == text and len(pieces) == len(ids)
    assert pieces[:3] == ["a", "", "ñ"]


def test_a_token_may_end_one_character_and_begin_another():
    """Byte-level tokens over 日本: the second one has the last byte of the first character and two of the next."""
    data, characters = "日本".encode(), {byte: character for character, byte in byte_alphabet().items()}
    names = ["".join(characters[byte] for byte in part) for part in (data[:2], data[2:5], data[5:])]
    words = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    words.decoder = decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=words, clean_up_tokenization_spaces=False)
    assert token_pieces(tokenizer, [0, 1, 2]) == ["", "", "日本"]


def test_bytes_that_are_no_text_do_not_wait_for_the_end():
    """The first byte of a character, again and again: without a limit each token would decode all before it."""
    pieces = token_pieces(TOKENIZER, [0xC3] * 100)
    assert len(pieces) == 100 and pieces[31] == "\ufffd" * 32 and not any(pieces[:31])


def test_turns_of_conversations_are_saved_and_printed(tmp_path):
    conversation = Conversation("AB", ["y", "n"], ["!"], [0.5, 1.0], ending="done")
    one = samples(["y!n"])._replace(conversations=(conversation,))
    sampled = jnp.array([[True, False, True, True]])
    one = one._replace(trajectory=one.trajectory.replace(sampled=sampled))
    file = io.StringIO()
    CompletionsLog(tmp_path, TOKENIZER, file=file)(0, one)
    table = pyarrow.parquet.read_table(tmp_path / "completions" / "completions_00000.parquet").to_pydict()
    assert (table["turns"], table["answers"], table["ending"]) == ([["y", "n"]], [["!"]], ["done"])
    assert table["turn_rewards"] == [[0.5, 1.0]] and table["length"] == [3]
    assert "y [!] n" in file.getvalue()
    (mask,) = load_masks(tmp_path / "completions" / "masks_00000.npz")
    assert mask.turns == [0, 0, 1, 0, 2, 2] and len(mask.pieces) == 6
