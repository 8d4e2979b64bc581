"""Mistral (Jiang et al. 2023), 7B from v0.2 on and what followed: Llama without sliding windows and biases.

Knows: that it differs from Llama in defaults alone (models/config.py). Does not know: how a layer computes.
"""

from __future__ import annotations

from models.families.llama import Llama


class Mistral(Llama):
    pass
