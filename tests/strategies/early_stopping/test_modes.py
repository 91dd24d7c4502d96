"""Names of metrics as people give them."""

from __future__ import annotations

import pytest

from strategies.early_stopping.modes import mode_of

LOW = """loss val_loss valid/loss val-loss ValLoss eval_loss val/box_loss validation/wer mse val_mae
val_mean_squared_error val_crossentropy CrossEntropyLoss perplexity val_ppl fid nll test_rmse
val_categorical_crossentropy val_loss_epoch val_loss/dataloader_idx_0 accuracy_loss map_error"""
HIGH = """acc val_acc val_accuracy valid/BinaryAccuracy val_f1 F1Score val/auc AUROC val_AUC mAP
metrics/mAP50-95(B) metrics/mAP_0.5:0.95 val_iou IoU mIoU val_mean_io_u dice DiceCoefficient
precision recall val_top5 bleu BLEU ssim PSNR r2 ndcg@10 val_sparse_categorical_accuracy reward
episode_return MulticlassAccuracy val_dice/dataloader_idx_1"""


@pytest.mark.parametrize(
    ("name", "mode"),
    [(n, "min") for n in LOW.split()] + [(n, "max") for n in HIGH.split()],
)
def test_auto(name: str, mode: str) -> None:
    assert mode_of(name) == mode


@pytest.mark.parametrize("name", ["val_metric", "foo", "", "score", "lr", "classification_time"])
def test_auto_says_when_it_cannot_tell(name: str) -> None:
    with pytest.raises(ValueError, match=f"cannot tell .*{name!r}.* pass mode='min' or mode='max'"):
        mode_of(name)


def test_given_modes_win() -> None:
    assert mode_of("val_loss", "max") == "max"
    with pytest.raises(ValueError, match="mode must be 'min', 'max' or 'auto', got 'mean'"):
        mode_of("val_loss", "mean")
