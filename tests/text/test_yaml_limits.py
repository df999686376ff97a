"""YAML is refused before it takes memory or time."""

import pytest

from smd_jax.text.yaml_limits import load_yaml


def test_values():
    assert load_yaml("a: [1, {b: [x]}]\nc: 1.5") == {"a": [1, {"b": ["x"]}], "c": 1.5}
    assert load_yaml("[" * 20 + "]" * 20)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &one [1]\nb: *one", r"expected YAML without aliases; got \*one"),
        ("[" * 5_000, "of at most 20 levels"),
        ("x" * 200_000, "expected YAML of at most 131,072 characters; got 200,000"),
        *((text, "expected YAML; got") for text in ("a: [1", "[a]: b\n? [a]\n: b", "!!python/name:os.system")),
        ("2020-13-45", "month must be in 1..12"),
    ],
)
def test_yaml_that_is_refused(text: str, message: str):
    with pytest.raises(ValueError, match=message) as refused:
        load_yaml(text)
    assert len(str(refused.value)) < 400
