"""serve/tensor_file.py: files that the safetensors library reads, whole or not there."""

import errno
import hashlib
import resource
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from serve.tensor_file import GrowingFile, TensorParts, write_tensors

ROWS = torch.arange(24, dtype=torch.float32).reshape(8, 3).bfloat16()


def parts_of_rows(*sizes: int) -> TensorParts:
    return TensorParts(torch.bfloat16, (sum(sizes), 3), ROWS[: sum(sizes)].split(list(sizes)))


def test_the_library_reads_what_was_written_in_pieces(tmp_path):
    path = tmp_path / "a.safetensors"
    mask = torch.tensor([True, False, True])
    tensors = {"rows": parts_of_rows(1, 0, 5, 2), "mask": TensorParts(torch.bool, (3,), [mask])}
    write_tensors(path, tensors, {"note": "x"})
    found = load_file(path)
    assert torch.equal(found["rows"], ROWS)
    assert torch.equal(found["mask"], mask)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"note": "x"}


def test_the_checksum_is_the_files(tmp_path):
    path = tmp_path / "a.safetensors"
    digest = hashlib.sha256()
    write_tensors(path, {"rows": parts_of_rows(8)}, digest=digest)
    assert digest.hexdigest() == hashlib.sha256(path.read_bytes()).hexdigest()


def test_pieces_that_do_not_make_the_shape_are_refused(tmp_path):
    with pytest.raises(AssertionError, match="rows"):
        write_tensors(tmp_path / "a", {"rows": TensorParts(torch.bfloat16, (8, 3), [ROWS[:7]])})
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing_behind_and_the_old_file_whole(tmp_path):
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"rows": parts_of_rows(8)})
    before = path.read_bytes()

    def pieces_until_the_disk_is_full():
        yield ROWS[:4]
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"No space left.*a\.safetensors"):
        tensors = {"rows": TensorParts(torch.bfloat16, (8, 3), pieces_until_the_disk_is_full())}
        write_tensors(path, tensors)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_a_write_that_the_system_refuses_leaves_nothing_behind(tmp_path):
    script = (
        "import resource, sys, torch; from pathlib import Path;"
        "from serve.tensor_file import TensorParts, write_tensors;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096));"
        "zeros = torch.zeros(9999, dtype=torch.int32);"
        "write_tensors(Path(sys.argv[1]), {'a': TensorParts(torch.int32, (9999,), [zeros])})"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "a")], capture_output=True, text=True, check=False
    )
    assert "File too large" in run.stderr
    assert not list(tmp_path.iterdir())


# A file whose rows come while nobody knows how many there will be


ONE_ROW = {
    "rows": TensorParts(torch.bfloat16, (1, 3), ()),
    "numbers": TensorParts(torch.int32, (1,), ()),
}


def numbers(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32)


def test_the_library_reads_rows_that_came_one_after_another(tmp_path):
    path = tmp_path / "a.safetensors"
    file = GrowingFile(tmp_path / "a.tmp", ONE_ROW, {"note": "x"})
    for first, end in ((0, 1), (1, 6), (6, 8)):
        file.write_rows(first, ROWS[first:end])
    assert not path.exists()
    file.finish(path, 8, numbers(8))
    found = load_file(path)
    assert torch.equal(found["rows"], ROWS)
    assert torch.equal(found["numbers"], numbers(8))
    with safe_open(path, framework="pt") as read:
        assert read.metadata() == {"note": "x"}
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_rows_can_be_written_anew_and_the_last_ones_forgotten(tmp_path, count):
    path = tmp_path / "a.safetensors"
    file = GrowingFile(tmp_path / "a.tmp", ONE_ROW, {})
    file.write_rows(0, ROWS.flip(0))
    file.write_rows(0, ROWS[:6].contiguous())
    file.finish(path, count, numbers(count))
    found = load_file(path)
    assert torch.equal(found["rows"], ROWS[:count])
    assert torch.equal(found["numbers"], numbers(count))


def test_a_file_that_is_given_up_is_gone(tmp_path):
    file = GrowingFile(tmp_path / "a.tmp", ONE_ROW, {})
    file.write_rows(0, ROWS)
    file.discard()
    assert not list(tmp_path.iterdir())
