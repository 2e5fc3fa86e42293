"""data/summary.py: counts that are those of the sequences, shards of any age, and no hidden state read."""

import json
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from drafters import EMBEDDED_TARGET
from rich.console import Console
from safetensors import safe_open
from test_data_shards import EMPTY, TARGET
from transformers import AutoTokenizer

from data import summary
from data.shard_counts import UNNAMED, count_answers, count_shards, count_there, find_quantile
from data.shards import MANIFEST_NAME, Sequence, ShardWriter, shard_name, write_shard_file
from data.summary_picture import draw
from recipes.errors import UserError
from recipes.manifest import ShardManifest, read_manifest, write_json
from recipes.pictures import write_svg

REPOSITORY = Path(__file__).parent.parent
SOURCES = [["chat", "code", "chat"], ["code"], ["chat", "tools"]]
TEXT = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"


def sequence(seed: int) -> Sequence:
    """Of some answers, each of some tokens."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(30 + 7 * seed, generator=generator) > 0.6
    ids = torch.randint(3, 300, (len(mask),), generator=generator).int()
    return Sequence(ids, mask, torch.zeros(len(mask) - 1, 6).bfloat16())


def write(folder: Path, sources: list[list[str]], *, target: str = "no such folder") -> ShardManifest:
    """The sequences are numbered over all shards."""
    writer = ShardWriter(
        folder, EMPTY.model_copy(update={"target": TARGET.model_copy(update={"model": target})})
    )
    seeds = iter(range(100))
    for number, names in enumerate(sources):
        ids = [f"p{number}{place}" for place in range(len(names))]
        writer.add(write_shard_file(folder, number, [sequence(next(seeds)) for _ in names], ids, names))
    return writer.manifest


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, REPOSITORY / "data" / "summary.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def told(folder: Path) -> str:
    """The summary, without examples."""
    console = Console(record=True, width=120, file=StringIO())
    manifest = read_manifest(folder / MANIFEST_NAME, ShardManifest)
    summary.print_summary(manifest, count_shards(folder, manifest), console)
    return console.export_text()


# Counts


def test_every_source_is_counted_by_its_own_sequences(tmp_path):
    counted = count_shards(tmp_path, write(tmp_path, SOURCES))
    names = [name for shard in SOURCES for name in shard]
    assert list(counted.sources) == ["chat", "code", "tools"]
    for name, found in counted.sources.items():
        own = [sequence(seed) for seed, other in enumerate(names) if other == name]
        assert found.sequences == len(own)
        assert found.lengths == [len(each.token_ids) for each in own]
        assert found.tokens == sum(found.lengths)
        assert found.supervised == [int(each.loss_mask.sum()) for each in own]
        assert found.coverage == sum(found.supervised) / found.tokens
    together = counted.together
    assert (together.sequences, together.tokens) == (6, sum(together.lengths))


@pytest.mark.parametrize(
    ("mask", "answers"),
    [("", 0), ("0", 0), ("1", 1), ("0110", 1), ("1011", 2), ("01010", 2), ("111", 1), ("0001", 1)],
)
def test_an_answer_is_a_stretch_of_supervised_tokens(mask, answers):
    assert count_answers(torch.tensor([each == "1" for each in mask], dtype=torch.bool)) == answers


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.9, 1])
@pytest.mark.parametrize("count", [1, 2, 3, 10, 11])
def test_a_quantile_is_the_least_value_that_enough_do_not_exceed(share, count):
    values = [(7 * number) % 11 for number in range(count)]
    enough = [value for value in values if sum(other <= value for other in values) >= share * count]
    assert find_quantile(values, share) == min(enough)


def test_no_state_is_read(tmp_path, monkeypatch):
    manifest = write(tmp_path, SOURCES)
    asked = []

    class Watched:
        def __init__(self, path, **options):
            self._file = safe_open(path, **options)

        def metadata(self):
            return self._file.metadata()

        def get_tensor(self, name):
            asked.append(name)
            return self._file.get_tensor(name)

    monkeypatch.setattr("data.shards.safe_open", Watched)
    count_shards(tmp_path, manifest)
    assert set(asked) == {"lengths", "token_ids", "loss_mask"}


# Shards of any age and state


def test_shards_without_sources_are_unnamed(tmp_path):
    manifest = write(tmp_path, [["", ""], ["chat"]])
    counted = count_shards(tmp_path, manifest)
    assert {name: each.sequences for name, each in counted.sources.items()} == {UNNAMED: 2, "chat": 1}
    assert len(counted.sources[UNNAMED].lengths) == 2


def test_consumed_shards_are_counted_without_their_files(tmp_path):
    write(tmp_path, SOURCES)
    manifest = read_manifest(tmp_path / MANIFEST_NAME, ShardManifest)
    rounds = [entry.model_copy(update={"round": number}) for number, entry in enumerate(manifest.shards)]
    writer = ShardWriter(tmp_path, manifest.model_copy(update={"shards": rounds}))
    writer.consume_before(2)
    assert count_there(writer.manifest) == 2
    counted = count_shards(tmp_path, writer.manifest, chosen=[0, 1])
    assert {name: each.sequences for name, each in counted.sources.items()} == {
        "chat": 3,
        "code": 2,
        "tools": 1,
    }
    assert [len(each.lengths) for each in counted.sources.values()] == [1, 0, 1]
    assert [each.text.name for each in counted.examples] == ["p20", "p21"]
    text = told(tmp_path)
    assert "2 of them are consumed" in text
    assert [line.split() for line in text.splitlines() if line.split()[:1] == ["code"]][1] == [
        "code",
        *["-"] * 6,
    ]


def test_what_was_dropped_is_told_before_the_end_too(tmp_path):
    manifest = write(tmp_path, SOURCES)
    first = manifest.shards[0].model_copy(
        update={"incomplete": 2, "dropped": {"truncated": 3}, "cut": {"x": 1}}
    )
    unfinished = manifest.model_copy(update={"shards": [first, *manifest.shards[1:]]})
    write_json(tmp_path / MANIFEST_NAME, unfinished)
    assert "dropped so far: incomplete 2, truncated 3" in told(tmp_path)
    assert "ended early so far: x 1" in told(tmp_path)
    ended = unfinished.model_copy(update={"complete": True, "dropped": {"not_utf8": 4}})
    write_json(tmp_path / MANIFEST_NAME, ended)
    assert "dropped: not_utf8 4\n" in told(tmp_path)


def test_a_folder_without_a_shard_is_told_of(tmp_path):
    write_json(tmp_path / MANIFEST_NAME, EMPTY)
    assert "0 shards" in told(tmp_path)
    with pytest.raises(UserError, match="no sequence in these shards"):
        draw(count_shards(tmp_path, EMPTY))


@pytest.mark.parametrize("damage", ["missing", "truncated", "fewer"])
def test_a_damaged_shard_is_named(tmp_path, damage):
    manifest, path = write(tmp_path, SOURCES), tmp_path / shard_name(0)
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-9])
    else:
        (tmp_path / shard_name(1)).rename(path)
    with pytest.raises(UserError, match=shard_name(0)):
        count_shards(tmp_path, manifest)


# Examples


def test_supervised_tokens_are_marked_and_the_others_are_not(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    manifest = write(tmp_path, [["chat"]], target=str(EMBEDDED_TARGET))
    (example,) = count_shards(tmp_path, manifest, [0]).examples
    asked, answer = (
        tokenizer.encode(text, add_special_tokens=False) for text in (TEXT, "So.\x1b[2J<|im_end|>")
    )
    mask = torch.tensor([False] * len(asked) + [True] * len(answer) + [False] * len(asked))
    text = replace(example.text, token_ids=torch.tensor([*asked, *answer, *asked]), loss_mask=mask)
    show = summary.find_show(None, manifest, Console())
    line = summary.highlight(replace(example, text=text), show, with_marks=True)
    assert line.plain == f"{TEXT}⟦So.\\x1b[2J<|im_end|>⟧{TEXT}"
    (span,) = line.spans
    assert line.plain[span.start : span.end] == "⟦So.\\x1b[2J<|im_end|>⟧"


def test_a_long_stretch_is_shown_by_its_ends_and_says_what_is_between(tmp_path):
    (example,) = count_shards(tmp_path, write(tmp_path, [["chat"]]), [0]).examples
    ids = torch.arange(130)
    for length, between in ((120, None), (121, 1), (130, 10)):
        text = replace(example.text, token_ids=ids[:length], loss_mask=torch.ones(length, dtype=torch.bool))
        shown = summary.highlight(replace(example, text=text), summary.show_ids, with_marks=False).plain
        numbers = [int(word) for word in shown.split() if word.isdigit()]
        assert (f"[{between} tokens]" in shown) == (between is not None)
        assert numbers == [*range(60), *range(60 + (between or 0), length)]


# The command


def test_the_command_tells_prints_and_draws_the_same_each_time(tmp_path):
    write(tmp_path / "shards", SOURCES)
    found = [
        run(tmp_path / "shards", "--examples", 2, "--seed", 1, "--out", tmp_path / f"{n}.svg") for n in "ab"
    ]
    assert [each.returncode for each in found] == [0, 0], found[0].stderr
    assert found[0].stdout.replace("a.svg", "") == found[1].stdout.replace("b.svg", "")
    assert "token ids are shown: model 'no such folder': found no such folder" in found[0].stdout
    assert found[0].stdout.count("supervised in") == 2
    assert "⟦" in found[0].stdout
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_other_counts_make_another_picture(tmp_path):
    manifest = write(tmp_path, SOURCES)
    counted = count_shards(tmp_path, manifest)
    write_svg(draw(counted), tmp_path / "one.svg")
    counted.sources["chat"].lengths[0] += 60
    write_svg(draw(counted), tmp_path / "other.svg")
    assert (tmp_path / "one.svg").read_bytes() != (tmp_path / "other.svg").read_bytes()


def test_what_is_no_folder_of_shards_is_a_mistake_told_in_a_line(tmp_path):
    write(tmp_path / "cut", SOURCES)
    path = tmp_path / "cut" / MANIFEST_NAME
    path.write_text(path.read_text()[:200])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / MANIFEST_NAME).write_text(json.dumps({"schema_version": 1, "step": 3}))
    for name, said in (("none", "found no such file"), ("cut", "damaged"), ("other", "not a ShardManifest")):
        with pytest.raises(UserError, match=said):
            summary.main(tmp_path / name)
    found = run(tmp_path / "cut")
    assert (found.returncode, found.stdout) == (2, "")
    assert "Traceback" not in found.stderr
    with pytest.raises(UserError, match=r"--tokenizer .*: expected a tokenizer's folder"):
        write(tmp_path / "good", SOURCES)
        summary.main(tmp_path / "good", tokenizer=str(tmp_path))
