"""data/rows.py, data/sources.py: every good row comes, every bad one is named, whatever the file."""

import gzip
import json
import tracemalloc
from pathlib import Path

import httpx
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from pydantic import ValidationError

from data import rows
from data.rows import BrokenFileError, read_rows
from data.skips import Skips
from data.sources import read_source
from recipes.errors import MachineError, UserError
from recipes.schema import Source

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GOOD = [{"prompt": f"question {number} é\u2028"} for number in range(8)]
BAD = {  # reason -> a line
    "no_messages": b'{"messages": []}',
    "system_only": b'{"messages": [{"role": "system", "content": "s"}]}',
    "assistant_first": b'{"messages": [{"role": "assistant", "content": "a"}]}',
    "not_alternating": b'{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}',
    "null_content": b'{"messages": [{"role": "user", "content": null}]}',
    "wrong_type": b'{"prompt": 7}',
    "unknown_role": b'{"messages": [{"role": "robot", "content": "x"}]}',
    "zero_length_response": b'{"prompt": "q", "response": ""}',
    "not_utf8": b'{"prompt": "caf\xe9 \xff"}',
}


def encode(row: object) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode()


def write_lines(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"\n".join(lines))
    return path


def read(path: Path, **options: object) -> tuple[list[str], Skips]:
    """The user's first turns, and what was left out."""
    skips = Skips("s")
    found = list(read_source(Source(path=path, **options), skips))  # type: ignore[arg-type]
    return [conversation.messages[0]["content"] for _, conversation in found], skips


def asked(good: list[dict]) -> list[str]:
    return [row["prompt"] for row in good]


# Every defect, in files of every kind


@pytest.mark.parametrize("reason", [*BAD, "not_json"])
def test_a_bad_line_is_counted_and_named_and_the_good_ones_are_there(tmp_path, reason):
    bad = BAD.get(reason, b'{"prompt": "trunc')
    path = write_lines(tmp_path / "a.jsonl", *map(encode, GOOD[:3]), bad, *map(encode, GOOD[3:]), bad)
    texts, skips = read(path)
    assert texts == asked(GOOD)
    assert skips.counts == {reason: 2}
    assert skips.num_rows == len(GOOD) + 2
    assert [place.split(":")[0] for place in skips.shown[reason]] == ["line 4", "line 10"]
    assert f"2 of 10 rows are left out\n  {reason} 2: line 4: " in skips.describe()


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_row_of_a_json_list_is_counted_and_named(tmp_path, reason):
    lines = [encode(GOOD[0]), BAD[reason], *map(encode, GOOD[1:])]
    path = tmp_path / "a.json"
    path.write_bytes(b'{"version": 1, "data": [' + b",\n ".join(lines) + b"]}")
    texts, skips = read(path)
    assert texts == asked(GOOD)
    assert skips.counts == {reason: 1}
    assert skips.shown[reason][0].startswith("row 2: ")


def test_all_defects_in_one_file_are_counted_and_the_first_of_each_shown(tmp_path):
    bad = list(BAD.values()) * 5
    texts, skips = read(write_lines(tmp_path / "a.jsonl", *bad, *map(encode, GOOD)))
    assert texts == asked(GOOD)
    assert skips.counts == dict.fromkeys(BAD, 5)
    assert {len(shown) for shown in skips.shown.values()} == {3}
    assert skips.describe().count("and 2 more") == len(BAD)


def test_a_huge_line_is_left_out_and_not_held(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "MOST_BYTES", 1000)
    huge = encode({"prompt": "x" * 100_000})
    texts, skips = read(write_lines(tmp_path / "a.jsonl", encode(GOOD[0]), huge, encode(GOOD[1]), huge))
    assert texts == asked(GOOD[:2])
    assert [shown.split(",")[0] for shown in skips.shown["huge_line"]] == ["line 2: 100", "line 4: 100"]


@pytest.mark.parametrize("length", [999, 1000, 1001])
def test_the_longest_line_that_is_read_has_most_bytes(tmp_path, monkeypatch, length):
    monkeypatch.setattr(rows, "MOST_BYTES", 1000)
    line = encode({"prompt": "x"})
    line = line.replace(b"x", b"x" * (length - len(line)))  # its end of line makes it `length`
    texts, skips = read(write_lines(tmp_path / "a.jsonl", line, encode(GOOD[0])))
    assert len(texts) == (2 if length <= 1000 else 1)
    assert skips.counts.total() == (length > 1000)


def test_text_is_a_turn_a_line(tmp_path):
    path = write_lines(tmp_path / "a.txt", b"\xef\xbb\xbfone", b"", b"caf\xe9", "zwei é\r".encode())
    texts, skips = read(path)
    assert texts == ["one", "zwei é"]
    assert skips.counts == {"not_utf8": 1}
    assert skips.shown["not_utf8"][0].startswith("line 3: ")
    assert skips.shown["not_utf8"][0].endswith("at byte 11")


def test_rows_of_parquet_come_without_what_arrow_fills_up(tmp_path):
    chats = [
        [{"role": "user", "content": "q"}],
        [
            {"role": "user", "content": "r", "name": None},
            {"role": "assistant", "content": "a", "tool_calls": []},
        ],
        [{"role": "robot", "content": "x"}],
    ]
    parquet.write_table(pa.table({"messages": chats, "prompt": [None] * 3}), tmp_path / "a.parquet")
    texts, skips = read(tmp_path / "a.parquet")
    assert texts == ["q", "r"]
    assert skips.shown["unknown_role"][0].startswith("row 3: ")


def test_a_text_of_parquet_that_is_not_utf8_takes_no_other_with_it(tmp_path):
    texts = pa.array([b"a", b"caf\xe9", b"b"]).view(pa.string())  # Arrow does not look
    parquet.write_table(pa.table({"prompt": texts}), tmp_path / "a.parquet")
    found, skips = read(tmp_path / "a.parquet")
    assert found == ["a", "b"]
    assert skips.shown["not_utf8"][0].startswith("row 2: ")


def test_a_source_without_one_conversation_is_refused_with_the_reasons(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", *BAD.values())
    with pytest.raises(UserError, match=rf"found none in {len(BAD)}\n(.|\n)*unknown_role 1: line 7"):
        read(path)


# Files that break off


def break_json(path: Path) -> int:
    """Writes a list whose fourth row is cut; how long the file is."""
    whole = b"[" + b", ".join(map(encode, GOOD))
    path.write_bytes(whole[: whole.index(b"question 3") + 4])
    return path.stat().st_size


def test_truncated_json_names_the_byte_and_offers_to_keep_whole_rows(tmp_path):
    path = tmp_path / "a.json"
    size = break_json(path)
    with pytest.raises(UserError, match=f"breaks at byte {size:,}: it ends") as caught:
        read(path)
    assert "keep the 3 whole rows" in str(caught.value)
    assert f"{{path: {path}, keep_whole_rows: true}}" in str(caught.value)
    texts, skips = read(path, keep_whole_rows=True)
    assert texts == asked(GOOD[:3])
    assert f"byte {size:,}" in skips.shown["broken_file"][0]


def test_json_that_is_wrong_in_the_middle_names_the_byte(tmp_path):
    path = tmp_path / "a.json"
    start = b"[" + encode(GOOD[0]) + b", "
    path.write_bytes(start + b'{"prompt" "no colon"}, ' + encode(GOOD[1]) + b"]" + b" " * 100)
    with pytest.raises(UserError, match=f"breaks at byte {len(start) + 10}: Expecting ':'"):
        read(path)
    assert read(path, keep_whole_rows=True)[0] == asked(GOOD[:1])


def test_truncated_parquet_says_that_its_index_is_gone(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_pylist(GOOD), path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UserError, match=f"breaks at byte {path.stat().st_size}: .*index.*get the file again"):
        read(path)


def test_parquet_damaged_inside_keeps_the_row_groups_before(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_pylist(GOOD), path, row_group_size=3, use_dictionary=False)
    column = parquet.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    start = column.data_page_offset
    content[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"breaks at byte {start}: row group 2: .*keep the 3 whole rows"):
        read(path)
    assert read(path, keep_whole_rows=True)[0] == asked(GOOD[:3])


def test_truncated_gzip_keeps_whole_rows(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    lines = [{"prompt": f"{number} {number**9}"} for number in range(5000)]
    path.write_bytes(gzip.compress(b"\n".join(map(encode, lines)))[:-2000])
    with pytest.raises(
        UserError, match=r"breaks at byte .* counted in the text that a\.jsonl\.gz unpacks to"
    ):
        read(path)
    texts = read(path, keep_whole_rows=True)[0]
    assert 0 < len(texts) < 5000
    assert texts == asked(lines[: len(texts)])


def test_a_missing_file_is_refused(tmp_path):
    for name in ("gone.jsonl", "gone.json", "gone.parquet", "gone"):
        with pytest.raises(UserError, match=rf"{name}.*cannot read it"):
            read(tmp_path / name)


# The same rows, whatever the file


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.ndjson", "a.json", "b.json", "c.json", "a.parquet", "a.jsonl.gz", "a"]
)
def test_the_same_rows_come_from_files_of_every_kind(tmp_path, name):
    path, lines = tmp_path / name, b"\n".join(map(encode, GOOD))
    if name == "a.json":
        path.write_text(json.dumps(GOOD, indent=1))
    elif name == "b.json":
        path.write_text(json.dumps({"split": ["train"], "data": GOOD}))
    elif name == "a.parquet":
        parquet.write_table(pa.Table.from_pylist(GOOD), path, row_group_size=3)
    else:  # c.json is JSON lines under another name
        path.write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
    assert [row for _, row in read_rows(path)] == GOOD
    assert read(path)[0] == asked(GOOD)


def test_a_folder_gives_the_rows_of_its_files_by_name(tmp_path):
    write_lines(tmp_path / "b.jsonl", encode(GOOD[1]), b"{")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.json").write_text(json.dumps(GOOD[:1]))
    (tmp_path / ".cache").mkdir()
    write_lines(tmp_path / ".cache" / "c.jsonl", encode(GOOD[2]))
    write_lines(tmp_path / "LICENSE.txt", b"not a prompt")
    texts, skips = read(tmp_path)
    assert texts == asked(GOOD[:2])
    assert skips.shown["not_json"][0].startswith("b.jsonl line 2: ")


def test_a_folder_of_text_alone_is_read_and_an_empty_one_refused(tmp_path):
    with pytest.raises(UserError, match=r"found no \.jsonl"):
        read(tmp_path)
    write_lines(tmp_path / "a.txt", b"q")
    assert read(tmp_path)[0] == ["q"]


def test_a_limit_reads_no_further(tmp_path):
    path = tmp_path / "a.json"
    break_json(path)
    assert read(path, limit=2)[0] == asked(GOOD[:2])


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@settings(deadline=None)  # files
@given(
    content=st.lists(values, max_size=6),
    indent=st.sampled_from([None, 2]),
    is_ascii=st.booleans(),
    size=st.integers(1, 9),
)
def test_a_list_read_in_pieces_is_the_list_read_at_once(tmp_path_factory, content, indent, is_ascii, size):
    path = tmp_path_factory.mktemp("pieces") / "a.json"
    text = json.dumps(content, indent=indent, ensure_ascii=is_ascii)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_CHUNK_BYTES", size)
        found = [row for _, row in read_rows(path)]
        assert json.dumps(found) == json.dumps(
            json.loads(path.read_bytes().decode("utf-8", "surrogateescape"))
        )


@settings(deadline=None)  # files
@given(cut=st.integers(0, 120), size=st.integers(1, 9))
def test_a_list_cut_anywhere_gives_the_rows_that_are_whole(tmp_path_factory, cut, size):
    whole = json.dumps([{"a": [number, "é\\"]} for number in (12, 3, 45)], ensure_ascii=False).encode()
    path = tmp_path_factory.mktemp("cut") / "a.json"
    path.write_bytes(whole[:cut])
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_CHUNK_BYTES", size)
        if cut >= len(whole):
            found += [row for _, row in read_rows(path)]
        elif cut:
            with pytest.raises(BrokenFileError, match="breaks at byte"):
                for _, row in read_rows(path):
                    found.append(row)
    expected = json.loads(whole)
    ends = [len(json.dumps(expected[:count], ensure_ascii=False).encode()) - 1 for count in (1, 2, 3)]
    assert found == (expected[: sum(cut >= end for end in ends)] if cut else [])


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path, name):
    content = [{"prompt": f"{number} " + "x" * 2000} for number in range(20_000)]
    path = tmp_path / name
    if name == "a.parquet":
        parquet.write_table(pa.Table.from_pylist(content), path, compression="none", use_dictionary=False)
    else:
        path.write_bytes(b"\n".join(map(encode, content)) if name == "a.jsonl" else encode(content))
    del content
    tracemalloc.start()
    assert sum(1 for _ in read_rows(path)) == 20_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.stat().st_size / 4  # of 40 MB


# The hub


def test_the_hub_needs_a_commit():
    with pytest.raises(ValidationError, match="hub without revision"):
        Source(hub="a/b")
    with pytest.raises(ValidationError, match="pattern"):
        Source(hub="a/b", revision="main")
    with pytest.raises(ValidationError, match="path and hub"):
        Source(hub="a/b", revision=COMMIT, path="p")


def test_a_data_set_is_streamed_at_its_commit(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked_for = []

    def load_dataset(name, subset, **options):
        asked_for.append((name, subset, options))
        return datasets.Dataset.from_list([*GOOD, {"prompt": ""}]).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    skips = Skips("s")
    source = Source(hub="a/b", revision=COMMIT, split="test", subset="en", columns={"question": "prompt"})
    found = [each.messages[0]["content"] for _, each in read_source(source, skips)]
    assert found == asked(GOOD)
    assert skips.shown == {"empty_content": ["row 9: ''"]}
    assert asked_for == [("a/b", "en", {"split": "test", "revision": COMMIT, "streaming": True})]


def test_a_stream_that_ends_is_the_machines_fault_and_says_where(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(*_, **__):
        yield from GOOD[:5]
        raise httpx.ReadError("reset")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(MachineError, match=r"a/b at 0123.* ended after 5 rows \(reset\)"):
        list(read_source(Source(hub="a/b", revision=COMMIT), Skips("s")))


def test_a_folder_is_streamed_as_from_the_hub_and_a_wrong_split_is_the_users_mistake(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "train.jsonl").write_bytes(b"\n".join(map(encode, GOOD)))
    source = Source(hub=str(tmp_path), revision=COMMIT)
    assert [each.messages[0]["content"] for _, each in read_source(source, Skips("s"))] == asked(GOOD)
    with pytest.raises(UserError, match="split tset"):
        list(read_source(source.model_copy(update={"split": "tset"}), Skips("s")))
