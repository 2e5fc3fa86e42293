"""data/shards.py: what was written is what is read, and a damaged shard is named."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data.shards import (
    MANIFEST_NAME,
    Sequence,
    ShardWriter,
    open_shards,
    shard_name,
    write_shard_file,
)
from recipes.errors import UserError
from recipes.manifest import ShardManifest, TargetIdentity, read_manifest

WIDTH = 6
TARGET = TargetIdentity(
    model="m", fingerprint="0" * 64, dtype="bfloat16", hidden_size=3, vocab_size=9, num_hidden_layers=4
)
EMPTY = ShardManifest(
    target=TARGET,
    recipe={},
    provenance={},
    target_layer_ids=[0, 2],
    hidden_size=3,
    dtype="bfloat16",
    shards=[],
    dropped={},
    complete=False,
)


def sequence(seed: int) -> Sequence:
    generator = torch.Generator().manual_seed(seed)
    length = int(torch.randint(2, 9, (1,), generator=generator))
    return Sequence(
        torch.randint(0, 9, (length,), generator=generator).int(),
        torch.arange(length) >= length // 2,
        torch.randn(length - 1, WIDTH, generator=generator).bfloat16(),
    )


def with_final(each: Sequence) -> Sequence:
    generator = torch.Generator().manual_seed(int(each.token_ids.sum()))
    return replace(each, final=torch.randn(len(each.token_ids) - 1, 3, generator=generator).bfloat16())


def write(folder: Path, *sizes: int) -> ShardWriter:
    writer = ShardWriter(folder, EMPTY)
    seeds = iter(range(100))
    for number, size in enumerate(sizes):
        sequences = [sequence(next(seeds)) for _ in range(size)]
        writer.add(write_shard_file(folder, number, sequences, [f"p{i}" for i in range(size)]))
    return writer


def check_equal(found: Sequence, expected: Sequence) -> None:
    assert torch.equal(found.token_ids, expected.token_ids)
    assert torch.equal(found.loss_mask, expected.loss_mask)
    assert torch.equal(found.hidden, expected.hidden)
    assert found.token_ids.dtype == torch.int32
    assert found.hidden.dtype == torch.bfloat16


def test_sequences_come_back_as_they_were_across_shards(tmp_path):
    write(tmp_path, 4, 0, 1, 3)
    shards = open_shards(tmp_path)
    assert len(shards) == 8
    for index in [7, 0, 3, 4, 5, 6, 2, 1]:
        check_equal(shards[index], sequence(index))
    with pytest.raises(IndexError):
        shards[8]


def test_the_manifest_counts_what_is_there(tmp_path):
    write(tmp_path, 4)
    (entry,) = read_manifest(tmp_path / MANIFEST_NAME, ShardManifest).shards
    sequences = [sequence(seed) for seed in range(4)]
    assert entry.sequences == 4
    assert entry.tokens == sum(len(each.token_ids) for each in sequences)
    assert entry.supervised_tokens == sum(int(each.loss_mask.sum()) for each in sequences)


@pytest.mark.parametrize("cut", [1, 1000])
def test_a_truncated_shard_is_named(tmp_path, cut):
    write(tmp_path, 2, 30)
    path = tmp_path / shard_name(1)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(UserError, match=r"shard-00001.*remove this file"):
        open_shards(tmp_path)


def test_a_shard_with_one_bit_changed_is_named(tmp_path):
    write(tmp_path, 2)
    path = tmp_path / shard_name(0)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="shard-00000"):
        open_shards(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    write(tmp_path, 2, 2)
    (tmp_path / shard_name(1)).unlink()
    with pytest.raises(UserError, match=r"shard-00001.*run data/regenerate\.py"):
        open_shards(tmp_path)


def test_a_folder_without_a_manifest_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"manifest\.json"):
        open_shards(tmp_path)


def test_a_file_the_manifest_does_not_name_is_no_shard(tmp_path):
    write(tmp_path, 2)
    (tmp_path / shard_name(1)).write_bytes((tmp_path / shard_name(0)).read_bytes())
    assert len(open_shards(tmp_path)) == 2


def test_leftover_temporary_files_go_when_writing_goes_on(tmp_path):
    write(tmp_path, 2)
    (tmp_path / (shard_name(1) + ".tmp")).write_bytes(b"half a shard")
    ShardWriter(tmp_path, read_manifest(tmp_path / MANIFEST_NAME, ShardManifest))
    assert sorted(path.name for path in tmp_path.iterdir()) == [MANIFEST_NAME, shard_name(0)]


def test_consumed_shards_go_from_the_disk_and_stay_in_the_manifest(tmp_path):
    writer = write(tmp_path, 2, 2, 2)
    entries = [entry.model_copy(update={"round": n}) for n, entry in enumerate(writer.manifest.shards)]
    for entry in entries:
        writer.add(entry)
    writer.consume_before(2)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [shard_name(2)]
    found = read_manifest(tmp_path / MANIFEST_NAME, ShardManifest)
    assert [entry.is_consumed for entry in found.shards] == [True, True, False]
    assert [entry.sha256 for entry in found.shards] == [entry.sha256 for entry in entries]


def test_a_consumed_file_that_an_interruption_left_goes_when_writing_goes_on(tmp_path):
    writer = write(tmp_path, 2, 2)
    first = writer.manifest.shards[0].model_copy(update={"is_consumed": True})
    writer.add(first)
    assert (tmp_path / first.file).exists()
    ShardWriter(tmp_path, read_manifest(tmp_path / MANIFEST_NAME, ShardManifest))
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [shard_name(1)]


def test_a_shard_written_again_replaces_its_entry(tmp_path):
    writer = write(tmp_path, 2, 2)
    writer.add(write_shard_file(tmp_path, 0, [sequence(50)], ["p"]))
    assert [entry.sequences for entry in writer.manifest.shards] == [1, 2]
    check_equal(open_shards(tmp_path)[0], sequence(50))


def test_dropped_prompts_and_completeness_are_said_at_the_end(tmp_path):
    writer = write(tmp_path, 2)
    assert not open_shards(tmp_path).manifest.complete
    writer.finish({"empty_answer": 3})
    manifest = open_shards(tmp_path).manifest
    assert manifest.complete
    assert manifest.dropped == {"empty_answer": 3}


def test_states_of_another_precision_are_not_mixed_in(tmp_path):
    odd = sequence(1)
    odd = Sequence(odd.token_ids, odd.loss_mask, odd.hidden.float())
    with pytest.raises(AssertionError, match="hidden"):
        write_shard_file(tmp_path, 0, [sequence(0), odd], ["a", "b"])
    assert not list(tmp_path.glob("shard*"))


def test_final_states_are_read_by_those_who_ask_for_them(tmp_path):
    sequences = [with_final(sequence(seed)) for seed in range(3)]
    writer = ShardWriter(tmp_path, EMPTY.model_copy(update={"final_states": True}))
    writer.add(write_shard_file(tmp_path, 0, sequences, ["a", "b", "c"]))
    for found, expected in zip(open_shards(tmp_path, with_final=True), sequences, strict=True):
        check_equal(found, expected)
        assert torch.equal(found.final, expected.final)
    assert open_shards(tmp_path)[1].final is None


def test_shards_without_final_states_are_said_to_have_none(tmp_path):
    write(tmp_path, 2)
    with pytest.raises(UserError, match=r"write data\.final_states=true, and make the shards again"):
        open_shards(tmp_path, with_final=True)
