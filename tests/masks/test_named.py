"""Proves that the table of named masks is complete and that text forms, plan files, the command line and generated code
read the right values from it.
"""

from __future__ import annotations

import operator

import pytest

import flexcp
from flexcp.cli.shared.batches import MASKS
from flexcp.clusters import cluster
from flexcp.cost import Model
from flexcp.masks import MASK_SIGNATURES, Mask, parse_mask, window
from flexcp.masks.named import NAMED, named_mask, public_name
from flexcp.models.preset import Preset
from flexcp.report.code_lines import Lines, code_lines
from flexcp.shape import Shape
from flexcp.simulator.step_parts import Training

LENGTHS = (1, 2, 5, 64, 300)
SOME = {
    "causal": flexcp.causal(),
    "full": flexcp.full(),
    "window": flexcp.window(9, 3),
    "lambda": flexcp.masks.lambda_(4, 8),
    "shared-question": flexcp.masks.shared_question(3, 0.4),
    "blockwise": flexcp.masks.causal_blockwise(16, 1),
    "chunked": flexcp.masks.chunked(16),
    "prefix": flexcp.masks.prefix(7),
    "modality": flexcp.masks.modality([(0, 1)], self_only=True),
    "tree": flexcp.tree([-1, 0, 1, 0, -1], [100, 0, 50, 50, 100], left=40),
}


def test_every_row_is_tried() -> None:
    assert SOME.keys() == NAMED.keys()


@pytest.mark.parametrize("name", NAMED)
def test_a_mask_is_made_again_from_its_numbers(name: str) -> None:
    """A plan file stores a mask as its name and numbers."""
    kind, mask = NAMED[name], SOME[name]
    assert mask.name == name
    assert kind.make(*kind.arguments(mask.params)) == mask


def test_a_mask_of_several_spans_is_made_again_from_its_numbers() -> None:
    kind, mask = NAMED["modality"], flexcp.masks.modality([(0, 1), (3, 5), (7, 11)])
    assert kind.make(*kind.arguments(mask.params)) == mask


@pytest.mark.parametrize("name", NAMED)
def test_no_document_has_more_slices_than_the_table_says(name: str) -> None:
    counts = [len(SOME[name].slices(length)) for length in LENGTHS if SOME[name].length in (None, length)]
    assert 1 <= max(counts) <= NAMED[name].most_slices(SOME[name], max(LENGTHS))


def test_a_mask_of_more_images_has_more_slices() -> None:
    mask = flexcp.masks.modality([(1, 3), (5, 6), (10, 20)])
    assert len(mask.slices(40)) == NAMED["modality"].most_slices(mask, 40) == 7


def test_chunks_are_as_many_as_a_document_holds() -> None:
    mask = flexcp.masks.chunked(16)
    assert [NAMED["chunked"].most_slices(mask, n) for n in (1, 16, 17, 300)] == [1, 1, 2, 19]
    assert [len(mask.slices(n)) for n in (1, 16, 17, 300)] == [1, 1, 2, 19]
    seen = [(q, k) for q in range(20) for k in range(20) if q // 16 == k // 16 and k <= q]
    rows = mask.slices(20)
    found = [
        (q, k) for a, b, c, d, lo, hi in rows.tolist() for q in range(a, b) for k in range(c, d) if lo <= k - q <= hi
    ]
    assert sorted(found) == seen
    with pytest.raises(ValueError, match="more than 16384"):
        flexcp.masks.chunked(1).slices(20_000)


@pytest.mark.parametrize("name", NAMED)
def test_a_public_function_makes_it(name: str) -> None:
    make = NAMED[name].make
    assert operator.attrgetter(public_name(make).removeprefix("flexcp."))(flexcp) is make


@pytest.mark.parametrize("name", [name for name, kind in NAMED.items() if kind.text])
def test_the_example_of_a_text_form_is_the_mask(name: str) -> None:
    form = NAMED[name].text
    assert form is not None
    found = parse_mask(form.example)
    assert isinstance(found, Mask) and found.name == name
    assert form.signature.partition(":")[0] == form.example.partition(":")[0] == name


def test_the_command_line_shows_all_text_forms() -> None:
    """The command line has a copy of the text forms, because its help must not load NumPy."""
    assert MASKS == MASK_SIGNATURES


@pytest.mark.parametrize("name", NAMED)
def test_a_line_of_code_makes_the_mask(name: str) -> None:
    lines = Lines(
        Training(Preset(Model("some", 512, 3, 99), Shape(8, 2, 64, 64), vocabulary=7)),
        cluster("h100", 1, 2),
        "blocks",
        100,
        100,
        1,
        {"mask": (SOME[name], 3)},
        swap=True,
    )
    (line,) = (line for line in code_lines("pytorch", lines)[1].splitlines() if "masks=" in line)
    call = line.split("masks=")[1].split(", layout=")[0]
    assert eval(call, {"flexcp": flexcp}) == {"mask": (SOME[name], 3)}


def test_a_name_that_is_not_in_the_table_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no mask is called 'spiral'; the named ones are causal, full, window"):
        named_mask("spiral")
    with pytest.raises(ValueError, match="no mask is called 'spiral'"):
        Mask("spiral").slices(3)


def test_a_window_says_in_words_what_it_sees() -> None:
    """The text form counts keys and the function counts tokens before a query, so a bare number would be ambiguous."""
    assert str(parse_mask("window:4096")) == str(window(4095)) == "window of 4,096 keys"
    assert str(window(0)) == "window of 1 key"
    assert str(window(3, 2)) == "window of 3 keys before and 2 keys after"
    assert str(window(None, 2)) == "window of all keys before and 2 keys after"
