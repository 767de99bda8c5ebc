"""Tokens become text while the device works, a few rows a step, and all at once where nobody looks for a stop text."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import assert_empty, greedy, tiny_engine
from tiny import tiny_model

from minivllm import engine as engine_module
from minivllm.sequence import Sequence


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def test_little_is_left_at_the_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    end = Sequence.end

    def watched(self: Sequence, *args, **kwargs) -> None:
        left.append(self.num_output - self.text.num_tokens)
        end(self, *args, **kwargs)

    monkeypatch.setattr(Sequence, "end", watched)
    monkeypatch.setattr(engine_module, "_TEXT_TURNS", 8)
    prompts = [[1 + i, 5, 9] for i in range(3)]
    with tiny_engine(path, num_slots=3, num_blocks=64) as engine:
        answers = engine.generate(prompts, greedy(60, ignore_eos=True))
        assert len(left) == 3
        assert max(left) <= 8 + 1
        assert_empty(engine)
        for g in answers:
            assert g.text == engine.tokenizer.decode(g.token_ids)
        stopped = engine.generate(prompts, greedy(60, ignore_eos=True, stop="never seen there"))
    assert [g.text for g in stopped] == [g.text for g in answers]
