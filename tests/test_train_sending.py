"""Batches reach the device whole and in order, one ahead, and overwrite nothing on their way."""

from dataclasses import replace

import pytest
import torch
from small_training import DRAFTER, make_sequence

from recipes.schema import Train
from train.batches import Batch
from train.feed import Feed
from train.sending import Sender, Sent

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SEQUENCES = [make_sequence(index) for index in range(7)]
TRAIN = Train(steps=9, sequences_per_step=5, num_anchors=3, micro_batch_sequences=1)

on_cuda = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")


def make_batches(step: int = 0) -> list[Batch]:
    feed = Feed(SEQUENCES, TRAIN, DRAFTER, 0, 1, pins=DEVICE.type == "cuda")
    return [micro.batch for micro in feed.read_step(step)]


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    """All that a device reads, on the host."""
    found: list[torch.Tensor] = []

    def note(part: torch.Tensor) -> torch.Tensor:
        found.append(part.cpu())
        return part

    batch.map(note, note)
    return found


def assert_alike(got: Batch, expected: Batch) -> None:
    for ours, theirs in zip(tensors_of(got), tensors_of(expected), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_final", [False, True])
def test_a_sent_batch_is_the_batch_on_the_device(dtype: torch.dtype, with_final: bool):
    batch = make_batches()[0]
    if with_final:
        batch = replace(batch, final_QD=torch.randn(len(batch.input_ids_Q), 8).bfloat16())
    sent = Sender(DEVICE, dtype).send(batch).receive()
    assert sent.taps_SE.device.type == DEVICE.type
    assert sent.taps_SE.dtype == dtype
    assert_alike(sent, batch.to(DEVICE, dtype))


def test_all_batches_come_in_order_and_the_next_is_on_its_way_before_one_is_used():
    batches, sent = make_batches(), []

    class Noting(Sender):
        def send(self, batch: Batch) -> Sent:
            sent.append(batch)
            return super().send(batch)

    coming = Noting(DEVICE, torch.float32).send_ahead(batches)
    for number, batch in enumerate(batches):
        assert_alike(next(coming), batch.to(DEVICE, torch.float32))
        assert len(sent) == min(number + 2, len(batches))
    assert next(coming, None) is None


def test_what_is_on_its_way_already_is_not_sent_again():
    batches = make_batches()
    sender = Sender(DEVICE, torch.float32)
    first = sender.send(batches[0])
    received = list(sender.send_ahead([first, *batches[1:]]))
    for ours, batch in zip(received, batches, strict=True):
        assert_alike(ours, batch.to(DEVICE, torch.float32))


def test_a_batch_is_let_go_when_it_is_received():
    sent = Sender(DEVICE, torch.float32).send(make_batches()[0])
    sent.receive()
    with pytest.raises(AssertionError):
        sent.receive()


@on_cuda
def test_a_batch_waits_for_work_that_still_reads_its_place():
    batch = make_batches()[0]
    size = 4 * batch.taps_SE.numel()
    for _ in range(3):
        torch.cuda.empty_cache()
        before = torch.ones(size, device=DEVICE)
        place = range(before.data_ptr(), before.data_ptr() + before.nbytes)
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
        read = before.clone()
        del before
        sent = Sender(DEVICE, torch.float32).send(batch)
        batch_there = sent.receive()
        assert batch_there.taps_SE.data_ptr() in place, "another place proves nothing"
        assert bool((read == 1).all())
        assert_alike(batch_there, batch.to(DEVICE, torch.float32))


@on_cuda
def test_what_computes_waits_for_its_batch():
    batch = make_batches()[0]
    sender = Sender(DEVICE, torch.float32)
    with torch.cuda.stream(sender._stream):
        torch.cuda._sleep(200_000_000)
    received = sender.send(batch).receive()
    assert torch.equal((received.taps_SE * 1).cpu(), batch.taps_SE.float())
