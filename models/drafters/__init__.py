"""Draft models: small, with the target's embedding and head. What proposes with
them is runtime/speculate.
"""
