"""Records of samplers are read from arrays or files and checked."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from smd_jax.certify.record import load_record, save_record
from smd_jax.message.masks import NEVER
from tests.certify.conftest import SIZES, altered, record_of


def test_evicted_at_and_kept_give_the_same_record(arrays):
    """A row of five tokens by hand: after query 2, keys 0 and 2 are left."""
    tokens = np.array([[5, 6, 7, 8, 9]])
    fields = {"tokens": tokens, "prompt_lengths": np.array([2]), "lengths": np.array([5])}
    fields["logprobs"] = np.full((1, 5), -1.0, np.float32)
    kept = {"kept_after": np.array([[2, -1]]), "kept": np.full((1, 2, 3, 2, 2), -1)}
    kept["kept"][0, 0] = [0, 2]
    evicted_at = np.full((1, 1, 1, 5), 99)
    evicted_at[..., 1] = 3
    one, other = record_of({**fields, **kept}), record_of({**fields, "evicted_at": evicted_at})
    expected = [NEVER, 3, NEVER, NEVER, NEVER]
    assert (one.evicted_at == expected).all() and (other.evicted_at == expected).all()


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_record_files_round_trip(arrays, tmp_path: Path, suffix):
    path = tmp_path / f"rollout{suffix}"
    save_record(path, arrays)
    record = load_record(path, *SIZES)
    jax.tree.map(np.testing.assert_array_equal, *map(dataclasses.asdict, (record, record_of(arrays))))
    with pytest.raises(FileExistsError, match="expected no file at"):
        save_record(path, arrays)
    routing = np.tile(np.arange(2), (*arrays["tokens"].shape, 2, 1))
    save_record(str(tmp_path / f"routed{suffix}"), {**arrays, "routing": routing})


def test_a_file_that_is_no_record(arrays, tmp_path: Path):
    path = tmp_path / "rollout.npz"
    with path.open("wb") as file:
        np.save(file, arrays["tokens"])
    with pytest.raises(ValueError, match="expected a readable record; got .*: one array, as np.save writes it"):
        load_record(path, *SIZES)
    path.write_bytes(b"abc")
    with pytest.raises(ValueError, match="got .*: no archive, as np.savez writes it$"):
        load_record(str(path), *SIZES)
    np.savez(path, **{**arrays, "tokens": np.array([[1, 2], [3]], object)})
    with pytest.raises(ValueError, match="got .*: an array of Python objects$"):
        load_record(path, *SIZES)
    np.savez_compressed(path, **arrays)
    content = path.read_bytes()
    # The name of the first array, 20 bytes of sizes, its compressed bytes. No block of deflate begins with 0xFF.
    block = content.index(b".npy") + len(b".npy") + 20
    compression = content.index(b"PK\x01\x02") + 10  # in the directory at the end
    for at, value in ((block, 0xFF), (compression, 99)):
        path.write_bytes(content[:at] + bytes([value]) + content[at + 1 :])
        with pytest.raises(ValueError, match="expected a readable record; got"):
            load_record(path, *SIZES)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lengths": None, "length": np.array([5])}, "lengths missing"),
        ({"reward": np.zeros(4)}, "got reward"),
        ({"tokens": np.zeros((4, 44))}, "tokens: expected integers; got float64"),
        ({"evicted_at": np.full((4, 3, 2, 44), -1)}, "expected evicted_at of at least 1"),
        ({"evicted_at": np.zeros(4, int)}, "evicted_at: expected the shape"),
        ({"routing": np.zeros((4, 44, 2, 2), int)}, "expected 2 different experts of a token"),
        ({"routing": np.zeros((4, 44), int)}, "routing: expected"),
    ],
)
def test_a_bad_record_is_not_written(arrays, tmp_path: Path, changed, message):
    path = tmp_path / "rollout.npz"
    with pytest.raises(ValueError, match=message):
        save_record(path, altered(arrays, **changed))
    assert not path.exists()


def top_arrays(ids, logprob):
    """The same two likeliest tokens everywhere."""
    shape = (4, 44, 2)
    return {"top_ids": np.broadcast_to(ids, shape), "top_logprobs": np.full(shape, logprob, np.float32)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": None}, "tokens missing"),
        ({"masks": np.zeros(1, int)}, "got masks"),
        ({"routing": np.zeros(1, int)}, "routing: expected no expert routing, because the model has no experts"),
        ({"logprobs": np.zeros((4, 44), int)}, "logprobs: expected float32 or float64, .*; got int64"),
        ({"logprobs": np.zeros((4, 44), np.float16)}, "logprobs: expected float32 or float64, .*; got float16"),
        ({"positions": np.full((4, 44), 2**33)}, "positions: expected numbers from 0 to .*; got 8589934592 in row 0"),
        ({"logprobs": np.zeros((4, 3), np.float32)}, r"logprobs: expected the shape \(4, 44\); got \(4, 3\)"),
        ({"logprobs": np.full((4, 44), np.nan)}, r"finite log-probabilities; got nan \(row 0, response token 0\)"),
        # `Trajectory.from_records` has the same limit: a certified record can be trained on.
        ({"logprobs": np.full((4, 44), 5e-4)}, "expected log-probabilities, which are at most 0 .*; got 0.0005"),
        ({"tokens": np.full((4, 44), 264)}, r"to 263, .*; got 264 \(prompt of row 0, token 0\). Was another"),
        ({"lengths": np.array([12, 9, 7, 6])}, "expected 1 <= prompt_lengths < lengths <= 44"),
        ({"temperature": np.float32(0)}, "temperature: expected a number > 0; got 0.0"),
        ({"evicted_at": np.zeros((4, 3, 5, 44), int)}, r"of row 0 to be \(3, 2, 44\) .*; got \(3, 5, 44\)"),
        ({"evicted_at": np.zeros((4, 3, 2, 44), int)}, "row 0"),
        ({"kept": np.zeros((4, 1, 3, 2, 1), int)}, "expected kept and kept_after together"),
        ({"support_ids": np.zeros(3, int)}, "expected support_ids and support_offsets together"),
        (top_arrays(-1, 0.0) | {"top_ids": None}, "expected top_ids and top_logprobs together"),
        (top_arrays(264, -1.0), "top_ids: expected ids below 264, or -1 for none; got 264 in row 0, column 12"),
        (top_arrays(5, -1.0), "top_ids: expected every id once for a token; got 5 twice in row 0, column 12"),
        (top_arrays([5, 6], np.nan), "top_logprobs: expected finite numbers <= 0; got nan in row 0, column 12"),
        (top_arrays([5, 6], -0.1), "top_logprobs: expected probabilities with a sum of at most 1; got 1.81 in row 0"),
        (
            {"tokens": np.full((4, 44), 2**63, np.uint64)},
            r"expected whole numbers below 2\^63; got 9223372036854775808 \(prompt of row 0\)",
        ),
        (
            top_arrays(np.uint64(2**64 - 1), -1.0),
            r"expected whole numbers below 2\^63; got 18446744073709551615 \(top_ids\)",
        ),
        ({"support_ids": np.zeros(3, int), "support_offsets": np.arange(4)}, "expected 129 rising offsets from 0 to 3"),
    ],
)
def test_a_bad_record_is_refused(arrays, changed, message):
    with pytest.raises(ValueError, match=message):
        record_of(altered(arrays, **changed))


@pytest.mark.parametrize("dtype", [np.int16, np.uint16, np.uint32, np.int64, np.uint64])
def test_integers_of_any_dtype(arrays, dtype):
    """Unsigned dtypes cannot hold -1, which marks padding."""
    largest = min(np.iinfo(dtype).max, int(NEVER))
    fields = {**arrays, "evicted_at": np.minimum(arrays["evicted_at"], largest), **top_arrays([5, 6], -1.0)}
    fields = {name: x if x.dtype.kind == "f" else x.astype(dtype) for name, x in fields.items()}
    expected, converted = (record_of(each) for each in ({**arrays, **top_arrays([5, 6], -1.0)}, fields))
    jax.tree.map(np.testing.assert_array_equal, dataclasses.asdict(converted), dataclasses.asdict(expected))


def test_a_key_that_comes_back_is_refused(arrays):
    kept = np.tile(np.arange(3), (4, 2, 3, 2, 1))
    kept[:, 0] += 1  # keys 1, 2, 3 first, then 0, 1, 2
    fields = altered(arrays, evicted_at=None)
    with pytest.raises(ValueError, match="row 0, compression 1"):
        record_of({**fields, "kept": kept, "kept_after": np.tile([5, 9], (4, 1))})
    with pytest.raises(ValueError, match=r"kept: expected the shape \(4, 3, 'layers', .*; got \(4, 2, 3, 2, 3\)"):
        record_of({**fields, "kept": kept, "kept_after": np.tile([5, 9, 9], (4, 1))})
