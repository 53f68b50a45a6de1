"""Tests of document lengths: every text form of ``--lengths``, wrong forms that are refused, and that the named
distributions are as documented.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexcp.data import dataset_lengths
from flexcp.data.document_lengths import document_lengths
from flexcp.data.lengths import DISTRIBUTIONS, cut_batches, draw_lengths, jsonl_lengths, parse_lengths

# The documented range of a document's length. The last document of a batch is cut to fill the budget, and documents of
# "web" are also cut at a quarter of the budget.
BOUNDS = {
    "web": (1, 196_608),
    "wikipedia": (2, 255_988),
    "libra256k": (1, 262_144),
    "libra1m": (1, 1_048_576),
    "lognormal16k": (1_024, 524_288),
    "bimodal": (1_024, 524_288),
    "longalign": (8_192, 65_536),
    "longtail": (64, 131_072),
    "video": (2_048, 131_072),
    "images": (256, 4_096),
    "equal": (8_192, 8_192),
}


def many(name: str, count: int = 30_000) -> np.ndarray:
    """Lengths of ``count`` documents, none of them cut by a budget."""
    rng = np.random.default_rng(7)
    return np.array([DISTRIBUTIONS[name](rng, 1 << 40) for _ in range(count)])


def test_every_distribution_has_documented_bounds() -> None:
    assert set(BOUNDS) == set(DISTRIBUTIONS)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("tokens", [1, 1_000, 131_072, 1_000_003])
def test_a_batch_is_exactly_the_budget(name: str, tokens: int) -> None:
    for seed in range(3):
        found = draw_lengths(name, tokens, seed)
        assert sum(found) == tokens
        assert min(found) >= 1
        assert all(type(n) is int for n in found)
        low, high = BOUNDS[name]
        assert max(found) <= high
        assert all(n >= low for n in found[:-1]) or name == "web"


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_seed_is_a_batch(name: str) -> None:
    batches = [draw_lengths(name, 2_000_000, seed) for seed in range(3)]
    assert batches == [draw_lengths(name, 2_000_000, seed) for seed in range(3)]
    if name != "equal":
        assert all(a != b for a, b in itertools.combinations(batches, 2))
    assert draw_lengths(name, 2_000_000) == batches[0]


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_documents_stay_within_the_documented_bounds_and_use_them(name: str) -> None:
    found = many(name)
    low, high = BOUNDS[name]
    assert found.min() >= low
    assert found.max() <= high
    assert found.max() > high / 4, "the longest documents are missing"


def test_web_documents_are_cut_at_a_quarter_of_the_budget() -> None:
    cut = [n for seed in range(40) for n in draw_lengths("web", 8_192, seed)]
    assert max(cut) == 2_048
    assert max(draw_lengths("web", 3, 0)) == 1


def test_web_follows_the_published_bins() -> None:
    found = many("web", 60_000)
    total = 13_463_214
    for longest, below in (
        (50, 421_442),
        (500, 6_293_530),
        (1_024, 9_610_315),
        (4_096, 12_705_406),
        (32_768, 13_403_989),
    ):
        assert np.mean(found <= longest) == pytest.approx(below / total, abs=0.01)
    assert np.mean(found > 32_768) == pytest.approx(59_225 / total, rel=0.25)


def test_wikipedia_follows_the_published_percentiles() -> None:
    found = many("wikipedia")
    for share, length in ((25, 146), (50, 350), (75, 868), (90, 2_146), (99, 11_050)):
        assert np.percentile(found, share) == pytest.approx(length, rel=0.08)


@pytest.mark.parametrize(
    ("name", "published"), [("libra256k", (607, 1_313, 33_330)), ("libra1m", (644, 1_432, 71_006))]
)
def test_libra_follows_the_published_percentiles(name: str, published: tuple[int, ...]) -> None:
    found = np.percentile(many(name, 60_000), [50, 75, 99])
    assert found == pytest.approx(published, rel=0.12)


@pytest.mark.parametrize(
    ("name", "mean"), [("lognormal16k", 16_384), ("bimodal", 40_960), ("longalign", 20_000), ("images", 1_024)]
)
def test_lognormal_sets_have_their_mean(name: str, mean: int) -> None:
    assert many(name, 10_000).mean() == pytest.approx(mean, rel=0.08)


def test_bimodal_has_two_modes() -> None:
    found = many("bimodal", 10_000)
    near, between, far = (np.mean((found > a) & (found < b)) for a, b in ((9e3, 2e4), (2.6e4, 3.7e4), (4.5e4, 9e4)))
    assert near > between < far
    assert near == pytest.approx(0.33, abs=0.08)


def test_equal_is_the_control() -> None:
    assert draw_lengths("equal", 20_000) == [8_192, 8_192, 3_616]


# --- text forms -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7", [7]),
        ("4096,800,1", [4096, 800, 1]),
        (" 5 , 6", [5, 6]),
        ("3x20", [20, 20, 20]),
        ("2x5,7,1x3", [5, 5, 7, 3]),
        ("64x2048", [2048] * 64),
        ("equal:10000:4", [8192, 1808]),
        ("equal:100", [100]),
        ("4k,32K,1m,7", [4096, 32_768, 1_048_576, 7]),
        ("2x2k", [2048, 2048]),
        ("equal:16k:0", [8192, 8192]),
    ],
)
def test_text_forms(text: str, expected: list[int]) -> None:
    assert parse_lengths(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("4,096", ["'096' begins with a zero", "write 4096 if 4,096 is one number, or 96 without the zero"]),
        ("1,000,000", ["'000'", "write 1000000 if 1,000,000 is one number"]),
        ("64x2,048", ["write 64x2048 if 64x2,048 is one number, or 48 without the zero"]),
        ("1,024x8", ["write 1024x8 if 1,024x8 is one number, or 24x8 without the zero"]),
        ("800,16,048,7", ["write 16048 if 16,048 is one number, or 48 without the zero"]),
        ("4096, 096", ["write 96 without the zero if it is a document"]),
        ("7,0000", ["'0000' begins with a zero", "write 4096,4k,1"]),
    ],
)
def test_thousands_separators_are_refused_where_they_are_certain(text: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        parse_lengths(text)
    assert not [word for word in (repr(text), *words) if word not in str(caught.value)], str(caught.value)


def test_what_may_be_two_lengths_is_two() -> None:
    assert parse_lengths("12,345") == [12, 345]
    assert parse_lengths("0096,7") == [96, 7]


def test_a_long_list_is_a_list() -> None:
    """The text is longer than any file name may be, so it must not be looked up as a file."""
    lengths = list(range(1, 400))
    assert parse_lengths(",".join(map(str, lengths))) == lengths


def test_a_named_distribution_is_drawn() -> None:
    assert parse_lengths("web:8192:3") == draw_lengths("web", 8192, 3)
    assert parse_lengths("web:8192") == draw_lengths("web", 8192, 0)


def test_files_by_sign_and_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lengths.txt").write_text("12\n7\n\n  4k\n")
    for text in (f"@{tmp_path}/lengths.txt", f"{tmp_path}/lengths.txt"):
        assert parse_lengths(text) == [12, 7, 4096]
    monkeypatch.chdir(tmp_path)
    assert parse_lengths("lengths.txt") == [12, 7, 4096]
    (tmp_path / "42").write_text("1")
    assert parse_lengths("42") == [42], "a number is a length, whatever files there are"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["''", "is not a length", "64x2048"]),
        ("5,,6", ["''", "'5,,6'"]),
        ("ten", ["'ten'", "web:131072:0"]),
        ("5;6", ["'5;6'"]),
        ("2x", ["'2x'"]),
        ("axb", ["'axb'"]),
        ("1.5", ["'1.5'", "is not a length"]),
        ("1.5k", ["'1.5k'"]),
        ("k", ["'k'"]),
        ("lenghts.txt", ["the file lenghts.txt does not exist", "@file"]),
        ("data/mine", ["the file data/mine does not exist"]),
        ("lenghts", ["'lenghts' is not a length, and there is no such file"]),
        ("web", ["needs a token budget and a seed", "web:131072:0"]),
        ("99999999999x4096", ["99,999,999,999 documents are too many"]),
        ("web:many:0", ["'web:many:0'", "token budget and a seed"]),
        ("web:100:x", ["'web:100:x'", "token budget and a seed"]),
        ("web:100:0:7", ["'web:100:0:7'"]),
        ("web:100:-1", ["-1"]),
        ("wep:100:0", ["'wep'", "did you mean 'web'?"]),
        ("zzzz:100:0", ["'zzzz'", ", ".join(DISTRIBUTIONS)]),
        ("0x5", ["'0x5'", "0 is not a number of documents", "at least 1"]),
        ("-1x5", ["'-1x5'", "-1 is not a number of documents", "at least 1"]),
        ("4096,0", ["'4096,0'", "0 is not a length", "at least 1"]),
        ("4096,-8", ["-8 is not a length"]),
        ("3x0", ["0 is not a length"]),
        ("0,5,9", ["0 is not a length", "no running totals"]),
        ("web:0:0", ["at least 1 token", "got 0"]),
        ("web:-8:0", ["at least 1 token", "got -8"]),
        ("web:99999999999:0", ["99,999,999,999 tokens are too many", "at most 68,719,476,736"]),
        ("@/no/such/file", ["/no/such/file", "No such file"]),
    ],
)
def test_wrong_text_is_refused(text: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        parse_lengths(text)
    assert not [w for w in words if w not in str(caught.value)], str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["holds no lengths", "one number a line"]),
        (b" \n\n", ["holds no lengths"]),
        (b"12\nabc\n", ["line 2", "'abc'", "one number a line"]),
        (b"1.5\n", ["line 1", "'1.5'"]),
        (b"7\n\n9\n0\n", ["line 4", "'0'", "at least 1"]),
        (b"     16 512\n      2 4096\n", ["line 1", "'16 512'", "one number a line"]),
        (b"7\n-3\n", ["line 2", "'-3'"]),
        (b"\xff\xfe\x00\x81", ["not a text file"]),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, content: bytes, words: list[str]) -> None:
    path = tmp_path / "lengths"
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        parse_lengths(f"@{path}")
    assert not [w for w in (str(path), *words) if w not in str(caught.value)], str(caught.value)


@pytest.mark.parametrize("content", ["0", "-3", "[]", '{"length": 0}', '{"input_ids": []}'])
def test_json_lines_below_one_token_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text(f"7\n{content}\n")
    number = content if content == "-3" else "0"
    with pytest.raises(ValueError, match=rf"line 2 has a document of {number} tokens; .* at least 1 token"):
        parse_lengths(f"@{path}")


def test_a_byte_order_mark_is_no_part_of_a_length(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_bytes(b"\xef\xbb\xbf2728\r\n9\r\n")
    assert parse_lengths(f"@{path}") == [2728, 9]


def test_batches_of_a_data_set_are_cut_in_order() -> None:
    assert cut_batches([30, 30, 30, 30, 30], 70) == [[30, 30], [30, 30]]
    assert cut_batches([30, 30, 30, 30, 30, 10], 70) == [[30, 30], [30, 30], [30, 10]]
    assert cut_batches([500, 1, 69], 70) == [[500], [1, 69]]
    assert cut_batches([5], 70) == [[5]]


def test_a_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="inside is a folder"):
        parse_lengths("inside")
    with pytest.raises(ValueError, match=r"lengths '.*': .* is a folder; name a file in it"):
        parse_lengths(str(tmp_path))
    with pytest.raises(ValueError, match=r"cannot read lengths.*directory"):
        parse_lengths(f"@{tmp_path}")


# --- files of JSON and datasets ---------------------------------------------------------------------------------------


def test_jsonl_lengths(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"length": 7}\n{"tokens": [1, 2, 3]}\n\n{"input_ids": [4]}\n12\n[1, 2]\n')
    assert jsonl_lengths(file) == parse_lengths(f"@{file}") == [7, 3, 1, 12, 2]
    file.write_text('{"n": 4, "length": 9}\n{"n": [1, 2], "length": 9}\n')
    assert jsonl_lengths(str(file), "n") == [4, 2]
    file.write_text('\ufeff{"input_ids": [1, 2], "length": 2}\n')
    lines = file.rename(tmp_path / "data.ndjson")
    found = jsonl_lengths(lines), parse_lengths(str(lines)), document_lengths(str(lines), None, None)
    assert found == ([2], [2], [2]), "one length a document for all commands, behind a byte order mark too"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"length": 7}\n{"size": 3}\n',
            "line 2 has no input_ids or tokens or length; it has size: .*--field.* advise alone",
        ),
        ('{"text": "some words"}\n', "it has text: give lengths or .*texts .--tokenizer.* by flexcp advise alone"),
        ('{"parents": [-1], "lengths": [7]}\n', "it has parents, lengths: .*trees .*are read by flexcp advise alone"),
        ('"some words"\n', "'some words' is neither a length nor a list of tokens; texts .*flexcp advise alone"),
        ("{length: 7}\n", "line 1 is not JSON"),
        ('{"length": 7.5}\n', "'7.5' is neither a length nor a list of tokens"),
        ('{"input_ids": [[1, 2, 3]]}\n', "holds a list of lists, but a document is one list of token ids"),
        ('[{"length": 5}]\n', "holds a list of objects, but a document is one list of token ids"),
        ('{"length": true}\n', "'True' is neither"),
        ("\n", "holds no lengths"),
    ],
)
def test_jsonl_mistakes_name_the_line(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        parse_lengths(f"@{file}")


def test_a_data_set_by_name_is_for_advise() -> None:
    with pytest.raises(
        ValueError, match=r"^lengths 'hf:some/data:train': .*hf: data sets are read by flexcp advise alone"
    ):
        parse_lengths("hf:some/data:train")


def test_lengths_of_a_hugging_face_dataset() -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"input_ids": [[1, 2, 3], [4], [5, 6]], "size": [3, 1, 2], "text": ["a", "b", "c"]}
    dataset = datasets.Dataset.from_dict(rows)
    assert dataset_lengths(dataset).tolist() == [3, 1, 2]
    assert dataset_lengths(dataset, "size").tolist() == [3, 1, 2]
    assert dataset_lengths(dataset.select([2, 0])).tolist() == [2, 3]
    with pytest.raises(ValueError, match="no column 'ids'"):
        dataset_lengths(dataset, "ids")
    with pytest.raises(ValueError, match="neither lists nor whole numbers"):
        dataset_lengths(dataset, "text")
    with pytest.raises(ValueError, match="say which column"):
        dataset_lengths(dataset.remove_columns("input_ids"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            {"input_ids": [5, 6, 7, 0, 0], "attention_mask": [1, 1, 1, 0, 0]},
            "line 2 is padded: its attention_mask is 0 at token 3, and pads would count as tokens",
        ),
        ({"length": 1036, "input_ids": [1, 2, 3]}, "line 2 has a list of 3 token ids, but its length is 1,036"),
    ],
)
def test_lines_that_say_another_count_than_their_ids_are_refused(
    tmp_path: Path, line: dict[str, Any], words: str
) -> None:
    file = tmp_path / "d.jsonl"
    whole = {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "length": 3}
    file.write_text("\n".join(map(json.dumps, [whole, line])))
    for read in (lambda: parse_lengths(f"@{file}"), lambda: document_lengths(str(file), None, None)):
        with pytest.raises(ValueError, match=words):
            read()
    file.write_text(json.dumps(whole))
    assert parse_lengths(f"@{file}") == document_lengths(str(file), None, None) == [3]
    file.write_text(json.dumps({"length": 1036, "input_ids": [1, 2, 3]}))
    assert jsonl_lengths(file, "input_ids") == document_lengths(str(file), None, "input_ids") == [3]
