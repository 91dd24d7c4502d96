"""Whether a metric is better low or high, by its name."""

from __future__ import annotations

import re

from strategies.early_stopping.history import MODES

_HIGH = {
    "acc", "accuracy", "ap", "ar", "auc", "auprc", "auroc", "bleu", "chrf", "cider", "corr",
    "correlation", "dice", "em", "f", "f1", "f2", "fbeta", "fmeasure", "iou", "jaccard", "kappa",
    "map", "map50", "mar", "mcc", "meteor", "miou", "mrr", "ndcg", "pearson", "pearsonr",
    "precision", "pr", "psnr", "r2", "recall", "return", "reward", "roc", "rouge", "rouge1",
    "rouge2", "rougel", "sensitivity", "spearman", "spearmanr", "specificity", "ssim", "top1",
    "top5",
}  # fmt: skip
_LOW = {
    "bce", "bpb", "bpc", "brier", "ce", "cer", "crossentropy", "der", "divergence", "ece", "eer",
    "elbo", "energy", "entropy", "epe", "err", "error", "fid", "hinge", "huber", "kid", "kl", "kld",
    "logcosh", "loss", "lpips", "mae", "mape", "mer", "mpjpe", "mse", "msle", "nll", "perplexity",
    "poisson", "ppl", "rmse", "rmsle", "smape", "ter", "wer",
}  # fmt: skip


def mode_of(monitor: str, mode: str = "auto") -> str:
    """Find out whether a metric is better low or high.

    Args:
        monitor: Name of the metric, such as `"val_loss"` or `"val/binary_accuracy"`.
        mode: `"min"` or `"max"`, which settle it, or `"auto"`, which goes by the words in the name.

    Returns:
        `"min"` or `"max"`.

    Raises:
        ValueError: `mode` is unknown, or it is `"auto"` and the name does not tell.

    Example:
        >>> mode_of("val_loss"), mode_of("valid/BinaryAccuracy"), mode_of("mAP@50")
        ('min', 'max', 'max')
    """
    if mode in MODES:
        return mode
    if mode != "auto":
        raise ValueError(f"mode must be 'min', 'max' or 'auto', got {mode!r}")
    # CamelCase falls into words; "mAP", "IoU" and "AUC" do not, so the parts are tried whole too.
    parts = re.split(r"[^A-Za-z0-9]+", monitor.replace("io_u", "iou"))  # Keras' MeanIoU
    words = {word.lower() for part in parts for word in [part, *re.findall(_WORD, part)]}
    high, low = bool(words & _HIGH), bool(words & _LOW)
    if low and words & {"error", "err", "loss"}:
        high = False  # "accuracy_loss", "map_error": the last word counts
    if high == low:
        raise ValueError(
            f"mode='auto' cannot tell from the name whether {monitor!r} is better low or high; "
            "pass mode='min' or mode='max'"
        )
    return "max" if high else "min"


_WORD = r"[A-Z]?[a-z]+\d*|[A-Z]+\d*(?![a-z])"
