"""Small tensors for the tests of losses: B samples, S response tokens."""

import torch

NAN = float("nan")
AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
KINDS = ("ppo_clip", "gspo", "cispo", "policy_gradient")
CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def rows(*values):
    return torch.tensor(values, dtype=torch.float32)


def mask(*values):
    return torch.tensor(values, dtype=torch.bool)


def random_batch(seed, samples=5, tokens=6):
    """Log-probs, old log-probs, advantages, values … [B, S] each, and a mask of right-padded responses with holes (one of them empty)."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(samples, tokens, generator=generator) for _ in range(5)]
    lengths = torch.randint(0, tokens + 1, (samples,), generator=generator)
    lengths[0] = 0
    holes = torch.rand(samples, tokens, generator=generator) < 0.2
    return tensors, (torch.arange(tokens) < lengths[:, None]) & ~holes
