"""Codes by which ranks compare what they move."""

import torch

from numadist.comm import dtypes


def test_every_dtype_has_one_code_of_a_byte():
    everything = {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    assert set(dtypes.CODES) == everything
    assert len(set(dtypes.CODES.values())) == len(everything)
    assert max(dtypes.CODES.values()) < 256


def test_names_are_torch_names():
    assert dtypes.NAMES[dtypes.CODES[torch.bfloat16]] == "bfloat16"
    assert dtypes.NAMES[dtypes.CODES[torch.float8_e4m3fn]] == "float8_e4m3fn"
