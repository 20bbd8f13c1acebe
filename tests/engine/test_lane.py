from __future__ import annotations

import threading

import pytest
import torch

from ktc.engine.lane import Lane, single_threaded


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_piece_runs_once(threads: int) -> None:
    done: list[int] = []
    Lane(threads).run(done.append, range(100))
    assert sorted(done) == list(range(100))


def test_an_exception_of_any_piece_is_raised_after_the_others_ended() -> None:
    lane, running = Lane(3), threading.Semaphore(0)

    def piece(i: int) -> None:
        running.release()
        if i == 7:
            raise RuntimeError("piece 7")

    for _ in range(20):
        with pytest.raises(RuntimeError, match="piece 7"):
            lane.run(piece, range(30))
    done: list[int] = []
    lane.run(done.append, range(10))
    assert len(done) == 10


def test_pieces_may_write_to_inference_tensors() -> None:
    lane = Lane(4)
    with torch.inference_mode():
        out = torch.zeros(64)

        def piece(i: int) -> None:
            out[i] = i

        lane.run(piece, range(64))
    assert out.tolist() == list(range(64))


def test_a_forward_has_one_torch_thread_and_gives_the_setting_back() -> None:
    before = torch.get_num_threads()

    class Probe(torch.nn.Module):
        def forward(self, fail: bool) -> int:
            if fail:
                raise ValueError("in forward")
            return torch.get_num_threads()

    probe = Probe()
    single_threaded(probe)
    try:
        torch.set_num_threads(3)
        assert probe(False) == 1 and torch.get_num_threads() == 3
        with pytest.raises(ValueError, match="in forward"):
            probe(True)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
