"""YAML of strangers is refused before it takes memory or time."""

import pytest

from smd_jax.text import yaml_limits
from smd_jax.text.yaml_limits import CARD, OPTIONS, check_yaml, load_yaml

LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))


@pytest.mark.parametrize(
    "text",
    ["", "a: 1\nb: [x, {c: null}]", "a: &one [1, 2]\nb: *one\nc: *one", "- " * 49 + "x", "!!set {a, b}"],
)
def test_yaml_that_is_meant(text):
    check_yaml(text, CARD)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LAUGHS, "expected YAML of at most 100,000 values; got more, with aliases written out"),
        ("[" * 5_000, "expected YAML of at most 50 levels"),
        ("a: &a [*a]", "expected YAML that ends; got an alias inside its own anchor"),
        ("x" * (2**20 + 1), "expected YAML of at most 1,048,576 characters; got 1,048,577"),
        ("a: [1", "expected YAML; got "),
    ],
)
def test_yaml_that_is_not(text, message):
    with pytest.raises(ValueError, match=message) as refused:
        check_yaml(text, CARD)
    assert len(str(refused.value)) < 400


def test_pure_python_gives_the_same(monkeypatch):
    import yaml

    monkeypatch.setattr(yaml_limits, "_LOADER", yaml.SafeLoader)
    with pytest.raises(ValueError, match="aliases written out"):
        check_yaml(LAUGHS, CARD)


def test_options_are_read_without_aliases():
    assert load_yaml("a: [1, {b: [x]}]\nc: 1.5", OPTIONS) == {"a": [1, {"b": ["x"]}], "c": 1.5}
    with pytest.raises(ValueError, match=r"expected YAML without aliases; got \*one"):
        load_yaml("a: &one [1]\nb: *one", OPTIONS)
    with pytest.raises(ValueError, match="of at most 20 levels"):
        load_yaml("[" * 21 + "]" * 21, OPTIONS)
    assert load_yaml("[" * 20 + "]" * 20, OPTIONS)
    for text in ("[a]: b\n? [a]\n: b", "2020-13-45", "!!python/name:os.system"):
        with pytest.raises(ValueError, match="expected YAML; got"):
            load_yaml(text, OPTIONS)
