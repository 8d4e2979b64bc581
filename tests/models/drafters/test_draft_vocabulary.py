"""Reduced draft vocabularies: where their ids come from, what is refused, and which head they get."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from models.checkpoint import WeightsError, locate_tensors
from models.drafters.draft_config import DFlashConfig, MTPConfig
from models.drafters.draft_head import DraftHead
from models.drafters.draft_vocabulary import chosen_ids, mapped_ids
from models.drafters.load import load_head, load_mtp
from models.layers.decoder import Decoder
from models.registry import config_from_dict
from models.weights import load_model
from parallel.comm.collectives import Collectives, SingleRank
from runtime.speculate.guesses import likeliest_few
from tests.models.drafters.test_drafters import TARGET
from tests.models.drafters.tiny_drafters import SIZES, dflash_config, mtp_config, mtp_tensors, write
from tests.plant import reference_kernels
from tests.runtime.engine.tensor_ranks import Meeting, MetCollectives

VOCABULARY = SIZES["vocab_size"]
IDS = (3, 4, 9, 20, 36)


def target(collectives: Collectives | None = None) -> Decoder:
    config = config_from_dict(TARGET)
    how: dict[str, Any] = {"load_format": "dummy", "kernels": reference_kernels(), "seed": 3}
    return load_model(config, None, collectives=collectives or SingleRank(), **how)


@pytest.mark.parametrize("text", ["[9, 3, 4, 36, 20]", "9 3\n4 36 20\n", "9,3, 4,36,20"])
def test_a_file_of_ids_is_a_list_in_any_order(text: str, tmp_path: Path) -> None:
    (tmp_path / "ids").write_text(text, encoding="utf-8")
    assert chosen_ids(str(tmp_path / "ids"), VOCABULARY) == IDS
    assert chosen_ids(4, VOCABULARY) == (0, 1, 2, 3)
    assert chosen_ids(VOCABULARY, VOCABULARY) == tuple(range(VOCABULARY))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "holds no ids.*leave token_map out"),
        ("\n", "holds no ids"),
        ("[1, 37]", "holds id 37, but the target's vocabulary has 37 ids, 0 to 36.*use the file made for"),
        ("-1 2", "holds id -1, but"),
        ("[1, 2, 1]", "holds 3 ids, but 2 different ones: 1 is repeated; leave each but once"),
        ("[1, 2.5]", "holds 2.5, which is not a token id"),
        ("[true]", "holds True, which is not a token id"),
        ("one two", "holds 'one', which is not a token id"),
        ('{"1": 2}', "must hold a list of ids, not a dict"),
        ("[1, 2", "cannot be read"),
        (None, "cannot be read.*name a file"),
    ],
)
def test_files_that_are_refused(text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "ids").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        chosen_ids(str(tmp_path / "ids"), VOCABULARY)


def test_more_ids_than_there_are_and_pickles_are_refused_with_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'first 38 ids, but .* has 37: type "token_map": 37 or less'):
        chosen_ids(38, VOCABULARY)
    with pytest.raises(ValueError, match=r"freq\.pt is a pickle.*python -c .*> ids\.json"):
        chosen_ids("freq.pt", VOCABULARY)


def maps(ids: tuple[int, ...] = IDS) -> dict[str, Tensor]:
    mask = torch.zeros(VOCABULARY, dtype=torch.bool)
    mask[list(ids)] = True
    return {"d2t": torch.tensor(ids) - torch.arange(len(ids)), "t2d": mask}


Change = Callable[[dict[str, Tensor]], object]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("d2t"), "'t2d' without 'd2t'"),
        (lambda t: t["d2t"].__setitem__(4, 33), "maps to id 37, but the target's vocabulary has 37 ids"),
        (lambda t: t["d2t"].__setitem__(0, -1), "maps to id -1"),
        (lambda t: t["d2t"].__setitem__(1, 2), "maps 5 ids to 4 different ones"),
        (lambda t: t["t2d"].__setitem__(5, True), "'t2d' marks other ids"),
        (lambda t: t.update(t2d=t["t2d"][:30].clone()), r"'t2d' has shape \[30\], but .* 37"),
        (lambda t: t.update(d2t=t["d2t"].float()), "'d2t' must be a list of integers"),
    ],
)
def test_maps_of_a_checkpoint_that_are_refused(change: Change, said: str, tmp_path: Path) -> None:
    tensors = maps()
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=said):
        mapped_ids(locate_tensors(tmp_path), VOCABULARY, None)


def test_the_config_must_say_as_many_ids_as_the_map_has(tmp_path: Path) -> None:
    save_file(maps(), tmp_path / "model.safetensors")
    assert mapped_ids(locate_tensors(tmp_path), VOCABULARY, 5) == IDS
    with pytest.raises(WeightsError, match=r"'d2t' maps 5 ids, but .* 'draft_vocab_size' 6"):
        mapped_ids(locate_tensors(tmp_path), VOCABULARY, 6)
    with pytest.raises(ValueError, match="'draft_vocab_size' is 38, but 'vocab_size' 37"):
        MTPConfig.from_dict(mtp_config(draft_vocab_size=38))
    assert DFlashConfig.from_dict(dflash_config(draft_vocab_size=5)).draft_vocab_size == 5


def guesses_of(head: DraftHead, hidden_RN: Tensor) -> Tensor:
    return head.target_ids(head.all_logits(hidden_RN).argmax(1))


def test_the_head_of_a_drafters_folder_is_its_own_or_the_targets_rows(tmp_path: Path) -> None:
    """Ids in the checkpoint's order, which need not ascend."""
    model, ids = target(), (20, 3, 36, 4, 9)
    tensors = {**mtp_tensors(mtp_config()), **maps(ids)}
    config = MTPConfig.from_dict(mtp_config(draft_vocab_size=5))
    folder = write(tmp_path, mtp_config(draft_vocab_size=5), tensors)
    load_mtp(model, config, folder)  # which leaves the maps to the head
    hidden = torch.randn(7, SIZES["hidden_size"])
    head = load_head(model, config, folder)
    torch.testing.assert_close(head.logits(hidden), model.logits(hidden)[:, list(ids)])
    assert head.target_ids(torch.arange(5)).tolist() == list(ids)
    with pytest.raises(WeightsError, match=r"names 2 ids, but the drafter .* among 5 of its own.*leave token_map out"):
        load_head(model, config, folder, (1, 2))

    own = torch.randn(5, SIZES["hidden_size"])
    write(tmp_path, mtp_config(draft_vocab_size=5), {**tensors, "lm_head.weight": own})
    load_mtp(model, config, folder)
    torch.testing.assert_close(load_head(model, config, folder).logits(hidden), hidden @ own.T)

    write(tmp_path, mtp_config(), {**mtp_tensors(mtp_config()), "lm_head.weight": own})
    with pytest.raises(WeightsError, match=r"does not have.*lm_head\.weight"):
        load_mtp(model, MTPConfig.from_dict(mtp_config()), folder)
    write(tmp_path, mtp_config(), mtp_tensors(mtp_config()))
    with pytest.raises(WeightsError, match="'draft_vocab_size' is 5 of 37, but no tensor 'd2t'"):
        load_head(model, config, folder)
    assert load_head(model, config, folder, load_format="dummy").target_ids(torch.tensor([4])).tolist() == [4]
    assert load_head(model, MTPConfig.from_dict(mtp_config()), folder).size == VOCABULARY


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_computes_as_many_rows_whichever_ids_there_are(ranks: int) -> None:
    """All ids are rank 0's in the whole head. What a tree takes of them is as of one rank."""
    ids, hidden = (0, 2, 3, 5, 7, 8, 11), torch.randn(5, SIZES["hidden_size"])
    alone = DraftHead.rows_of(target(), ids)
    logprobs, index = alone.all_logits(hidden).log_softmax(-1).topk(6)
    meeting = Meeting(ranks)

    def one(rank: int) -> tuple[Tensor, int, tuple[Tensor, Tensor]]:
        model = target(MetCollectives(meeting, rank))
        head = DraftHead.rows_of(model, ids)
        return head.all_logits(hidden), head.logits(hidden).shape[1], likeliest_few(head, hidden, 6)

    with ThreadPoolExecutor(ranks) as threads:
        for logits, width, few in threads.map(one, range(ranks)):
            torch.testing.assert_close(logits, alone.all_logits(hidden))
            assert width == -(-len(ids) // ranks)
            assert torch.equal(few[0], torch.tensor(ids)[index])
            torch.testing.assert_close(few[1], logprobs)
