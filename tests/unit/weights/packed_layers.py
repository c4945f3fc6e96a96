"""Linear layers as AWQ, GPTQ and compressed-tensors pack them, number by number."""

import torch


def words(values_RC, bits, order=None):
    """Numbers along the last dim into int32 words, lowest bits first; order: which of a word's numbers comes first."""
    num = 32 // bits
    order = order or range(num)
    packed = torch.zeros(len(values_RC), -(-values_RC.shape[1] // num), dtype=torch.int64)
    for r, row in enumerate(values_RC.tolist()):
        for c in range(0, len(row), num):
            for place, which in enumerate(order):
                if c + which < len(row):
                    packed[r, c // num] |= row[c + which] << (bits * place)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def layer(method, num_out=16, num_in=256, group=64, bits=4, symmetric=False, act_order=False, offset=1):
    """(tensors, weights [N, K] in f32)."""
    torch.manual_seed(num_in + group)
    num_groups = -(-num_in // group)
    codes = torch.randint(1 << bits, (num_out, num_in))
    scale = (torch.rand(num_out, num_groups) / 50 + 0.001).half()
    zero = torch.full((num_out, num_groups), 1 << (bits - 1))
    if not symmetric:
        zero = torch.randint(1 << bits, (num_out, num_groups))
    group_of = torch.arange(num_in) // group
    if act_order:
        group_of = group_of[torch.randperm(num_in)]
    weights = scale.float()[:, group_of] * (codes - zero[:, group_of]).float()
    if method == "gptq":
        pieces = {
            "qweight": words(codes, bits).t().contiguous(),
            "qzeros": words((zero.t() - offset) % (1 << bits), bits),
            "scales": scale.t().contiguous(),
            "g_idx": group_of.int(),
        }
    elif method == "awq":
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        pieces = {
            "qweight": words(codes.t(), 4, order),
            "qzeros": words(zero.t(), 4, order),
            "scales": scale.t().contiguous(),
        }
    elif method == "pack-quantized":
        pieces = {
            "weight_packed": words(codes, bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor([num_out, num_in]),
        }
        if not symmetric:
            pieces["weight_zero_point"] = words(zero.t(), bits).t().contiguous()
        if act_order:
            pieces["weight_g_idx"] = group_of.int()
    else:
        pieces = {"weight": (codes - 128).to(torch.int8), "weight_scale": scale}
    return pieces, weights
