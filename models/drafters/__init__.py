"""Models that guess what a target model will say next: small, with the target's embedding and head. What proposes with
them is runtime/speculate.
"""
